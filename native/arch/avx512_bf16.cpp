// The kernels, compiled for avx512_bf16 (flags: CMakeLists.txt). Everything but the one exported function stays in this file.
#include "octavo.h"
#ifdef OCTAVO_X86
#include <immintrin.h>

namespace octavo {
namespace avx512_bf16 {
namespace {
#include "../kernels/all.h"
constexpr Kernels table = make("avx512_bf16");

// Whether VDPBF16PS is what product.h takes it for, two rounded links of a chain. Processors may differ here, so this one is asked:
// 4,096 sums of products of near and far magnitudes, and of such that cancel.
bool pairs_are_chains() {
    const uint32_t mode = _mm_getcsr();
    _mm_setcsr(FLOAT_MODE);
    uint32_t state = 1;
    bool same = true;
    for (int i = 0; i < 256 && same; i++) {
        const int spread = 4 << i % 4;
        const auto draw = [&] {  // 16 bfloat16 values
            U u;
            for (int j = 0; j < LANES; j++) {
                state = state * 1664525u + 1013904223u;
                u[j] = (state & 0x807f0000u) | (uint32_t)(127 - spread / 2 + (int)((state >> 8 & 0xff) % (uint32_t)spread)) << 23;
            }
            return u;
        };
        const U a = draw(), b = draw(), x = draw(), y = draw();
        F c = bits_to_f(draw() ^ (draw() >> 16));
        if (i % 3 == 0) c = -(bits_to_f(a) * bits_to_f(x));
        if (i % 3 == 1) c = -(bits_to_f(b) * bits_to_f(y));
        const F chain = (F)fused((NF)b, (NF)y, fused((NF)a, (NF)x, (NF)c));
        const F pairs = (F)_mm512_dpbf16_ps((__m512)c, (__m512bh)(a | b >> 16), (__m512bh)(x | y >> 16));
        same = !__builtin_memcmp(&chain, &pairs, sizeof chain);
    }
    _mm_setcsr(mode);
    return same;
}

// Whether VDPBF16PS, two multiply-adds in one, is no slower than two of them by themselves: it is twice as fast on AMD's Zen 4, half as fast
// on Intel's Emerald Rapids. The least of 16 tries in turns, some microseconds in all.
bool pairs_are_fast() {
    const auto least = [](auto run, uint64_t &ticks) {
        float sink[LANES] = {};
        asm volatile("" : "+m"(sink));  // neither what goes in nor what comes out is known to the compiler, which would leave out all
        const uint64_t began = __rdtsc();
        run(64, sink);
        asm volatile("" : "+m"(sink));
        const uint64_t took = __rdtsc() - began;
        if (took < ticks) ticks = took;
    };
    uint64_t pairs = ~0ull, multiply_adds = ~0ull;
    for (int i = 0; i < 16; i++) least(run_pairs, pairs), least(run_multiply_adds, multiply_adds);
    return pairs < 2 * multiply_adds;
}
}  // namespace
}  // namespace avx512_bf16
const Kernels *kernels_avx512_bf16() {
    static const bool usable = avx512_bf16::pairs_are_chains();
    return usable ? &avx512_bf16::table : nullptr;
}
bool pairs_pay() {
    static const bool fast = avx512_bf16::pairs_are_fast();
    return fast;
}
}  // namespace octavo
#else
namespace octavo {
const Kernels *kernels_avx512_bf16() { return nullptr; }
bool pairs_pay() { return false; }
}  // namespace octavo
#endif
