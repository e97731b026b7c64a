// The probabilities of a partition.
#pragma once

// exp of x ≤ 0 as round_act<bf16>(exp_small(x)) has it, in half the steps: fused ones, and a shorter polynomial, whose result is
// less than 8 units in the last place away from that. Where so little decides the rounding, one value in 4,096, the long way is
// gone. All x were tried (tests/ops/test_native_rows.py: a part of them). A NaN stays one, with any bits.
FN F exp_rounded(F x) {
#if defined(__AVX512F__)
    const F y = (F)_mm512_maskz_max_ps((__mmask16)-1, _mm512_set1_ps(-64.0f), (__m512)x);  // of a NaN and a number, the second; exp(-64) is rounded to 0
    const F t = fused(y, splat(1.44269504f), splat(12582912.0f));  // the sum's last bits are the nearest whole number, as in exp_of
    const F q = exp_short(fused(t - 12582912.0f, splat(-0.693147180f), y));
    const U u = f_to_bits(q) + (f_to_bits(t) << 23);
    const __m512i near = (__m512i)((u + 0x8008u) & 0xfff0u);  // 0: within 8 of the middle between two bfloat16
    if (__builtin_expect(_mm512_testn_epi32_mask(near, near) == 0, 1)) {
        const U p = (u + 0x8000u) & 0xffff0000u;
        return bits_to_f(u >= usplat(0x217f8000u) ? p : U{});  // which is rounded to 2^-60, the least that counts
    }
#elif defined(__AVX2__)
    F p;
    NU close = {};
    for (int i = 0; i < F::registers; i++) {
        const NF y = (NF)_mm256_max_ps(_mm256_set1_ps(-64.0f), (__m256)x.r[i]);
        const NF t = fused(y, nsplat(1.44269504f), nsplat(12582912.0f));
        const NU u = (NU)exp_short(fused(t - 12582912.0f, nsplat(-0.693147180f), y)) + ((NU)t << 23);
        close |= (NU)(((u + 0x8008u) & 0xfff0u) == 0);
        p.r[i] = (NF)(((u + 0x8000u) & 0xffff0000u) & (NU)(u >= 0x217f8000u));
    }
    if (__builtin_expect(none(close), 1)) return p;
#endif
    return bits_to_f(round_bits(exp_small(x)));
}

// bfloat16 values without what is 0 of their bits; two successive vectors of such. T: bf16 or Woven.
template <class T> FN void store_halves(T *out, F a) {
    const H h = lanes_to<uint16_t>(f_to_bits(a) >> 16);
    store<H>(out, __is_same(T, Woven) ? weave(h) : h);
}
template <class T> FN void store_halves(T *out, F a, F b) {
#if defined(__AVX512BW__)
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    __m512i both = _mm512_packus_epi32((__m512i)(f_to_bits(a) >> 16), (__m512i)(f_to_bits(b) >> 16));
    if (__is_same(T, Woven)) both = _mm512_maskz_shuffle_epi8((__mmask64)-1, both, _mm512_maskz_broadcast_i32x4((__mmask16)-1, _mm_setr_epi8(4, 5, 0, 1, 6, 7, 2, 3, 12, 13, 8, 9, 14, 15, 10, 11)));
    _mm512_storeu_si512(out, _mm512_maskz_permutexvar_epi64((__mmask8)-1, order, both));
#else
    store_halves(out, a);
    store_halves(out + LANES, b);
#endif
}
