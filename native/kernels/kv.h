// How K and V lie in the cache, and how numbers become those of a type. kv_store.h writes them there.
//
// A block: [layer][kv head] units, and a unit: K of 16 tokens, V of 16 tokens, and for quantized types the scales: 16 of K,
// 16 of V, as bfloat16 bits. K is a panel whose columns are the tokens, V is Dp/16 panels whose columns are dims:
//
//   bf16   [inner/2][16][2]                f32, fp8   [inner][16]           (inner: dims of K, tokens of V)
//   int8   [inner/4][16][4]
//   int4   K [dims/8][16][4], two nibbles a byte: dims 8i + b and 8i + 4 + b; V [tokens/4][16][4] of two panels: dims c and
//          c + 16. So a byte belongs to one token, and no two threads write to one.
//
// K of quantized types is centred and spread first (`prepare_key`); the query of an integer type is spread, too. A quantized value
// then is code · scale, the scale of its token, head, and K or V. Stale bytes are finite in every quantized
// type, and stale scales meet a mask.
#pragma once

struct Fp8 {  // e4m3: no infinity, 448 at most
    uint8_t bits;
};
struct Int8 {
    int8_t code;
};
struct Int4 {  // two of them
    uint8_t codes;
};
template <class S> struct Stored {
    static constexpr int bits = 8 * sizeof(S);
    static constexpr bool scaled = sizeof(S) == 1, integer = false;
    static constexpr float unit = 1;  // what a decoded 1 stands for
    typedef S Element;                // what a token has of one column or, int4, of two
    typedef uint32_t Cell;            // the elements of a token (K) or of a column (V) that lie together
};
template <> struct Stored<Fp8> {
    static constexpr int bits = 8;
    static constexpr bool scaled = true, integer = false;
    static constexpr float unit = 256;  // decoded as float16, whose bias is 8 more
    typedef uint8_t Element;
    typedef uint8_t Cell;
};
template <> struct Stored<Int8> {
    static constexpr int bits = 8;
    static constexpr bool scaled = true, integer = true;
    static constexpr float unit = 1;
    typedef uint8_t Element;
    typedef uint32_t Cell;
};
template <> struct Stored<Int4> {
    static constexpr int bits = 4;
    static constexpr bool scaled = true, integer = true;
    static constexpr float unit = 1;
    typedef uint8_t Element;
    typedef uint32_t Cell;
};
constexpr float LEAST_SCALE = 0x1p-60f;  // below it, a row counts as zeros, as in the rounding to act

template <class S> constexpr int64_t kv_half(int64_t dp) { return dp * TOKENS * Stored<S>::bits / 8; }  // bytes of K, or of V
template <class S> constexpr int64_t kv_unit(int64_t dp) { return 2 * kv_half<S>(dp) + (Stored<S>::scaled ? 2 * TOKENS * 2 : 0); }

// To the nearest whole number, ties to even, |x| < 2^22. Of NaN, the same bits everywhere: they may get into the cache.
FN I nearest(F x) { return (I)f_to_bits(x + 12582912.0f) - 0x4b400000; }
// The same in one step where there is one; of NaN, anything: for numbers whose scale says that they are none.
FN I nearest_of_numbers(F x) {
#if defined(__AVX512F__)
    return (I)_mm512_maskz_cvtps_epi32((__mmask16)-1, (__m512)x);
#else
    return nearest(x);
#endif
}
// A positive scale to bfloat16, upwards: then no code exceeds its range.
FN float scale_up(float s) { return as_float((as_bits(s) + 0xffffu) & 0xffff0000u); }

// The Walsh-Hadamard transform of 32 values, not normed, largest distance first. One large value becomes 32 of equal magnitude, which share
// one scale well; twice is 32 times the values, and products of two spread rows are 32 times the rows'.
FN void spread(F (&x)[2]) {
    const F sum = x[0] + x[1], difference = x[0] - x[1];
    x[0] = sum, x[1] = difference;
#pragma GCC unroll 2
    for (F &v : x) {
        // The partner, plus or minus the own value; minus where the lane's number has the bit. (A product with ±1 is exact: fused or not, one sum.)
        const auto stage = [&](F partner, F sign) {
#if defined(__AVX512F__)
            v = (F)_mm512_fmadd_ps((__m512)v, (__m512)sign, (__m512)partner);
#else
            v = v * sign + partner;
#endif
        };
        stage(shuffled<8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7>(v, v), F{1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1});
        stage(shuffled<4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11>(v, v), F{1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1});
        stage(shuffled<2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13>(v, v), F{1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1});
        stage(shuffled<1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14>(v, v), F{1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1});
    }
}
FN void spread(float *x, int64_t dp) {  // of each 32
    for (int64_t c = 0; c < dp; c += 2 * LANES) {
        F pair[2] = {load<F>(x + c), load<F>(x + c + LANES)};
        spread(pair);
        store<F>(x + c, pair[0]), store<F>(x + c + LANES, pair[1]);
    }
}

// What is encoded of a key (after RoPE; Dp values). `bias` (or null): its head's, of the key projection. Subtracting one vector from all
// keys subtracts one number from all scores of a query, which no softmax sees; where rotation is slow, the bias is in all tokens' keys
// nearly as it is, and often most of them.
constexpr float SLOW = 0x1p-13f;  // radians a token
template <class S> FN void prepare_key(float *key, int64_t d, int64_t dp, const float *bias, const float *inv_freq) {
    if constexpr (Stored<S>::scaled) {
        const int64_t half = d / 2;
        if (bias)
            for (int64_t i = 0; i < half; i++)
                if (inv_freq[i] < SLOW) key[i] -= bias[i], key[half + i] -= bias[half + i];
        if constexpr (Stored<S>::integer) {
            for (int64_t c = d; c < dp; c++) key[c] = 0;  // the former key's, spread
            spread(key, dp);
            for (int64_t c = 0; c < dp; c += LANES) store<F>(key + c, load<F>(key + c) * 0x1p-5f);
        }
    }
}

// The largest magnitude of d values (readable to a multiple of 16, zeros behind d); NaN where one is no finite number.
FN float largest(const float *x, int64_t d) {
    F most = {};
    for (int64_t c = 0; c < d; c += LANES) {
        const F mag = bits_to_f(f_to_bits(load<F>(x + c)) & 0x7fffffffu);
        most = pick(mag > most, mag, pick(mag == mag, most, splat(INF)));
    }
    const float m = max_lanes(most);
    return m < INF ? m : as_float(0x7fc00000u);
}

FN void store_codes(int8_t *codes, I n) { store<B>(codes, lanes_to<int8_t>(n)); }

// Codes of one row: returns the scale, 0 (and codes of 0) for a row below LEAST_SCALE, NaN for one with no finite numbers.
FN float encode(Int8, const float *x, int64_t dp, int8_t *codes) {
    float s = scale_up(largest(x, dp) / 127.0f);
    if (s < LEAST_SCALE) s = 0;
    const float inv = s > 0 ? 1.0f / s : 0.0f;
    for (int64_t c = 0; c < dp; c += LANES) {
        const I n = nearest(load<F>(x + c) * inv);
        store_codes(codes + c, n);
    }
    return s;
}
FN float encode(Int4, const float *x, int64_t dp, int8_t *codes) {  // the value of largest magnitude is -8: the scale has a sign
    const float mag = largest(x, dp);
    F high = {}, low = {};
    for (int64_t c = 0; c < dp; c += LANES) {
        const F v = load<F>(x + c);
        high = max_keep(high, v), low = pick(v < low, v, low);
    }
    float s = scale_up(mag / 8.0f);
    if (s < LEAST_SCALE) s = 0;
    if (s > 0 && max_lanes(high) >= max_lanes(-low)) s = -s;
    const float inv = s > 0 || s < 0 ? 1.0f / s : 0.0f;
    for (int64_t c = 0; c < dp; c += LANES) {
        I n = nearest(load<F>(x + c) * inv);
        n = pick(n < isplat(7), n, isplat(7));
        n = pick(n > isplat(-8), n, isplat(-8));
        store_codes(codes + c, n);
    }
    return s;
}
FN float encode(Fp8, const float *x, int64_t dp, int8_t *codes) {  // scales are powers of two: nothing else is rounded
    const float mag = largest(x, dp), ratio = mag / 448.0f;
    float s = as_float((as_bits(ratio) + 0x7fffffu) & 0x7f800000u);
    if (!(ratio >= LEAST_SCALE)) s = ratio == ratio ? 0.0f : ratio;
    const float inv = s > 0 ? 1.0f / s : 0.0f;
    for (int64_t c = 0; c < dp; c += LANES) {
        const U u = f_to_bits(load<F>(x + c) * inv), m = u & 0x7fffffffu;
        const I few = nearest(bits_to_f(m) * 512.0f);                           // subnormal: multiples of 2^-9; 8 is the least normal
        I n = (I)((m + 0x7ffffu + ((m >> 20) & 1u)) >> 20) - (120 << 3);        // 3 bits of mantissa, the exponent's bias 7 for 127
        n = pick((I)m < isplat(0x3c800000), few, n);                               // 2^-6
        n = pick(n < isplat(0x7e), n, isplat(0x7e));
        n = n | (I)((u >> 24) & 0x80u);
        store_codes(codes + c, n);
    }
    return s;
}

#if defined(__AVX512BF16__)
template <> struct OperandOf<bf16, Fp8> {
    typedef Woven type;
};
#endif
template <> struct Panel<Fp8> {
    // Decoded as float16: the value / 256, subnormals included, whatever the mode.
    FN NF decode(const Fp8 *b) {
#if defined(__AVX512F__)
        const __m256i w = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)b)), 7);
        return (NF)_mm512_maskz_cvtph_ps((__mmask16)-1, _mm256_and_si256(w, _mm256_set1_epi16((short)0xbfff)));
#elif defined(__AVX2__)
        const __m128i w = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)b)), 7);
        return (NF)_mm256_cvtph_ps(_mm_and_si128(w, _mm_set1_epi16((short)0xbfff)));
#else
        NU u;
        for (int i = 0; i < OCTAVO_WIDTH; i++) u[i] = b[i].bits;
        const NU mag = (u & 0x7fu) << 20;
        const NF few = (NF)(mag + (113u << 23)) - nsplat(0x1p-14f);
        const NU normal = mag + (112u << 23), is_few = (NU)(mag < (8u << 20));
        return (NF)(((NU)few & is_few) | (normal & ~is_few) | (u & 0x80u) << 24);
#endif
    }
    FN NF even(const Fp8 *b, int v) { return decode(b + v * OCTAVO_WIDTH); }
    FN NF odd(const Fp8 *b, int v) { return decode(b + LANES + v * OCTAVO_WIDTH); }
};
#if defined(__AVX512BF16__)
template <> struct Weave<Fp8> {  // decoded values are bfloat16 ones
    FN void quad(const Fp8 *b, NU *even, NU *odd) {
        const auto row = [b](int k) { return (NU)Panel<Fp8>::decode(b + k * LANES); };
        *even = row(0) | (row(2) >> 16);
        *odd = row(1) | (row(3) >> 16);
    }
};
#endif
