// Panels of few bits (include/layouts.h) from 16 rows of a matrix: quantized here, or repacked from GGUF's blocks as they are.
//
// Quantizing works on 16 rows at once, one in each lane; its arithmetic is plain float32, the same on every instruction set.
#pragma once

enum Element : int32_t { ELEMENT_BF16, ELEMENT_F32, ELEMENT_BLOCKS };  // what a row's memory holds

// x[i] = values k … k + n of the 16 rows; zeros behind the end.
static void gather(const void *const rows[16], const int32_t kinds[16], int64_t k, int64_t n, int64_t end, F *x) {
    float(*lanes)[LANES] = (float(*)[LANES])x;
    for (int r = 0; r < LANES; r++)
        for (int64_t i = 0; i < n; i++) {
            const bool there = rows[r] && k + i < end;
            lanes[i][r] = !there ? 0.0f : kinds[r] == ELEMENT_F32 ? ((const float *)rows[r])[k + i] : get_act(((const bf16 *)rows[r])[k + i]);
        }
}
FN F abs16(F x) { return (F)((U)x & 0x7fffffffu); }
FN void keep_largest(I &bits, F x) {  // of magnitudes, as whole numbers: infinity and NaN are the largest
    const I mag = (I)((U)x & 0x7fffffffu);
    bits = pick(mag > bits, mag, bits);
}
FN bool finite(I bits) { return max_lanes(bits) < 0x7f800000; }
FN I clamp15(I q) {
    q = pick(q < 0, I{}, q);
    return pick(q > 15, isplat(15), q);
}

// The 32 codes of row r, one byte each, into a block.
FN void put_codes(const LayoutInfo &l, uint8_t *block, int r, const uint8_t *codes) {
    for (int k = 0; k < 32; k++) {
        const int q = k / 4, at = r * 4 + k % 4;
        if (l.bits == 8) {
            block[q * 64 + at] = codes[k];
            continue;
        }
        block[q / 2 * 64 + at] |= (uint8_t)((codes[k] & 15) << (q % 2 * 4));
        if (l.bits == 5) block[256 + at] |= (uint8_t)(codes[k] >> 4 << q);
        if (l.bits == 6) block[256 + q / 4 * 64 + at] |= (uint8_t)(codes[k] >> 4 << (q % 4 * 2));
    }
}

// x[i] and x[i + distance] become sum and difference: one stage of `spread`, for 16 rows at once.
FN void butterfly(F *x, int i, int distance) {
    const F low = x[i], high = x[i + distance];
    x[i] = low + high, x[i + distance] = low - high;
}
// As `gather`, 32 values, spread.
static void gather_spread(const void *const rows[16], const int32_t kinds[16], int64_t k, int64_t end, F *x) {
    gather(rows, kinds, k, 32, end, x);
    for (int distance = 16; distance > 0; distance /= 2)
        for (int i = 0; i < 32; i++)
            if (!(i & distance)) butterfly(x, i, distance);
}

// int8, of spread rows: scale = the row's largest magnitude / 127 / 32, code = x · (127 / largest) to nearest even, + 128.
static bool pack_int8(uint8_t *panel, const void *const rows[16], const int32_t kinds[16], int64_t k, int64_t kp) {
    const LayoutInfo &l = LAYOUTS[LAYOUT_INT8];
    F x[32], most = {};
    I bits = {};
    for (int64_t b = 0; b < kp; b += 32) {
        gather_spread(rows, kinds, b, k, x);
        for (int i = 0; i < 32; i++) keep_largest(bits, x[i]), most = max_keep(most, abs16(x[i]));
    }
    if (!finite(bits)) return false;
    const I some = most >= splat(8.6736174e-19f);  // 2^-60
    const F scale = pick(some, most / 127.0f, F{}), inverse = pick(some, 127.0f / most, F{});
    store<F>(panel, scale * 0x1p-5f);
    __builtin_memset(panel + scale_bytes(l, kp), l.zero, (size_t)(pad64(kp) * LANES));
    for (int64_t b = 0; b < kp; b += 32) {
        uint8_t *block = panel + scale_bytes(l, kp) + b / 32 * code_bytes(l);
        gather_spread(rows, kinds, b, k, x);
        for (int i = 0; i < 32; i++) {
            const I q = nearest(x[i] * inverse) + 128;
            for (int r = 0; r < LANES; r++) block[i / 4 * 64 + r * 4 + i % 4] = (uint8_t)q[r];
        }
    }
    return true;
}

// float32 to float16, to nearest even, and what that is in float32 again. Beyond the range: infinity.
FN uint16_t to_half(float x) {
    uint32_t u = as_bits(x), sign = u >> 16 & 0x8000u, mag = u & 0x7fffffffu;
    if (mag >= 0x47800000u) return (uint16_t)(sign | (mag > 0x7f800000u ? 0x7e00u : 0x7c00u));
    if (mag < 0x38800000u) {  // a multiple of 2^-24
        const float scaled = as_float(mag) * 16777216.0f + 12582912.0f;
        return (uint16_t)(sign | (as_bits(scaled) - 0x4b400000u));
    }
    return (uint16_t)(sign | ((mag + 0xfffu + (mag >> 13 & 1u) - 0x38000000u) >> 13));
}
FN float from_half(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, em = h & 0x7fffu;
    const float small = (float)em * 5.9604644775390625e-8f;
    const uint32_t u = em < 0x400 ? as_bits(small) : em < 0x7c00 ? (em << 13) + (112u << 23) : (em << 13) + (224u << 23);
    return as_float(u | sign);
}
FN F through_half(F x) {
    float y[LANES];
    for (int r = 0; r < LANES; r++) y[r] = from_half(to_half(x[r]));
    return load<F>(y);
}

// Scale and minimum of n values a lane, that make the squared error small: ranges around min … max are tried, and for the codes of
// each the best scale and minimum follow by least squares. `half`: both will be stored as float16.
static void fit4(const F *x, int64_t n, bool half, F *best_scale, F *best_minimum) {
    F low = x[0], high = x[0], sum = {};
    for (int64_t i = 0; i < n; i++) low = pick(x[i] < low, x[i], low), high = pick(x[i] > high, x[i], high), sum = sum + x[i];
    const F count = splat((float)n);
    F best = splat(INF), scale0 = (high - low) / 15.0f;
    *best_scale = half ? through_half(scale0) : scale0, *best_minimum = half ? through_half(low) : low;
    for (int turn = -1; turn < 8; turn++) {
        // -1: min … max itself, as it is; then codes over a range of 13.5 … 17 steps, and their least squares
        F scale = turn < 0 ? scale0 : (high - low) / (13.5f + 0.5f * (float)turn), minimum = low;
        F inverse = pick(scale > F{}, 1.0f / scale, F{});
        if (turn >= 0) {
            F codes = {}, squares = {}, products = {};
            for (int64_t i = 0; i < n; i++) {
                const F q = lanes_to<float>(clamp15(nearest((x[i] - low) * inverse)));
                codes = codes + q, squares = squares + q * q, products = products + q * x[i];
            }
            const F det = count * squares - codes * codes;
            const I good = det > F{};
            scale = pick(good, (count * products - codes * sum) / det, scale);
            minimum = pick(good, (sum * squares - codes * products) / det, minimum);
        }
        if (half) scale = through_half(scale), minimum = through_half(minimum);
        inverse = pick(scale > F{}, 1.0f / scale, F{});
        F error = {};
        for (int64_t i = 0; i < n; i++) {
            const F q = lanes_to<float>(clamp15(nearest((x[i] - minimum) * inverse)));
            const F e = (q * scale + minimum) - x[i];
            error = error + e * e;
        }
        const I better = error < best;  // NaN never is
        best = pick(better, error, best), *best_scale = pick(better, scale, *best_scale), *best_minimum = pick(better, minimum, *best_minimum);
    }
}

// int4 in steps of 32 (Q4_1's layout) or 128. → whether the scales fit what stores them.
static bool pack_int4(uint8_t *panel, const LayoutInfo &l, const void *const rows[16], const int32_t kinds[16], int64_t k, int64_t kp) {
    F x[128];
    bool fits = true;
    I bits = {};
    const bool half = l.scale == SCALE_HALF_MIN;
    for (int64_t b = 0, s = 0; b < kp; b += l.step, s++) {
        const int64_t n = b + l.step < kp ? l.step : kp - b, real = b + n < k ? n : k - b;  // the fit leaves the padding out
        gather(rows, kinds, b, n, k, x);
        for (int64_t i = 0; i < n; i++) keep_largest(bits, x[i]);
        F scale, minimum;
        fit4(x, real, half, &scale, &minimum);
        for (int r = 0; r < LANES; r++) {
            fits &= abs16(scale)[r] < INF && abs16(minimum)[r] < INF;
            if (half) {
                const uint16_t both[2] = {to_half(scale[r]), to_half(minimum[r])};
                __builtin_memcpy(panel + s * 64 + r * 2, &both[0], 2);
                __builtin_memcpy(panel + s * 64 + 32 + r * 2, &both[1], 2);
            }
        }
        if (!half) store<F>(panel + s * 128, scale), store<F>(panel + s * 128 + 64, minimum);
        const F inverse = pick(scale > F{}, 1.0f / scale, F{});
        for (int64_t j = 0; j < n; j++) {
            const int64_t i = b + j;
            const I q = clamp15(nearest((x[j] - minimum) * inverse));
            uint8_t *at = panel + scale_bytes(l, kp) + i / 32 * code_bytes(l) + i % 32 / 8 * 64 + i % 4;
            if (i < k)
                for (int r = 0; r < LANES; r++) at[r * 4] |= (uint8_t)(q[r] << (i / 4 % 2 * 4));
        }
    }
    return fits && finite(bits);
}

// One of GGUF's blocks of 32, row r of the panel, step s. Source: ggml, ggml-common.h.
FN void repack_small(uint8_t *panel, int32_t layout, int64_t kp, int64_t s, int r, const uint8_t *src) {
    const LayoutInfo &l = LAYOUTS[layout];
    uint8_t codes[32];
    const bool minimum = l.scale == SCALE_HALF_MIN;
    __builtin_memcpy(panel + s * (minimum ? 64 : 32) + r * 2, src, 2);
    if (minimum) __builtin_memcpy(panel + s * 64 + 32 + r * 2, src + 2, 2);
    src += minimum ? 4 : 2;
    if (l.bits == 8) {
        for (int i = 0; i < 32; i++) codes[i] = src[i] ^ 0x80;
    } else {
        uint32_t fifth = 0;
        if (l.bits == 5) __builtin_memcpy(&fifth, src, 4), src += 4;
        for (int i = 0; i < 16; i++) {
            codes[i] = (uint8_t)((src[i] & 15) | (fifth >> i & 1) << 4);
            codes[i + 16] = (uint8_t)(src[i] >> 4 | (fifth >> (i + 16) & 1) << 4);
        }
    }
    put_codes(l, panel + scale_bytes(l, kp) + s * code_bytes(l), r, codes);
}

// One of its super-blocks of 256.
FN void repack_super(uint8_t *panel, int32_t layout, int64_t kp, int64_t super, int r, const uint8_t *src) {
    const LayoutInfo &l = LAYOUTS[layout];
    uint8_t *blocks = panel + scale_bytes(l, kp) + super * 8 * code_bytes(l);
    uint8_t codes[256];
    if (layout == LAYOUT_Q6_K) {
        __builtin_memcpy(panel + super * 32 + r * 2, src + 208, 2);
        for (int i = 0; i < 16; i++) panel[kp / 256 * 32 + super * 256 + i * 16 + r] = src[192 + i];
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < 32; i++) {
                const uint8_t *low = src + half * 64, upper = src[128 + half * 32 + i];
                uint8_t *out = codes + half * 128 + i;
                out[0] = (uint8_t)((low[i] & 15) | (upper & 3) << 4);
                out[32] = (uint8_t)((low[i + 32] & 15) | (upper >> 2 & 3) << 4);
                out[64] = (uint8_t)(low[i] >> 4 | (upper >> 4 & 3) << 4);
                out[96] = (uint8_t)(low[i + 32] >> 4 | (upper >> 6) << 4);
            }
    } else {
        __builtin_memcpy(panel + super * 64 + r * 2, src, 2);
        __builtin_memcpy(panel + super * 64 + 32 + r * 2, src + 2, 2);
        const uint8_t *six = src + 4, *fifth = src + 16, *low = src + (l.bits == 5 ? 48 : 16);
        for (int i = 0; i < 8; i++) {  // eight scales and eight minima of six bits in twelve bytes
            const uint8_t scale = i < 4 ? six[i] & 63 : (uint8_t)((six[i + 4] & 15) | (six[i - 4] >> 6) << 4);
            const uint8_t minimum = i < 4 ? six[i + 4] & 63 : (uint8_t)(six[i + 4] >> 4 | (six[i] >> 6) << 4);
            uint8_t *small = panel + kp / 256 * 64 + (super * 8 + i) * 32;
            small[r] = scale, small[16 + r] = minimum;
        }
        for (int i = 0; i < 256; i++) {
            const int pair = i / 64, upper = i / 32 % 2;
            codes[i] = (low[pair * 32 + i % 32] >> (upper * 4)) & 15;
            if (l.bits == 5) codes[i] |= (uint8_t)((fifth[i % 32] >> (i / 32) & 1) << 4);
        }
    }
    for (int b = 0; b < 8; b++) put_codes(l, blocks + b * code_bytes(l), r, codes + b * 32);
}

// One panel of 16 rows of k values; rows[r] null: a row of zeros. → whether its numbers fit the layout.
static int pack_quant(void *dst, int32_t layout, const void *const rows[16], const int32_t kinds[16], int64_t k, int64_t kp) {
    const LayoutInfo &l = LAYOUTS[layout];
    uint8_t *panel = (uint8_t *)dst;
    bool blocks = false;
    for (int r = 0; r < LANES; r++) blocks |= rows[r] && kinds[r] == ELEMENT_BLOCKS;
    if (layout == LAYOUT_INT8) return pack_int8(panel, rows, kinds, k, kp);
    __builtin_memset(panel, 0, (size_t)panel_bytes(l, kp));
    if (!blocks && (layout == LAYOUT_Q4_1 || layout == LAYOUT_INT4_G128)) return pack_int4(panel, l, rows, kinds, k, kp);
    for (int r = 0; r < LANES; r++)
        for (int64_t b = 0; rows[r] && b < k / l.block; b++) {
            const uint8_t *src = (const uint8_t *)rows[r] + b * l.block_bytes;
            l.block == 32 ? repack_small(panel, layout, kp, b, r, src) : repack_super(panel, layout, kp, b, r, src);
        }
    return 1;
}
