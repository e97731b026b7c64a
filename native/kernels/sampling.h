// The passes of the sampler over whole rows of logits. n is a multiple of 16 unless said otherwise.
#pragma once

// The largest; NaN if any is NaN.
static float row_max(const float *x, int64_t n) {
    F best = splat(-INF);
    I odd = {};
    for (int64_t i = 0; i < n; i += LANES) {
        const F v = load<F>(x + i);
        best = max_keep(best, v);
        odd |= v != v;
    }
    int32_t any = 0;
    for (int l = 0; l < LANES; l++) any |= odd[l];
    return any ? __builtin_nanf("") : max_lanes(best);
}

static float row_sum_exp(const float *x, int64_t n, float max) {
    float total = 0;
    for (int64_t base = 0; base < n; base += 4096) {
        const int64_t end = base + 4096 < n ? base + 4096 : n;
        F sum = {};
        for (int64_t i = base; i < end; i += LANES) sum = sum + exp_small(load<F>(x + i) - max);
        total += sum_lanes(sum);
    }
    return total;
}

static int64_t row_count_above(const float *x, int64_t n, float bound) {
    I count = {};
    for (int64_t i = 0; i < n; i += LANES) count -= load<F>(x + i) > splat(bound);
    int64_t total = 0;
    for (int l = 0; l < LANES; l++) total += count[l];
    return total;
}

static int64_t row_first_equal(const float *x, int64_t n, float value) {
    for (int64_t i = 0; i < n; i += LANES) {
        I hit = load<F>(x + i) == splat(value);
        int32_t any = 0;
        for (int l = 0; l < LANES; l++) any |= hit[l];
        if (any)
            for (int l = 0; l < LANES; l++)
                if (hit[l]) return i + l;
    }
    return -1;
}

static void row_edit(float *dst, const float *x, const uint32_t *mask, const float *bias, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        F v = load<F>(x + i);
        if (bias) v = v + load<F>(bias + i);
        if (mask) {
            const I bit = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
            I allowed = isplat((int32_t)(mask[i / 32] >> (i % 32))) & bit;
            v = pick(allowed != I{}, v, splat(-INF));
        }
        store<F>(dst + i, v);
    }
    for (; i < n; i++) {
        float v = bias ? x[i] + bias[i] : x[i];
        dst[i] = mask && !((mask[i / 32] >> (i % 32)) & 1) ? -INF : v;
    }
}

// Whole-number weights, so that sums have no order: q = round(2^30 · exp((x - max) / temperature)), 0 below min_p · the largest.
static void row_weights(uint32_t *q, const float *x, int64_t n, float max, float temperature, float min_p) {
    for (int64_t i = 0; i < n; i += LANES) {
        F p = exp_small((load<F>(x + i) - max) / temperature);
        p = pick(p >= splat(min_p), p, F{});  // NaN as well
        store<I>(q + i, lanes_to<int32_t>(p * 1073741824.0f + 0.5f));
    }
}

static uint64_t row_sum(const uint32_t *q, int64_t n) {
    uint64_t total = 0;
    for (int64_t base = 0; base < n; base += LANES * 16384) {
        const int64_t end = base + LANES * 16384 < n ? base + LANES * 16384 : n;
        U low = {}, high = {};
        for (int64_t i = base; i < end; i += LANES) {
            U v = load<U>(q + i);
            low += v & 0xffffu;
            high += v >> 16;
        }
        for (int l = 0; l < LANES; l++) total += low[l] + ((uint64_t)high[l] << 16);
    }
    return total;
}

static void exp_test(float *dst, const float *x, int64_t n, bool rounded) {
    for (int64_t i = 0; i < n; i += LANES) store<F>(dst + i, rounded ? exp_rounded(load<F>(x + i)) : exp16(load<F>(x + i)));
}
