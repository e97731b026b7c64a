// What measurements are compared with: the rate of this variant's products in registers alone, and of reading memory as
// the kernels for few rows do. Neither computes anything that is used.
#pragma once

// `rounds` of a step in registers, twelve chains side by side: enough to hide the latency, few enough for 16 registers. sink: 16 float32, read
// and written so that nothing can be left out.
constexpr int CHAINS = 12;
template <class Step> FN void run_chains(int64_t rounds, float *sink, Step step) {
    NF c[CHAINS];
    const NF a = nsplat(sink[0]), b = nsplat(sink[1]);
    for (int j = 0; j < CHAINS; j++) c[j] = nsplat(sink[j]);
    for (int64_t i = 0; i < rounds; i++)
#pragma GCC unroll 12
        for (int j = 0; j < CHAINS; j++) c[j] = step(c[j], a, b);
    for (int j = 0; j < CHAINS; j++) sink[j] += c[j][0];
}
FN void run_multiply_adds(int64_t rounds, float *sink) {
    run_chains(rounds, sink, [](NF c, NF a, NF b) __attribute__((always_inline)) { return fused(a, b, c); });
}
#if defined(__AVX512BF16__)
FN void run_pairs(int64_t rounds, float *sink) {
    run_chains(rounds, sink, [](NF c, NF a, NF b) __attribute__((always_inline)) { return (NF)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b); });
}
#endif

// `rounds` of the multiply-adds that linear ops are made of. Returns the operations (a multiply-add is two).
static int64_t probe_products(int64_t rounds, float *sink) {
#ifdef OCTAVO_AMX
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    TILE_ZERO(4);
    TILE_ZERO(5);
    TILE_ZERO(6);
    TILE_ZERO(7);
    for (int64_t i = 0; i < rounds; i++) {
        TILE_DOT(0, 4, 6);
        TILE_DOT(1, 4, 7);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
    }
    sink[0] += 1;
    return rounds * 4 * 16 * 16 * KBLOCK * 2;
#elif defined(__AVX512BF16__)
    run_pairs(rounds, sink);
    return rounds * CHAINS * OCTAVO_WIDTH * 2 * 2;
#else
    run_multiply_adds(rounds, sink);
    return rounds * CHAINS * OCTAVO_WIDTH * 2;
#endif
}

// One step of products of quantized weights in a register, as kernels/quant.h takes them: in codes of fewer than 8 bits (FEW), or of 8.
// `a` is made unknown each time: a product of the same two would be computed once.
#if defined(__AVX512VNNI__)
template <bool FEW> FN NU probe_bytes(NU acc, NU &a, NU b) { return (NU)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b); }
template <bool FEW> constexpr int PROBE_BYTES = 4;
#elif defined(__AVX2__)
template <bool FEW> FN NU probe_bytes(NU acc, NU &a, NU b) {
    asm("" : "+v"(a));
    if constexpr (FEW) {
        int32_t act;
        __builtin_memcpy(&act, &b, 4);
        return (NU)chained((NUS)acc + (NUS)dot_bytes(a, act));
    }
    return (NU)dot_pairs((NI)acc, (NS)a, (NS)b);
}
template <bool FEW> constexpr int PROBE_BYTES = FEW ? 4 : 2;
#else
template <bool FEW> FN NU probe_bytes(NU acc, NU &a, NU b) { return (NU)dot_pairs((NI)(acc ^ a), (NS)a, (NS)b); }
template <bool FEW> constexpr int PROBE_BYTES = 2;
#endif
template <bool FEW> static int64_t probe_quantized(int64_t rounds, float *sink) {
    NU a = (NU)nsplat(sink[0]), c[CHAINS];
    const NU b = (NU)nsplat(sink[1] + 1);
    for (int j = 0; j < CHAINS; j++) c[j] = (NU)nsplat(sink[j]);
    for (int64_t i = 0; i < rounds; i++)
#pragma GCC unroll 12
        for (int j = 0; j < CHAINS; j++) c[j] = probe_bytes<FEW>(c[j], a, b);
    for (int j = 0; j < CHAINS; j++) sink[j] += (float)c[j][0];
    return rounds * CHAINS * OCTAVO_WIDTH * PROBE_BYTES<FEW> * 2;
}

// As probe_products, for the whole-number products of quantized weights, whose codes have so many bits.
static int64_t probe_codes(int64_t rounds, float *sink, int bits) {
#if defined(OCTAVO_AMX) && defined(TILE_DOT_BYTES)
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    TILE_ZERO(4);
    TILE_ZERO(5);
    TILE_ZERO(6);
    TILE_ZERO(7);
    for (int64_t i = 0; i < rounds; i++) {
        TILE_DOT_BYTES(0, 4, 6);
        TILE_DOT_BYTES(1, 4, 7);
        TILE_DOT_BYTES(2, 5, 6);
        TILE_DOT_BYTES(3, 5, 7);
    }
    sink[0] += 1;
    (void)bits;
    return rounds * 4 * 16 * 16 * 64 * 2;
#else
    return bits < 8 ? probe_quantized<true>(rounds, sink) : probe_quantized<false>(rounds, sink);
#endif
}

// Reads every byte once, in four streams with prefetch, as a kernel walks four panels. Returns a value that depends on all.
static uint64_t probe_read(const char *data, int64_t bytes) {
    constexpr int STREAMS = 4, LINE = 64, AHEAD = 2048;
    const int64_t each = bytes / STREAMS / LINE * LINE;
    U sum[STREAMS] = {};
    for (int64_t i = 0; i < each; i += LINE)
#pragma GCC unroll 4
        for (int j = 0; j < STREAMS; j++) {
            const char *p = data + j * each + i;
            __builtin_prefetch(p + AHEAD);
            sum[j] ^= load<U>(p);
        }
    const U all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
    uint64_t found = 0;
    for (int i = 0; i < LANES; i++) found ^= (uint64_t)all[i] << (i % 2 * 32);
    return found;
}
