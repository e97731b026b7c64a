// The one product of the library: rows of activations (float32 values of act precision) times a panel of 16 columns.
// Contract, per group of KB products (32; 16 in the products over tokens): c ← c + (e + o), where e and o are chains
// of multiply-adds from zero over the even and the odd k in order. That is what TDPBF16PS computes. bf16 products are
// exact in float32, so fused and separate multiply-adds agree; float32 products are rounded, so they are never fused.
#pragma once

#if defined(__AVX512F__)
FN NF fused(NF a, NF b, NF c) { return (NF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
constexpr int MAX_ROWS = 8;  // rows whose chains fit the registers
#elif defined(__FMA__)
FN NF fused(NF a, NF b, NF c) { return (NF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
constexpr int MAX_ROWS = 4;
#else
FN NF fused(NF a, NF b, NF c) { return a * b + c; }
constexpr int MAX_ROWS = 2;
#endif

// exp of a small r, |r| ≤ ln2 / 2, in fused steps: less exact than exp_of's, for where a few units in the last place seldom decide.
#if defined(__AVX2__)
FN NF exp_short(NF r) {
    NF q = fused(r, nsplat(8.31247769e-3f), nsplat(4.18905501e-2f));
    q = fused(q, r, nsplat(0.166671163f));
    q = fused(q, r, nsplat(0.499992288f));
    q = fused(q, r, nsplat(1.0f));
    return fused(q, r, nsplat(1.0f));
}
#endif
#if OCTAVO_WIDTH == 8
FN bool none(NU flags) { return _mm256_testz_si256((__m256i)flags, (__m256i)flags); }
#endif

// The stored type S of a panel says how its values become float32; the act type E, whether their products are exact.
template <class S> struct Panel;
template <> struct Panel<bf16> {  // a row of pairs: [16][2]
    FN NF even(const bf16 *b, int v) { return (NF)(load<NU>(b + v * OCTAVO_WIDTH * 2) << 16); }
    FN NF odd(const bf16 *b, int v) { return (NF)(load<NU>(b + v * OCTAVO_WIDTH * 2) & 0xffff0000u); }
};
template <> struct Panel<float> {
    FN NF even(const float *b, int v) { return load<NF>(b + v * OCTAVO_WIDTH); }
    FN NF odd(const float *b, int v) { return load<NF>(b + LANES + v * OCTAVO_WIDTH); }
};

// What rows are read as: float32 values, or `Woven` ones where both sides are bfloat16 and an instruction multiplies pairs of those.
// VDPBF16PS adds the product of the upper halves, then that of the lower ones, each sum rounded and denormals zero: two links of one
// chain, and thus the contract (tests/ops compares; asked of the CPU at start, arch/avx512_bf16.cpp). So a word holds
// two successive even, or odd, k: rows are written that way, words of panels are woven in registers.
struct Woven {  // each four values as 2 0 3 1
    bf16 bits;
};
template <class E, class S> struct OperandOf {
    typedef float type;
};
#if defined(__AVX512BF16__)
template <> struct OperandOf<bf16, bf16> {
    typedef Woven type;
};
template <class S> struct Weave;  // of four rows of a panel, the words of the even and of the odd k
template <> struct Weave<bf16> {
    FN void quad(const bf16 *b, NU *even, NU *odd) {
        const NU first = load<NU>(b), second = load<NU>(b + 2 * LANES);
        *even = (first << 16) | (second & 0x0000ffffu);
        *odd = (first & 0xffff0000u) | (second >> 16);
    }
};
#endif
template <class E, class S = E> using Operand = typename OperandOf<E, S>::type;
FN H weave(H h) { return shuffled<2, 0, 3, 1, 6, 4, 7, 5, 10, 8, 11, 9, 14, 12, 15, 13>(h, h); }
FN void store_act(Woven *p, F x) { store(p, weave(lanes_to<uint16_t>(round_bits(x) >> 16))); }
FN void expand(Woven *dst, const bf16 *src, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) store(dst + i, weave(load<H>(src + i)));
}
FN void expand(float *dst, const bf16 *src, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) store<F>(dst + i, load_act(src + i));
}
FN void expand(float *dst, const float *src, int64_t n) { __builtin_memcpy(dst, src, (size_t)n * 4); }

template <class E> FN NF multiply_add(NF a, NF b, NF c) {
    if constexpr (sizeof(E) == 2) return fused(a, b, c);
    return a * b + c;
}

// c[panel][row] += one group of KB products, for NP panels that lie `stride` elements apart and MR rows of a.
// `ahead`: bytes to what these streams need next (0: nothing), fetched into the second cache meanwhile.
template <class E, int MR, int NP, int KB, class S>
FN void group(NF (&c)[NP][MR][NV], const float *a, int64_t lda, const S *b, int64_t stride, int64_t ahead = 0) {
    NF e[NP][MR][NV] = {}, o[NP][MR][NV] = {};
    const auto chains = [&]<bool ODD>(NF(&sum)[NP][MR][NV], int k, int p, const S *bp) __attribute__((always_inline)) {
        NF w[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) w[v] = ODD ? Panel<S>::odd(bp, v) : Panel<S>::even(bp, v);
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) {
            const NF x = nsplat(a[r * lda + k + ODD]);
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) sum[p][r][v] = multiply_add<E>(x, w[v], sum[p][r][v]);
        }
    };
    constexpr bool APART = MR * NV * NP > 6 && OCTAVO_WIDTH < 16;  // registers hold the even chains, or the odd ones
#pragma GCC unroll 2
    for (int k = 0; k < KB; k += 2)
#pragma GCC unroll 4
        for (int p = 0; p < NP; p++) {
            const S *bp = b + p * stride + k * LANES;
            if (ahead) {
                __builtin_prefetch((const char *)bp + ahead, 0, 2);
                if (sizeof(S) == 4) __builtin_prefetch((const char *)(bp + LANES) + ahead, 0, 2);
            }
            chains.template operator()<false>(e, k, p, bp);
            if (OCTAVO_WIDTH == 8) asm("" : "+r"(bp));  // rather loaded twice than kept in a register
            if (!APART) chains.template operator()<true>(o, k, p, bp);
        }
    if (APART)
#pragma GCC unroll 2
        for (int k = 0; k < KB; k += 2)
#pragma GCC unroll 4
            for (int p = 0; p < NP; p++) chains.template operator()<true>(o, k, p, b + p * stride + k * LANES);
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++)
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) c[p][r][v] += e[p][r][v] + o[p][r][v];
}

#if defined(__AVX512BF16__)
template <class E, int MR, int NP, int KB, class S>
FN void group(NF (&c)[NP][MR][NV], const Woven *a, int64_t lda, const S *b, int64_t stride, int64_t ahead = 0) {
    NF e[NP][MR] = {}, o[NP][MR] = {};
#pragma GCC unroll 2
    for (int k = 0; k < KB; k += 4) {
#pragma GCC unroll 4
        for (int p = 0; p < NP; p++) {
            const S *bp = b + p * stride + k * LANES;
            if (ahead)
                for (int i = 0; i < (int)sizeof(S); i++) __builtin_prefetch((const char *)bp + ahead + i * 64, 0, 2);
            NU even, odd;
            Weave<S>::quad(bp, &even, &odd);
            const auto link = [&](NF sum, NU w, const Woven *x) __attribute__((always_inline)) {
                int32_t pair;
                __builtin_memcpy(&pair, x, 4);
                return (NF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(pair));
            };
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) {
                e[p][r] = link(e[p][r], even, a + r * lda + k);
                o[p][r] = link(o[p][r], odd, a + r * lda + k + 2);
            }
        }
    }
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++)
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) c[p][r][0] += e[p][r] + o[p][r];
}
#endif

// out[panel·out_stride + row·ldo + 16] = rows · panels over kp products. A: Operand<E, S>. `next` is fetched meanwhile, as far as it comes.
template <class E, int MR, int NP, class A, class S>
static __attribute__((noinline)) void product(const A *a, int64_t lda, const S *b, int64_t stride, int64_t kp, Fetch &next, float *out,
                                              int64_t out_stride, int64_t ldo) {
    NF c[NP][MR][NV] = {};
    Fetch fetch = next;
    for (int64_t k = 0; k < kp; k += KBLOCK) {
        fetch_some(fetch, fetch.each * NP);
        group<E, MR, NP, KBLOCK>(c, a + k, lda, b + k * LANES, stride, fetch.ahead);
    }
    next = fetch;
    for (int p = 0; p < NP; p++)
        for (int r = 0; r < MR; r++)
            for (int v = 0; v < NV; v++) store<NF>(out + p * out_stride + r * ldo + v * OCTAVO_WIDTH, c[p][r][v]);
}

// The same for `np` panels in a row and any number of rows up to MAX_ROWS, as many panels in flight as registers allow.
template <class E, class A, class S>
static void product_rows(int rows, int np, const A *a, int64_t lda, const S *b, int64_t stride, int64_t kp, Fetch &next, float *out,
                         int64_t out_stride, int64_t ldo) {
    int p = 0;
#define OCTAVO_FLY(MR, NP)                                                                                  \
    for (; p + NP <= np; p += NP)                                                                           \
        product<E, MR, NP>(a, lda, b + p * stride, stride, kp, next, out + p * out_stride, out_stride, ldo)
    switch (rows) {
        case 1:
            if (OCTAVO_WIDTH == 16) OCTAVO_FLY(1, 4);
            if (OCTAVO_WIDTH >= 8) OCTAVO_FLY(1, 2);
            OCTAVO_FLY(1, 1);
            break;
        case 2:
            if (OCTAVO_WIDTH == 16) OCTAVO_FLY(2, 4);
            OCTAVO_FLY(2, 1);
            break;
#if OCTAVO_WIDTH == 8
        case 3: OCTAVO_FLY(3, 1); break;
        case 4: OCTAVO_FLY(4, 1); break;
#elif OCTAVO_WIDTH == 16
        case 3:
            OCTAVO_FLY(3, 2);
            OCTAVO_FLY(3, 1);
            break;
        case 4:
            OCTAVO_FLY(4, 2);
            OCTAVO_FLY(4, 1);
            break;
        case 5: OCTAVO_FLY(5, 1); break;
        case 6: OCTAVO_FLY(6, 1); break;
        case 7: OCTAVO_FLY(7, 1); break;
        case 8: OCTAVO_FLY(8, 1); break;
#endif
        default: __builtin_trap();
    }
#undef OCTAVO_FLY
}

// Calls f with the number of rows as a constant.
template <int MR, class Call> FN void with_rows(int rows, Call &&f) {
    if (rows == MR) return f.template operator()<MR>();
    if constexpr (MR > 1) with_rows<MR - 1>(rows, f);
}

// The wide way, for many rows where registers are wide and multiply-adds are the fastest products: of two panels, up to WIDE_K rows are widened to
// float32, [k][2][16], once for all rows of activations, and stay in the first cache. Of 8 rows × 2 panels the even chains fill half of the registers, then
// the odd ones do; an operand of a row, once loaded, serves two panels. The sums over groups are in memory.
#if defined(__AVX512BF16__)
constexpr bool WIDE = false;
#else
constexpr bool WIDE = OCTAVO_WIDTH == 16;
#endif
constexpr int WIDE_K = 128, WIDE_FLOATS = WIDE_K * 2 * LANES, WIDE_LEAST = 17;  // rows from which it pays
template <class S> FN void widen(const S *first, const S *second, int64_t k, float *out) {
    for (int64_t i = 0; i < k; i += 2)
        for (int p = 0; p < 2; p++) {
            const S *b = (p == 0 ? first : second) + i * LANES;
            store<NF>(out + (2 * i + p) * LANES, Panel<S>::even(b, 0));
            store<NF>(out + (2 * i + 2 + p) * LANES, Panel<S>::odd(b, 0));
        }
}
// c[panel·c_stride + row·ldc + 16] += the products of MR rows, by groups of KB; `first`: from zero.
template <class E, int MR, int KB>
static __attribute__((noinline)) void wide_product(const float *a, int64_t lda, const float *w, int64_t k, bool first, Fetch &next, float *c,
                                                   int64_t c_stride, int64_t ldc) {
    static_assert(MR <= 8 && NV == 1);
    const auto chains = [&](int odd, NF(&sum)[MR][2]) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) sum[r][0] = sum[r][1] = NF{};
#pragma GCC unroll 4
        for (int i = odd; i < KB; i += 2) {
            const NF low = load<NF>(w + i * 2 * LANES), high = load<NF>(w + i * 2 * LANES + LANES);
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) {
                const NF x = nsplat(a[r * lda + i]);
                sum[r][0] = multiply_add<E>(x, low, sum[r][0]), sum[r][1] = multiply_add<E>(x, high, sum[r][1]);
            }
        }
    };
    Fetch fetch = next;
    for (const float *end = a + k; a < end; a += KB, w += KB * 2 * LANES, first = false) {
        float even[MR][2][LANES] __attribute__((aligned(64)));
        NF sum[MR][2];
        fetch_some(fetch, fetch.each);
        chains(0, sum);
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) store<NF>(even[r][0], sum[r][0]), store<NF>(even[r][1], sum[r][1]);
        asm("" ::: "memory");  // they would be kept in registers, and others not
        chains(1, sum);
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
            for (int p = 0; p < 2; p++) {
                float *at = c + p * c_stride + r * ldc;
                const NF before = first ? NF{} : load<NF>(at);
                store<NF>(at, before + (load<NF>(even[r][p]) + sum[r][p]));
            }
    }
    next = fetch;
}
// The same for any number of rows.
template <class E, int KB>
FN void wide_rows(int rows, const float *a, int64_t lda, const float *w, int64_t k, bool first, Fetch &next, float *c, int64_t c_stride, int64_t ldc) {
    const int parts = (rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int part = 0; part < parts; part++) {
        const int r = rows * part / parts, n = rows * (part + 1) / parts - r;
        with_rows<MAX_ROWS>(n, [&]<int MR>() __attribute__((always_inline)) { wide_product<E, MR, KB>(a + r * lda, lda, w, k, first, next, c + r * ldc, c_stride, ldc); });
    }
}

// Scores: out[row·ldo + 16·block] = q · K of n blocks, `FLY` of them at a time. `next` (or null), here and below: the blocks whose same
// part is fetched into the second cache meanwhile.
template <class E, class S, int MR, class A>
static __attribute__((noinline)) void scores(const A *q, int64_t ldq, const char *const *k, const char *const *next, int n, int64_t kp, float *out,
                                             int64_t ldo) {
    constexpr int FLY = OCTAVO_WIDTH < 16 && MR == 1 ? 2 : 1;  // one row alone has too few chains
    const auto blocks = [&]<int NP>(int j) __attribute__((always_inline)) {
        NF c[NP][MR][NV] = {};
        const S *b = (const S *)k[j];
        const int64_t stride = NP == 1 ? 0 : (const S *)k[j + NP - 1] - b, ahead = next ? next[j] - k[j] : 0;
        for (int64_t i = 0; i < kp; i += KBLOCK) group<E, MR, NP, KBLOCK>(c, q + i, ldq, b + i * LANES, stride, ahead);
        for (int p = 0; p < NP; p++)
            for (int r = 0; r < MR; r++)
                for (int v = 0; v < NV; v++) store<NF>(out + r * ldo + (j + p) * TOKENS + v * OCTAVO_WIDTH, c[p][r][v]);
    };
    int j = 0;
    for (; j + FLY <= n; j += FLY) blocks.template operator()<FLY>(j);
    for (; j < n; j++) blocks.template operator()<1>(j);
}

// Products over tokens: out[row·ldo + 16·panel] = Σ over n blocks of p[row][16·block …] · v[block] (NP panels of 16 tokens × 16 dims,
// `offset` bytes behind v[block], `panel` bytes apart).
template <class E, class S, int MR, int NP, class A>
static __attribute__((noinline)) void mix(const A *p, int64_t ldp, const char *const *v, const char *const *next, int64_t offset, int64_t panel, int n,
                                          float *out, int64_t ldo) {
    NF c[NP][MR][NV] = {};
    for (int j = 0; j < n; j++) {
        if (next)
            for (int64_t at = 0; at < NP * TOKENS * LANES * (int64_t)sizeof(S); at += 64) __builtin_prefetch(next[j] + offset + at, 0, 2);
        group<E, MR, NP, TOKENS>(c, p + j * TOKENS, ldp, (const S *)(v[j] + offset), panel / (int64_t)sizeof(S));
    }
    for (int i = 0; i < NP; i++)
        for (int r = 0; r < MR; r++)
            for (int w = 0; w < NV; w++) store<NF>(out + r * ldo + i * LANES + w * OCTAVO_WIDTH, c[i][r][w]);
}
