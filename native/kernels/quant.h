// Products of quantized activations and weights of few bits: whole numbers inside a step, float32 between steps.
//
// Contract, for one row and column. Activations, per group of `group` k (the last may be short): a = the largest magnitude
// of the act values; scale = a / 127, code = x · (127 / a) to nearest even; both are 0 where a < 2^-60; scale is NaN where a
// value is not finite. Then per step of `step` k, in order, every operation rounded, none fused:
//     c ← c + (float(Σ code · (w - zero)) · act scale) · weight scale
//     c ← c + (act scale · float(Σ code)) · minimum,                        where the layout has minima
// The sums are exact. See include/layouts.h for the layouts.
//
// COLUMN has one step and one group, all of K: then nothing is left to do between products. So that one scale serves a whole row, rows are
// spread before they are quantized (kv.h: the Walsh-Hadamard transform of each 32, as QuaRot does it, Ashkboos et al. 2024), those of
// the matrix, too: one large value becomes 32 of equal magnitude, and products of spread rows are 32 times the rows', which the weight
// scale takes back.
#pragma once

FN NI nisplat(int32_t x) { return x - NI{}; }
typedef uint16_t NUS __attribute__((vector_size(OCTAVO_WIDTH * 4)));

// Four successive products in each lane of 32 bits: acc + Σ code · act. With VNNI that is one instruction. Without, codes of less than
// 8 bits are multiplied as bytes into sums of 16 bits, which HELD quads fit, and then widened; a code of 8 bits could overflow those, and
// goes in pairs of 16 bits, codes split once for all rows, activations when they are quantized.
#if defined(__AVX512VNNI__)
template <int BITS> constexpr int HELD = 0;
constexpr int quad_bytes(int) { return 4; }  // of the activations of a quad
FN NI dot4(NI acc, NU codes, const char *a) {
    int32_t quad;
    __builtin_memcpy(&quad, a, 4);
    return (NI)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, _mm512_set1_epi32(quad));
}
#elif defined(OCTAVO_AMX)  // the emulated matrix units (tiles.h) read bytes, too
template <int BITS> constexpr int HELD = 0;
constexpr int quad_bytes(int) { return 4; }
FN NI dot4(NI acc, NU codes, const char *a) {
    NU sum = (NU)acc;
    for (int j = 0; j < 4; j++) sum += ((codes >> (8 * j)) & 255u) * (NU)nisplat((int8_t)a[j]);
    return (NI)sum;
}
#elif defined(__AVX2__)
template <int BITS> constexpr int HELD = 32767 / (2 * ((1 << BITS) - 1) * 128);
constexpr int quad_bytes(int bits) { return bits < 8 ? 4 : 8; }
FN NS dot_bytes(NU codes, int32_t act) {  // of each two
#if defined(__AVX512BW__)
    return (NS)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(act));
#else
    return (NS)_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(act));
#endif
}
#else
template <int BITS> constexpr int HELD = 0;
constexpr int quad_bytes(int) { return 8; }
#endif

// Quad q of a block, register v of it.
template <int BITS> FN NU quad_of(const uint8_t *block, int q, int v) {
    const int64_t at = v * OCTAVO_WIDTH * 4;
    if constexpr (BITS == 8) return load<NU>(block + q * 64 + at);
    NU low = load<NU>(block + q / 2 * 64 + at);
    low = (q % 2 ? low >> 4 : low) & 0x0f0f0f0fu;
    if constexpr (BITS == 5) {
        const NU fifth = load<NU>(block + 256 + at);
        return low | ((q < 4 ? fifth << (4 - q) : fifth >> (q - 4)) & 0x10101010u);
    }
    if constexpr (BITS == 6) {
        const NU upper = load<NU>(block + 256 + q / 4 * 64 + at);
        const int f = q % 4 * 2;
        return low | ((f < 4 ? upper << (4 - f) : upper >> (f - 4)) & 0x30303030u);
    }
    return low;
}

FN NF half_to_float(const uint8_t *p) {  // OCTAVO_WIDTH values
#if defined(__AVX512F__)
    return (NF)_mm512_maskz_cvtph_ps(0xffff, load<__m256i>(p));  // the plain one warns in gcc 12
#elif defined(__F16C__)
    return (NF)_mm256_cvtph_ps(load<__m128i>(p));
#else
    typedef uint16_t NH __attribute__((vector_size(OCTAVO_WIDTH * 2)));
    const NU h = __builtin_convertvector(load<NH>(p), NU), sign = (h & 0x8000u) << 16, em = h & 0x7fffu;
    const NU normal = (em << 13) + (112u << 23), special = normal + (112u << 23);
    const NU small = (NU)(__builtin_convertvector((NI)em, NF) * nsplat(5.9604644775390625e-8f));
    const NU u = (NI)em < 0x400 ? small : (NI)em < 0x7c00 ? normal : special;
    return (NF)(u | sign);
#endif
}
template <class T> FN NF bytes_to_float(const uint8_t *p) {
    typedef T NB __attribute__((vector_size(OCTAVO_WIDTH)));
    return __builtin_convertvector(__builtin_convertvector(load<NB>(p), NI), NF);
}

// Weight scale and minimum of step s, register v of the columns.
template <int ID> FN void scales_of(const uint8_t *panel, int64_t kp, int64_t s, int v, NF *scale, NF *minimum) {
    constexpr LayoutInfo L = LAYOUTS[ID];
    const int64_t at = v * OCTAVO_WIDTH;
    if constexpr (L.scale == SCALE_HALF) *scale = half_to_float(panel + s * 32 + at * 2);
    if constexpr (L.scale == SCALE_HALF_MIN) *scale = half_to_float(panel + s * 64 + at * 2), *minimum = half_to_float(panel + s * 64 + 32 + at * 2);
    if constexpr (L.scale == SCALE_COLUMN) *scale = load<NF>(panel + at * 4);
    if constexpr (L.scale == SCALE_FLOAT_MIN) *scale = load<NF>(panel + s * 128 + at * 4), *minimum = load<NF>(panel + s * 128 + 64 + at * 4);
    if constexpr (L.scale == SCALE_SUPER)  // a step of 16
        *scale = half_to_float(panel + s / 16 * 32 + at * 2) * bytes_to_float<int8_t>(panel + kp / 256 * 32 + s * 16 + at);
    if constexpr (L.scale == SCALE_SUPER_MIN) {
        const uint8_t *super = panel + s / 8 * 64 + at * 2, *small = panel + kp / 256 * 64 + s * 32 + at;
        *scale = half_to_float(super) * bytes_to_float<uint8_t>(small);
        *minimum = -(half_to_float(super + 32) * bytes_to_float<uint8_t>(small + 16));
    }
}

// Rows of quantized activations, `ld` bytes apart: include/layouts.h.
struct ActRows {
    const char *row;
    int64_t ld, scale, zeros, sums;  // bytes from a row to its parts
};
FN ActRows act_rows(const LayoutInfo &l, int64_t kp, const char *row) {
    const int64_t steps = steps_of(l, kp), codes = pad64(kp) / 4 * quad_bytes(l.bits);
    return {row, act_row_bytes(l, kp), codes, codes + steps * 4, codes + steps * 8};
}

// One row to codes and what each step needs. value(i): 16 act values in float32 from i on. wide: kp floats.
template <class Value> FN void quantize_row(const LayoutInfo &l, Value value, int64_t kp, float *wide, char *row) {
    const ActRows a = act_rows(l, kp, row);
    float *scales = (float *)(row + a.scale), *sums = (float *)(row + a.sums);
    int32_t *zeros = (int32_t *)(row + a.zeros);
    const int quad = quad_bytes(l.bits);
    __builtin_memset(row + kp / 4 * quad, 0, (size_t)(pad64(kp) - kp) / 4 * quad);
    const bool spreads = l.scale == SCALE_COLUMN;
    for (int64_t k = 0, s = 0; k < kp; k += l.group) {
        const int64_t end = k + l.group < kp ? k + l.group : kp;
        I most = {};
        for (int64_t i = k; i < end; i += 2 * LANES) {
            F pair[2] = {value(i), value(i + LANES)};
            if (spreads) spread(pair);
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++) {
                store<F>(wide + i + j * LANES, pair[j]);
                const I bits = (I)(f_to_bits(pair[j]) & 0x7fffffffu);
                most = larger(bits, most);
            }
        }
        const int32_t top = max_lanes(most);
        const bool finite = top < 0x7f800000, any = finite && top >= 0x21800000;
        const float largest = as_float((uint32_t)top);
        const float scale = any ? largest / 127.0f : finite ? 0.0f : __builtin_nanf(""), inverse = any ? 127.0f / largest : 0.0f;
        for (int64_t i = k; i < end; s++) {
            const int64_t stop = i + l.step < end ? i + l.step : end;
            U sum = {};  // of codes; where a value is not finite, of any numbers: the scale is NaN
            for (; i < stop; i += LANES) {
                const I q = nearest_of_numbers(load<F>(wide + i) * inverse);
                sum += (U)q;
                if (quad == 4)
                    store_codes((int8_t *)row + i, q);
                else
                    store_quads(row + i * 2, q);
            }
            const int32_t total = sum_lanes((I)sum);
            scales[s] = scale, zeros[s] = (int32_t)(-(uint32_t)l.zero * (uint32_t)total), sums[s] = (float)total * scale;
        }
    }
}

// Where MR rows begin. The compiler may not know that they lie `ld` apart: it would compute an address for each load.
template <int MR> struct RowStarts {
    const char *at[MR];
    __attribute__((always_inline)) explicit RowStarts(const ActRows &a) {
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) {
            at[r] = a.row + r * a.ld;
            asm("" : "+r"(at[r]));
        }
    }
};

// d += codes · activations for quads Q0 … Q1 of the panels' blocks of 32 k, whose activations begin at byte `k` of the rows.
template <int ID, int MR, int NP, int Q0, int Q1>
FN void quads(NI (&d)[NP][MR][NV], const RowStarts<MR> &a, int64_t k, const uint8_t *const (&block)[NP], int64_t ahead) {
    constexpr LayoutInfo L = LAYOUTS[ID];
    constexpr int held = HELD<L.bits>, bytes = quad_bytes(L.bits);
    if (ahead)
#pragma GCC unroll 4
        for (int p = 0; p < NP; p++)
#pragma GCC unroll 8
            for (int i = L.bits * Q0 / 8; i < L.bits * Q1 / 8; i++) __builtin_prefetch(block[p] + ahead + i * 64, 0, 2);
    const auto act = [&](int r, int q, int part) __attribute__((always_inline)) {
        int32_t word;
        __builtin_memcpy(&word, a.at[r] + k + q * bytes + part * 4, 4);
        return word;
    };
    if constexpr (held > 0) {
#pragma GCC unroll 8
        for (int from = Q0; from < Q1; from += held)
#pragma GCC unroll 4
            for (int p = 0; p < NP; p++) {
                NS sum[MR][NV];
#pragma GCC unroll 8
                for (int q = from; q < from + held; q++) {
                    NU w[NV];
#pragma GCC unroll 4
                    for (int v = 0; v < NV; v++) w[v] = quad_of<L.bits>(block[p], q, v);
#pragma GCC unroll 8
                    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
                        for (int v = 0; v < NV; v++) sum[r][v] = q == from ? dot_bytes(w[v], act(r, q, 0)) : chained(sum[r][v] + dot_bytes(w[v], act(r, q, 0)));
                }
#pragma GCC unroll 8
                for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
                    for (int v = 0; v < NV; v++) d[p][r][v] = chained(dot_pairs(d[p][r][v], sum[r][v], nsplat_pair(0x00010001)));
            }
    } else {
#pragma GCC unroll 8
        for (int q = Q0; q < Q1; q++)
#pragma GCC unroll 4
            for (int p = 0; p < NP; p++) {
                const uint8_t *at = block[p];
#pragma GCC unroll 2
                for (int part = 0; part < bytes / 4; part++) {
                    NU w[NV];
#pragma GCC unroll 4
                    for (int v = 0; v < NV; v++) {
                        w[v] = quad_of<L.bits>(at, q, v);
                        if (bytes == 8) w[v] = part == 0 ? w[v] & 0x00ff00ffu : (NU)((NUS)w[v] >> 8);
                    }
                    if (OCTAVO_WIDTH == 8) asm("" : "+r"(at));  // rather loaded twice than kept in a register
#pragma GCC unroll 8
                    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
                        for (int v = 0; v < NV; v++)
                            if constexpr (bytes == 4)
                                d[p][r][v] = dot4(d[p][r][v], w[v], a.at[r] + k + q * 4);
                            else
                                d[p][r][v] = chained(dot_pairs(d[p][r][v], (NS)w[v], nsplat_pair(act(r, q, part))));
                }
            }
    }
}

template <int ID, int MR, int NP> FN void start_step(NI (&d)[NP][MR][NV], const RowStarts<MR> &rows, const ActRows &a, int64_t s) {
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) {
        const NI zero = LAYOUTS[ID].zero ? nisplat(*(const int32_t *)(rows.at[r] + (a.zeros + s * 4))) : NI{};
#pragma GCC unroll 4
        for (int p = 0; p < NP; p++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) d[p][r][v] = zero;
    }
}

template <int ID, int MR, int NP>
FN void end_step(NF (&c)[NP][MR][NV], const NI (&d)[NP][MR][NV], const RowStarts<MR> &rows, const ActRows &a, int64_t s, const uint8_t *w, int64_t stride, int64_t kp) {
    constexpr LayoutInfo L = LAYOUTS[ID];
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            NF scale = {}, minimum = {};
            scales_of<ID>(w + p * stride, kp, s, v, &scale, &minimum);
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) {
                NF t = __builtin_convertvector(d[p][r][v], NF) * *(const float *)(rows.at[r] + (a.scale + s * 4));
                c[p][r][v] = L.scale == SCALE_COLUMN ? t * scale : c[p][r][v] + t * scale;
                if constexpr (has_minimum(L)) c[p][r][v] = c[p][r][v] + minimum * *(const float *)(rows.at[r] + (a.sums + s * 4));
            }
        }
}

// out[panel·out_stride + row·16] = MR rows · NP panels. `next` is fetched meanwhile, as far as it comes.
template <int ID, int MR, int NP>
static __attribute__((noinline)) void quant_product(const ActRows &rows, const uint8_t *w, int64_t stride, int64_t kp, Fetch &next, float *out,
                                                    int64_t out_stride) {
    constexpr LayoutInfo L = LAYOUTS[ID];
    const ActRows a = rows;
    const RowStarts<MR> starts(a);
    const uint8_t *block[NP];  // as the rows' starts: an address for each
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++) {
        block[p] = w + p * stride + scale_bytes(L, kp);
        asm("" : "+r"(block[p]));
    }
    const auto step_on = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int p = 0; p < NP; p++) block[p] += code_bytes(L);
    };
    Fetch fetch = next;
    if (fetch.ahead)
        for (int p = 0; p < NP; p++)
            for (int64_t i = 0; i < scale_bytes(L, kp); i += 64) __builtin_prefetch(w + p * stride + fetch.ahead + i, 0, 2);
    NF c[NP][MR][NV] = {};
    NI d[NP][MR][NV];
    for (int64_t k = 0, s = 0; k < kp; s++) {
        start_step<ID, MR, NP>(d, starts, a, s);
        if constexpr (L.step >= 32) {
            const int64_t end = L.step == 32 || k + L.step < kp ? k + L.step : kp;  // one block: the sums stay in registers
            for (; k < end; k += 32) {
                fetch_some(fetch, fetch.each * NP);
                quads<ID, MR, NP, 0, 8>(d, starts, k / 4 * quad_bytes(L.bits), block, fetch.ahead);
                step_on();
            }
        } else {
            const int64_t at = k / 4 * quad_bytes(L.bits);
            fetch_some(fetch, fetch.each * NP);
            quads<ID, MR, NP, 0, 4>(d, starts, at, block, fetch.ahead);
            end_step<ID, MR, NP>(c, d, starts, a, s++, w, stride, kp);
            start_step<ID, MR, NP>(d, starts, a, s);
            quads<ID, MR, NP, 4, 8>(d, starts, at, block, fetch.ahead);
            step_on();
            k += 32;
        }
        end_step<ID, MR, NP>(c, d, starts, a, s, w, stride, kp);
    }
    next = fetch;
    for (int p = 0; p < NP; p++)
        for (int r = 0; r < MR; r++)
            for (int v = 0; v < NV; v++) store<NF>(out + p * out_stride + r * LANES + v * OCTAVO_WIDTH, c[p][r][v]);
}

// The same for `np` panels in a row and up to DOT_ROWS rows. Rows between the sizes compiled are computed as the next
// size: the rows behind the last are read from spare memory, and their results are thrown away.
template <int ID>
static void quant_rows(int rows, int np, const ActRows &a, const uint8_t *w, int64_t stride, int64_t kp, Fetch &next, float *out,
                       int64_t out_stride) {
    int p = 0;
#define OCTAVO_FLY(MR, NP) \
    for (; p + NP <= np; p += NP) quant_product<ID, MR, NP>(a, w + p * stride, stride, kp, next, out + p * out_stride, out_stride)
    if (rows == 1) {
        if (OCTAVO_WIDTH == 16) OCTAVO_FLY(1, 4);
        if (OCTAVO_WIDTH == 8) OCTAVO_FLY(1, 2);
        OCTAVO_FLY(1, 1);
    } else if (rows == 2) {
        if (OCTAVO_WIDTH == 16) OCTAVO_FLY(2, 2);
        OCTAVO_FLY(2, 1);
    }
#if OCTAVO_WIDTH >= 8
    else if (rows <= 4) {
        if (OCTAVO_WIDTH == 16) OCTAVO_FLY(4, 2);
        OCTAVO_FLY(4, 1);
    }
#endif
#if OCTAVO_WIDTH == 16
    else {
        if constexpr (LAYOUTS[ID].scale == SCALE_COLUMN) {  // nothing but these sums needs registers
            if (rows == 5) OCTAVO_FLY(5, 4);
            if (rows == 6) OCTAVO_FLY(6, 4);
            OCTAVO_FLY(8, 2);
        }
        OCTAVO_FLY(8, 1);
    }
#endif
#undef OCTAVO_FLY
}

// One column of a panel as numbers: rows of a quantized embedding table. (Spread twice, values are 32 times what they were: see above.)
template <int ID> static void quant_column(const uint8_t *panel, int64_t kp, int64_t column, float *out) {
    constexpr LayoutInfo L = LAYOUTS[ID];
    const int v = (int)(column / OCTAVO_WIDTH), lane = (int)(column % OCTAVO_WIDTH);
    const uint8_t *codes = panel + scale_bytes(L, kp);
    const int64_t steps_in_block = L.step < 32 ? 32 / L.step : 1;
    for (int64_t k = 0; k < kp; k += 32) {
        const uint8_t *block = codes + k / 32 * code_bytes(L) + column * 4;
        for (int q = 0; q < 8; q++) {
            NF scale = {}, minimum = {};
            scales_of<ID>(panel, kp, steps_in_block > 1 ? k / L.step + q / 4 : k / L.step, v, &scale, &minimum);
            for (int j = 0; j < 4; j++) {
                int32_t code;
                if (L.bits == 8) {
                    code = block[q * 64 + j];
                } else {
                    code = (block[q / 2 * 64 + j] >> (q % 2 * 4)) & 15;
                    if (L.bits == 5) code |= ((block[256 + j] >> q) & 1) << 4;
                    if (L.bits == 6) code |= ((block[256 + q / 4 * 64 + j] >> (q % 4 * 2)) & 3) << 4;
                }
                float y = (float)(code - L.zero) * scale[lane];
                if (has_minimum(L)) y = y + minimum[lane];
                out[k + q * 4 + j] = y;
            }
        }
    }
    if (L.scale == SCALE_COLUMN) spread(out, kp);
}
