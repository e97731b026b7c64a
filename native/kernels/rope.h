// Rotary embedding, and the writing of K and V into the cache (kv_store.h).
#pragma once

// Sine and cosine of x, |x| < 2^23: reduction by π/2 in three parts, then the Taylor series, all in double.
FN void sin_cos(float angle, float *sine, float *cosine) {
    const double x = angle;
    const double magic = 6755399441055744.0;  // 1.5 · 2^52: adding it leaves the nearest whole number
    const double k = (x * 0x1.45f306dc9c883p-1 + magic) - magic;
    const double r = ((x - k * 0x1.921fb54000000p+0) - k * 0x1.10b4611800000p-30) - k * 0x1.313198a2e0370p-61;
    const double z = r * r;
    const double s =
        r + r * z * (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 + z * (1.0 / 362880 + z * (-1.0 / 39916800 + z * (1.0 / 6227020800.0))))));
    const double c = 1.0 + z * (-0.5 + z * (1.0 / 24 + z * (-1.0 / 720 + z * (1.0 / 40320 + z * (-1.0 / 3628800 + z * (1.0 / 479001600.0))))));
    const long long quarter = (long long)k;
    const double a = quarter & 1 ? c : s, b = quarter & 1 ? s : c;
    *sine = (float)(quarter & 2 ? -a : a);
    *cosine = (float)((quarter + 1) & 2 ? -b : b);
}

// rope_table. p: positions, inv_freq, out [T][2][half]: cosines, sines. n: rows kind, half.
static void rope_table(const Op &op, const Run &run, const Part &part) {
    const int32_t *positions = (const int32_t *)op.p[0];
    const float *inv_freq = (const float *)op.p[1];
    const int64_t half = op.n[1];
    int64_t from, to;
    share(part.rows, part.thread, run.threads, &from, &to);
    for (int64_t t = from; t < to; t++) {
        float *out = (float *)op.p[2] + t * 2 * half;
        for (int64_t i = 0; i < half; i++) sin_cos((float)positions[t] * inv_freq[i], out + half + i, out + i);
    }
}

// `ahead`: floats to what is rotated soon, fetched meanwhile.
FN void rotate(const float *x, const float *table, int64_t half, int64_t ahead, float *y) {
    const auto turn = [&]<class V>(int64_t i) {
        __builtin_prefetch(x + ahead + i);
        __builtin_prefetch(x + ahead + half + i);
        const V c = load<V>(table + i), s = load<V>(table + half + i), low = load<V>(x + i), high = load<V>(x + half + i);
        store<V>(y + i, low * c - high * s);
        store<V>(y + half + i, high * c + low * s);
    };
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) turn.template operator()<F>(i);
    for (; i < half; i++) turn.template operator()<float>(i);
}

constexpr int64_t SOON = 3;  // so many tokens ahead, the cache's lines are fetched

// rope_store. p: qkv [T][ld], table, q out, positions' kv_slots, bias of qkv or null, inv_freq. n: rows kind, ld of qkv, ld of q, H,
// G, D, Dp, offset of the layer in a block (bytes), KV type. E: act; S: what the cache stores.
template <class E, class S> static void rope_store(const Op &op, const Run &run, const Part &part) {
    const float *qkv = (const float *)op.p[0], *table = (const float *)op.p[1];
    E *q = (E *)op.p[2];
    const int32_t *slots = (const int32_t *)op.p[3];
    const float *bias = (const float *)op.p[4], *inv_freq = (const float *)op.p[5];
    const int64_t ld = op.n[1], ldq = op.n[2], heads = op.n[3], groups = op.n[4], d = op.n[5], dp = op.n[6], half = d / 2;
    const int64_t per = heads / groups, rows = part.rows, ahead = 2 * ld;  // two tokens on
    alignas(64) float y[MAX_HEAD_DIM] = {}, value[MAX_HEAD_DIM] = {};  // what is written by whole registers is read again at once
    Stage<S> stage(dp);
    // Where token t goes: all lines of K, and of V those of the token. In a step that decodes each is in another block.
    const auto unit_of = [&](int64_t t, int64_t g) { return run.kv + (size_t)(slots[t] / TOKENS) * run.block_bytes + op.n[7] + g * kv_unit<S>(dp); };
    const auto fetch = [&](int64_t t, int64_t g) {
        const char *unit = unit_of(t, g), *v = unit + kv_half<S>(dp) + slots[t] % TOKENS * kv_half<S>(1) / TOKENS * LANES / 64 * 64;
        for (int64_t b = 0; b < kv_half<S>(dp); b += 64) __builtin_prefetch(unit + b, 1);
        for (int64_t c = 0; c < dp; c += LANES) __builtin_prefetch(v + kv_half<S>(c), 1);
    };
    // Many rows are shared out as linear ops do, which left them in this thread's caches; few by KV heads, too, so that there are enough.
    const bool by_rows = rows >= TOKENS * run.threads;
    int64_t from, to;
    share(by_rows ? rows : rows * groups, part.thread, run.threads, &from, &to);
    for (int64_t g = by_rows ? 0 : from / rows; g < groups && (by_rows || g * rows < to); g++) {
        const int64_t begin = by_rows ? from : from > g * rows ? from - g * rows : 0, end = by_rows ? to : to - g * rows < rows ? to - g * rows : rows;
        for (int64_t first = begin, n; first < end; first += n) {
            const int64_t soon = first + (first + 1 < rows && slots[first + 1] == slots[first] + 1 ? TOKENS : SOON);
            if (soon < end) fetch(soon, g);
            const int64_t token = slots[first] % TOKENS, most = TOKENS - token < end - first ? TOKENS - token : end - first;
            for (n = 0; n < most && slots[first + n] == slots[first] + n;) {  // the next tokens of the block
                const int64_t t = first + n;
                const float *row = qkv + t * ld, *angle = table + t * d;
                for (int64_t h = g * per; h < (g + 1) * per; h++) {
                    rotate(row + h * d, angle, half, ahead, y);
                    store_row(q + t * ldq + h * d, y, d);
                }
                if (g == groups - 1)
                    for (int64_t c = heads * d; c < ldq; c++) q[t * ldq + c] = 0;
                rotate(row + (heads + g) * d, angle, half, ahead, y);
                prepare_key<S>(y, d, dp, bias ? bias + (heads + g) * d : nullptr, inv_freq);
                const float *v = row + (heads + groups + g) * d;
                for (int64_t c = 0; c < d; c += LANES) __builtin_prefetch(v + ahead + c);
                __builtin_memcpy(value, v, (size_t)d * 4);
                stage.take(n++, y, value);
                if (run.zero_tail[t]) break;
            }
            stage.write(unit_of(first, g), token, n, run.zero_tail[first + n - 1]);
        }
    }
}
