// Products of 16-bit whole numbers (queries, probabilities) with the 8- or 4-bit codes of the cache. Sums are exact in 32
// bits, |code| ≤ 128 · 32767 · 512, so they have no order, and every instruction set gives the same.
//
// The cache holds a row of a panel as [16 columns][4 bytes]. Words of one row are taken apart into vectors of pairs: inner
// indices 0 and 2, then 1 and 3. So the 16-bit operand is laid out as 0 2 1 3 in each four (`quads`).
#pragma once

typedef int16_t NS __attribute__((vector_size(OCTAVO_WIDTH * 4)));

// For each lane of 32 bits, acc and the products of its two words. Sums that count fit; those of spare rows, whose results are thrown away,
// may wrap, so they are unsigned.
FN NI dot_pairs(NI acc, NS a, NS b) {
#if defined(__AVX512VNNI__)
    return (NI)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return (NI)((NU)acc + (NU)_mm512_madd_epi16((__m512i)a, (__m512i)b));
#elif defined(__AVX2__)
    return (NI)chained((NU)acc + (NU)_mm256_madd_epi16((__m256i)a, (__m256i)b));
#elif defined(__SSE2__)
    return (NI)((NU)acc + (NU)_mm_madd_epi16((__m128i)a, (__m128i)b));
#else
    const NI x = (NI)a, y = (NI)b;
    return (NI)((NU)acc + (NU)(((x << 16) >> 16) * ((y << 16) >> 16)) + (NU)((x >> 16) * (y >> 16)));
#endif
}
FN NS nsplat_pair(int32_t pair) { return (NS)(pair - NI{}); }

// Sixteen whole numbers of 16 bits as eight pairs, in the order of `quads`.
FN void store_quads(void *out, I n) {
    const H h = lanes_to<uint16_t>(n);
    store<H>(out, shuffled<0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15>(h, h));
}

FN void store_quads(void *out, I a, I b) {  // of two
#if defined(__AVX512BW__)
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), both = _mm512_packs_epi32((__m512i)a, (__m512i)b);
    const __m512i quads = _mm512_maskz_shuffle_epi8((__mmask64)-1, both, _mm512_maskz_broadcast_i32x4((__mmask16)-1, _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15)));
    _mm512_storeu_si512(out, _mm512_maskz_permutexvar_epi64((__mmask8)-1, order, quads));
#else
    store_quads(out, a);
    store_quads((int32_t *)out + LANES / 2, b);
#endif
}

// A row of a panel: `vectors` of pairs. Of Int4's four, those of K are all one column's (dims 0 … 3 and 4 … 7); of V, the
// first two are the first panel's, the others the second's.
template <class S> struct Codes;
template <> struct Codes<Int8> {
    static constexpr int vectors = 2;
    FN void take(const char *row, int v, NS (&w)[2]) {
        const NS x = load<NS>(row + v * OCTAVO_WIDTH * 4);
        w[0] = (x << 8) >> 8, w[1] = x >> 8;
    }
};
template <> struct Codes<Int4> {
    static constexpr int vectors = 4;
    FN void take(const char *row, int v, NS (&w)[4]) {
        const NS x = load<NS>(row + v * OCTAVO_WIDTH * 4);
        w[0] = (x << 12) >> 12, w[1] = (x << 4) >> 12, w[2] = (x << 8) >> 12, w[3] = x >> 12;
    }
};

constexpr int DOT_ROWS = OCTAVO_WIDTH == 16 ? 8 : OCTAVO_WIDTH == 8 ? 4 : 2;  // rows whose sums fit the registers
constexpr int FOUR_ROWS = 6;  // the same beside four panels, where registers are wide

// Scores: out[row · ldo + 16·block] = q · K of NB blocks, as float32. q: [MR][ldq] pairs. `next` (or null), here and below: the
// blocks whose same part is fetched into the second cache meanwhile.
template <class S, int MR, int NB>
static __attribute__((noinline)) void dot_scores(const int32_t *q, int64_t ldq, const char *const *k, const char *const *next, int64_t dp, float *out,
                                                 int64_t ldo) {
    constexpr int N = Codes<S>::vectors;
    NI acc[NB][MR][NV] = {};
    const int64_t rows = dp / (2 * N);
    for (int64_t i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int b = 0; b < NB; b++) {
            if (next) __builtin_prefetch(next[b] + i * LANES * 4, 0, 2);
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) {
                NS w[N];
                Codes<S>::take(k[b] + i * LANES * 4, v, w);
#pragma GCC unroll 8
                for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
                    for (int n = 0; n < N; n++) acc[b][r][v] = dot_pairs(acc[b][r][v], w[n], nsplat_pair(q[r * ldq + i * N + n]));
            }
        }
    for (int b = 0; b < NB; b++)
        for (int r = 0; r < MR; r++)
            for (int v = 0; v < NV; v++) store<NF>(out + r * ldo + b * TOKENS + v * OCTAVO_WIDTH, __builtin_convertvector(acc[b][r][v], NF));
}

// Products over tokens: out[row · ldo + 16·panel] = (Σ p · V over n blocks) · factor[row], for NP panels, `offset` bytes behind
// v[block]. p: [MR][ldp] pairs. Int4 takes two panels at a time.
template <class S, int MR, int NP>
static __attribute__((noinline)) void dot_mix(const int32_t *p, int64_t ldp, const char *const *v, const char *const *next, int64_t offset, int n,
                                              const float *factor, float *out, int64_t ldo) {
    constexpr int N = Codes<S>::vectors, per = N / 2;
    NI acc[NP][MR][NV] = {};
    for (int j = 0; j < n; j++)
#pragma GCC unroll 1
        for (int i = 0; i < TOKENS / 4; i++)
#pragma GCC unroll 4
            for (int c = 0; c < NP; c += per) {
                const int64_t at = offset + (c / per * (TOKENS / 4) + i) * LANES * 4;
                if (next) __builtin_prefetch(next[j] + at, 0, 2);
#pragma GCC unroll 4
                for (int w = 0; w < NV; w++) {
                    NS code[N];
                    Codes<S>::take(v[j] + at, w, code);
#pragma GCC unroll 8
                    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
                        for (int m = 0; m < N; m++)
                            acc[c + m / 2][r][w] =
                                dot_pairs(acc[c + m / 2][r][w], code[m], nsplat_pair(p[r * ldp + j * (TOKENS / 2) + i * 2 + m % 2]));
                }
            }
    for (int c = 0; c < NP; c++)
        for (int r = 0; r < MR; r++)
            for (int w = 0; w < NV; w++)
                store<NF>(out + r * ldo + c * LANES + w * OCTAVO_WIDTH, __builtin_convertvector(acc[c][r][w], NF) * nsplat(factor[r]));
}
