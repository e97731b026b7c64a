// Sixteen lanes where a register has fewer: an array of registers that behaves like one vector. (gcc takes comparisons, choices, shuffles
// and conversions of vectors that are wider than a register apart lane by lane; by registers, each is an instruction or two.)
// Where a register has sixteen lanes, F, I and so on are plain vectors, and the functions below are the built-in operators.
#pragma once

#define FN static inline __attribute__((always_inline))

#if OCTAVO_WIDTH == 16
template <class T> struct LanesOf {
    typedef T type __attribute__((vector_size(sizeof(T) * LANES)));
};
template <class T> using Lanes = typename LanesOf<T>::type;

// Lanes of a where the comparison holds, else of b.
template <class M, class V> FN V pick(M holds, V a, V b) { return holds ? a : b; }
// Lane i is lane X[i] of a (up to 15) or of b (from 16 on).
template <int... X, class V> FN V shuffled(V a, V b) { return __builtin_shufflevector(a, b, X...); }
// Lanes as numbers of type T; whole numbers lose their upper bits.
template <class T, class V> FN Lanes<T> lanes_to(V v) { return __builtin_convertvector(v, Lanes<T>); }

#else
template <class T> struct Wide {
    typedef T Lane;
    static constexpr int registers = sizeof(T) * LANES > OCTAVO_WIDTH * 4 ? sizeof(T) * LANES / (OCTAVO_WIDTH * 4) : 1, each = LANES / registers;
    typedef T Register __attribute__((vector_size(sizeof(T) * each)));
    Register r[registers];
    __attribute__((always_inline)) T operator[](int i) const { return r[i / each][i % each]; }
    template <class S> __attribute__((always_inline)) explicit operator Wide<S>() const {  // the same bits
        static_assert(sizeof(S) == sizeof(T));
        Wide<S> v;
        for (int i = 0; i < registers; i++) v.r[i] = (typename Wide<S>::Register)r[i];
        return v;
    }
};
template <class T> using Lanes = Wide<T>;

#define OCTAVO_OPERATOR(OP)                                                        \
    template <class T> FN Wide<T> operator OP(Wide<T> a, Wide<T> b) {              \
        for (int i = 0; i < Wide<T>::registers; i++) a.r[i] = a.r[i] OP b.r[i];    \
        return a;                                                                  \
    }                                                                              \
    template <class T> FN Wide<T> operator OP(Wide<T> a, typename Wide<T>::Lane b) { \
        for (int i = 0; i < Wide<T>::registers; i++) a.r[i] = a.r[i] OP b;         \
        return a;                                                                  \
    }                                                                              \
    template <class T> FN Wide<T> operator OP(typename Wide<T>::Lane a, Wide<T> b) { \
        for (int i = 0; i < Wide<T>::registers; i++) b.r[i] = a OP b.r[i];         \
        return b;                                                                  \
    }                                                                              \
    template <class T, class B> FN Wide<T> &operator OP##=(Wide<T> &a, B b) { return a = a OP b; }
OCTAVO_OPERATOR(+)
OCTAVO_OPERATOR(-)
OCTAVO_OPERATOR(*)
OCTAVO_OPERATOR(/)
OCTAVO_OPERATOR(&)
OCTAVO_OPERATOR(|)
OCTAVO_OPERATOR(^)
#undef OCTAVO_OPERATOR
#define OCTAVO_SHIFT(OP)                                                           \
    template <class T> FN Wide<T> operator OP(Wide<T> a, int b) {                  \
        for (int i = 0; i < Wide<T>::registers; i++) a.r[i] = a.r[i] OP b;         \
        return a;                                                                  \
    }
OCTAVO_SHIFT(<<)
OCTAVO_SHIFT(>>)
#undef OCTAVO_SHIFT
template <class T> FN Wide<T> operator-(Wide<T> a) {
    for (int i = 0; i < Wide<T>::registers; i++) a.r[i] = -a.r[i];
    return a;
}

#define OCTAVO_COMPARISON(OP)                                                      \
    template <class T> FN Wide<int32_t> operator OP(Wide<T> a, Wide<T> b) {        \
        Wide<int32_t> m;                                                           \
        for (int i = 0; i < Wide<T>::registers; i++) m.r[i] = a.r[i] OP b.r[i];    \
        return m;                                                                  \
    }                                                                              \
    template <class T> FN Wide<int32_t> operator OP(Wide<T> a, typename Wide<T>::Lane b) { return a OP(b - Wide<T>{}); }
OCTAVO_COMPARISON(<)
OCTAVO_COMPARISON(>)
OCTAVO_COMPARISON(<=)
OCTAVO_COMPARISON(>=)
OCTAVO_COMPARISON(==)
OCTAVO_COMPARISON(!=)
#undef OCTAVO_COMPARISON

template <class T> FN Wide<T> pick(Wide<int32_t> holds, Wide<T> a, Wide<T> b) {
    for (int i = 0; i < Wide<T>::registers; i++) a.r[i] = holds.r[i] ? a.r[i] : b.r[i];
    return a;
}

template <int... J> struct Sequence {};
template <int N, int... J> struct SequenceTo : SequenceTo<N - 1, N - 1, J...> {};
template <int... J> struct SequenceTo<0, J...> {
    typedef Sequence<J...> type;
};
template <class T, int... X> struct Shuffle {  // a register of the result comes from two registers at most
    static constexpr int each = Wide<T>::each, count = Wide<T>::registers, at[LANES] = {X...};
    static constexpr int source(int i) { return at[i] / each; }
    static constexpr int other(int o) {
        for (int i = o * each; i < (o + 1) * each; i++)
            if (source(i) != source(o * each)) return source(i);
        return source(o * each);
    }
    static constexpr int place(int o, int j) {
        const int i = o * each + j;
        return source(i) == source(o * each) ? at[i] % each : source(i) == other(o) ? at[i] % each + each : throw "a third register";
    }
    template <int O, int... J>
    static __attribute__((always_inline)) typename Wide<T>::Register one(const Wide<T> &a, const Wide<T> &b, Sequence<J...>) {
        constexpr int s = source(O * each), t = other(O);
        return __builtin_shufflevector(s < count ? a.r[s % count] : b.r[s % count], t < count ? a.r[t % count] : b.r[t % count], place(O, J)...);
    }
    template <int... O> static __attribute__((always_inline)) Wide<T> all(const Wide<T> &a, const Wide<T> &b, Sequence<O...>) {
        return {{one<O>(a, b, typename SequenceTo<each>::type())...}};
    }
};
template <int... X, class T> FN Wide<T> shuffled(Wide<T> a, Wide<T> b) {
    return Shuffle<T, X...>::all(a, b, typename SequenceTo<Wide<T>::registers>::type());
}

template <class T, class S> FN Wide<T> lanes_to(Wide<S> v) {
    Wide<T> out;
    if constexpr (sizeof(T) == sizeof(S)) {
        for (int i = 0; i < Wide<T>::registers; i++) out.r[i] = __builtin_convertvector(v.r[i], typename Wide<T>::Register);
        return out;
    }
#if OCTAVO_WIDTH == 8
    constexpr int from = sizeof(S), to = sizeof(T);
    if constexpr (from == 4 && to < 4) {
        const __m256i mask = _mm256_set1_epi32(to == 2 ? 0xffff : 0xff);
        const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_and_si256((__m256i)v.r[0], mask), _mm256_and_si256((__m256i)v.r[1], mask)), 0xd8);
        if constexpr (to == 2)
            out.r[0] = (typename Wide<T>::Register)words;
        else
            out.r[0] = (typename Wide<T>::Register)_mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        return out;
    }
    if constexpr (to == 4 && from == 2 && (S)-1 > 0) {
        out.r[0] = (typename Wide<T>::Register)_mm256_cvtepu16_epi32(_mm256_castsi256_si128((__m256i)v.r[0]));
        out.r[1] = (typename Wide<T>::Register)_mm256_cvtepu16_epi32(_mm256_extracti128_si256((__m256i)v.r[0], 1));
        return out;
    }
    if constexpr (to == 4 && from == 1 && (S)-1 > 0) {
        out.r[0] = (typename Wide<T>::Register)_mm256_cvtepu8_epi32((__m128i)v.r[0]);
        out.r[1] = (typename Wide<T>::Register)_mm256_cvtepu8_epi32(_mm_srli_si128((__m128i)v.r[0], 8));
        return out;
    }
#endif
    for (int i = 0; i < LANES; i++) out.r[i / Wide<T>::each][i % Wide<T>::each] = (T)v[i];
    return out;
}
#endif

typedef Lanes<float> F;
typedef Lanes<int32_t> I;
typedef Lanes<uint32_t> U;
typedef Lanes<uint16_t> H;
typedef Lanes<int8_t> B;
