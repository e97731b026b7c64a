// The vector types that kernels are written in. F, I, U have 16 lanes on every machine, in one, two or four registers (wide.h),
// and the bits of IEEE add, multiply, divide and square root are the same on all.
// NF, NU, NI are one register of this machine.
#pragma once

#if defined(__AVX512F__)
#define OCTAVO_WIDTH 16
#elif defined(__AVX2__)
#define OCTAVO_WIDTH 8
#else
#define OCTAVO_WIDTH 4
#endif
#include "wide.h"

typedef float NF __attribute__((vector_size(OCTAVO_WIDTH * 4)));
typedef uint32_t NU __attribute__((vector_size(OCTAVO_WIDTH * 4)));
typedef int32_t NI __attribute__((vector_size(OCTAVO_WIDTH * 4)));
constexpr int NV = LANES / OCTAVO_WIDTH;  // registers of a panel row

typedef uint16_t bf16;  // the upper half of a float32

template <class V> FN V load(const void *p) {
    V v;
    if constexpr (requires { V::registers; })
        for (int i = 0; i < V::registers; i++) __builtin_memcpy(&v.r[i], (const char *)p + i * sizeof v.r[i], sizeof v.r[i]);
    else
        __builtin_memcpy(&v, p, sizeof v);
    return v;
}
template <class V> FN void store(void *p, V v) {
    if constexpr (requires { V::registers; })
        for (int i = 0; i < V::registers; i++) __builtin_memcpy((char *)p + i * sizeof v.r[i], &v.r[i], sizeof v.r[i]);
    else
        __builtin_memcpy(p, &v, sizeof v);
}
// A link of a chain of whole-number sums, which stays one: gcc would add up trees, and has too few registers for their leaves.
template <class V> FN V chained(V sum) {
#if defined(__AVX2__)
    asm("" : "+v"(sum));
#endif
    return sum;
}
FN F splat(float x) { return x - F{}; }
FN I isplat(int32_t x) { return x - I{}; }
FN U usplat(uint32_t x) { return x - U{}; }
FN NF nsplat(float x) { return x - NF{}; }
FN F bits_to_f(U u) { return (F)u; }
FN U f_to_bits(F f) { return (U)f; }
FN float as_float(uint32_t u) {
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
}
FN uint32_t as_bits(float f) {
    uint32_t u;
    __builtin_memcpy(&u, &f, 4);
    return u;
}
constexpr float INF = __builtin_inff();

// Sum of the 16 lanes in index order: the one way reductions end.
FN float sum_lanes(F v) {
    float s = v[0];
    for (int i = 1; i < LANES; i++) s += v[i];
    return s;
}
FN F max_keep(F best, F x) { return pick(x > best, x, best); }  // NaN in x never wins
FN float max_lanes(F v) {  // of numbers: the order has no influence but on the sign of a zero
    v = max_keep(v, shuffled<8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7>(v, v));
    v = max_keep(v, shuffled<4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11>(v, v));
    v = max_keep(v, shuffled<2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13>(v, v));
    return v[1] > v[0] ? v[1] : v[0];
}
// Of whole numbers, whose order has no influence at all.
template <class Both> FN int32_t fold_lanes(I v, Both both) {
    v = both(v, shuffled<8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7>(v, v));
    v = both(v, shuffled<4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11>(v, v));
    v = both(v, shuffled<2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13>(v, v));
    return both(v, shuffled<1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14>(v, v))[0];
}
FN I larger(I a, I b) {
#if defined(__AVX512F__)
    return (I)_mm512_maskz_max_epi32((__mmask16)-1, (__m512i)a, (__m512i)b);  // the plain one warns in gcc 12
#else
    return pick(a > b, a, b);
#endif
}
FN int32_t max_lanes(I v) {
    return fold_lanes(v, [](I a, I b) __attribute__((always_inline)) { return larger(a, b); });
}
FN int32_t sum_lanes(I v) {
    return fold_lanes(v, [](I a, I b) __attribute__((always_inline)) { return (I)((U)a + (U)b); });  // of rows that hold no numbers they may wrap
}

// float32 → bfloat16, to nearest even, still in float32's place. Magnitudes below 2^-60 become +0: then no product
// of two operands underflows, and a fused multiply-add equals multiply and add. NaN becomes the quiet NaN.
FN U round_bits(F x) {
    U u = f_to_bits(x);
    U r = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
    U mag = u & 0x7fffffffu;
    r = pick((I)(r & 0x7fffffffu) >= isplat(0x21800000), r, U{});
    return pick((I)mag > isplat(0x7f800000), usplat(0x7fc00000), r);
}
FN uint32_t round_bits1(uint32_t u) {
    uint32_t mag = u & 0x7fffffffu;
    if (mag > 0x7f800000u) return 0x7fc00000u;
    uint32_t r = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
    return (r & 0x7fffffffu) >= 0x21800000u ? r : 0u;
}

// Reading and writing act values, and rounding to act, for E = bf16 or float.
FN F load_act(const bf16 *p) { return bits_to_f(lanes_to<uint32_t>(load<H>(p)) << 16); }
FN F load_act(const float *p) { return load<F>(p); }
FN void store_act(bf16 *p, F x) { store<H>(p, lanes_to<uint16_t>(round_bits(x) >> 16)); }
FN void store_act(float *p, F x) { store<F>(p, x); }
FN float get_act(bf16 x) { return as_float((uint32_t)x << 16); }
FN float get_act(float x) { return x; }
FN void put_act(bf16 *p, float x) { *p = (bf16)(round_bits1(as_bits(x)) >> 16); }
FN void put_act(float *p, float x) { *p = x; }
// d values from float32 (readable to a multiple of 16) to act.
template <class E> FN void store_row(E *out, const float *x, int64_t d) {
    int64_t c = 0;
    for (; c + LANES <= d; c += LANES) store_act(out + c, load<F>(x + c));
    for (; c < d; c++) put_act(out + c, x[c]);
}
template <class E> FN F round_act(F x) {
    if constexpr (sizeof(E) == 2) return bits_to_f(round_bits(x));
    return x;
}

// exp by n·ln2 + r and a polynomial of degree 7 in r. exp(0) is 1; below -87.33 it is 0, above 88.72 infinity; NaN stays.
// SMALL: x is known to be at most 88 (softmax: at most 0); fewer steps, the same bits.
template <bool SMALL> FN F exp_of(F x) {
#if defined(__AVX512F__)
    const F y = x;  // what lies outside ends as 0 or infinity below, whatever comes before
#else
    F y = pick(x < splat(-88.0f), splat(-88.0f), x);
    if (!SMALL) y = pick(y > splat(89.0f), splat(89.0f), y);
#endif
    F t = y * 1.44269504f + 12582912.0f;  // the sum's last bits are the nearest whole number
    F k = t - 12582912.0f;
    F r = y - k * 0.693359375f;  // ln2 in two parts; the first has 10 bits, so the product is exact
    r = r - k * -2.12194440e-4f;
    F q = r * 1.98412698e-4f + 1.38888889e-3f;
    q = q * r + 8.33333333e-3f;
    q = q * r + 4.16666667e-2f;
    q = q * r + 1.66666667e-1f;
    q = q * r + 0.5f;
    F p = (r * r) * q + r;
    p = p + 1.0f;
#if defined(__AVX512F__)
    p = (F)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)k);  // times 2^k; the plain one warns in gcc 12
#else
    I n = (I)f_to_bits(t) - 0x4b400000;
    if (SMALL) {
        p = p * (F)((n + 127) << 23);
    } else {
        I half = n >> 1;  // two factors: 2^128 alone would overflow
        p = p * (F)((half + 127) << 23);
        p = p * (F)((n - half + 127) << 23);
    }
#endif
    p = pick(x < splat(-87.33654f), F{}, p);
    if (SMALL) return p;
    return pick(x > splat(88.72283f), splat(INF), p);
}
FN F exp16(F x) { return exp_of<false>(x); }
FN F exp_small(F x) { return exp_of<true>(x); }

// A run of memory that is fetched into the second cache, some lines at a time: memory then has all the time of what is computed meanwhile.
struct Fetch {
    const char *at = nullptr, *end = nullptr;
    int64_t each = 0;   // lines, for every group of 32 k of a panel that is multiplied meanwhile; 0: each line beside
    int64_t ahead = 0;  // the same line of a panel that is multiplied, which lies so many bytes before it (0: nothing)
};
// What lies from `at` on, beside products of `panels` panels of kp from `now` on, which pass `times` times.
FN Fetch fetch_beside(const void *at, int64_t bytes, const void *now, int64_t panels, int64_t times, int64_t kp) {
    if (times == 1) return {nullptr, nullptr, 0, bytes ? (const char *)at - (const char *)now : 0};
    const int64_t groups = panels * times * (kp / KBLOCK);
    return {(const char *)at, (const char *)at + bytes, (bytes / 64 + groups - 1) / groups, 0};
}
FN void fetch_some(Fetch &fetch, int64_t lines) {
    for (; lines > 0 && fetch.at < fetch.end; lines--, fetch.at += 64) __builtin_prefetch(fetch.at, 0, 2);
}
// The same by every other line: the one beside it comes along, and does not take a place among those that are waited for.
FN void fetch_pairs(Fetch &fetch, int64_t lines) {
    for (; lines > 0 && fetch.at < fetch.end; lines -= 2, fetch.at += 128) __builtin_prefetch(fetch.at, 0, 2);
}

// Next task of an op that hands them out one by one.
FN int32_t next_task(int32_t *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }
// This thread's share of n things, in one piece.
FN void share(int64_t n, int32_t thread, int32_t threads, int64_t *from, int64_t *to) {
    *from = n * thread / threads;
    *to = n * (thread + 1) / threads;
}
// Hands out the tasks of an op, chunks of rows × columns (of panels). Three quarters of the columns are given beforehand, by rows, as other ops
// share rows out, so that a thread finds most of them in its own caches; the rest go one by one to whoever is free. So threads seldom meet, and one whose
// core is disturbed (by a neighbour on the same physical one, say) does not keep the others waiting.
struct Tasks {
    struct Task {
        int64_t chunk, column;  // chunk < 0: there are no more
    };
    int64_t columns, chunks, given, threads, at = 0, end = 0;
    int32_t *counter;
    Tasks(int64_t columns, int64_t chunks, const Part &part, int32_t threads)
        : columns(columns), chunks(chunks), given(columns - columns / 4), threads(threads), counter(part.counter) {
        share(given * chunks, part.thread, threads, &at, &end);
    }
    // Calls compute(task, then) for each task of this thread. `then` is taken meanwhile, so that what it reads can be fetched; not of the last ones, which are
    // for whoever is free.
    template <class Compute> __attribute__((always_inline)) void each(Compute &&compute) {
        for (Task task = next(), then; task.chunk >= 0; task = then) {
            const bool early = at < end || (columns - given) * chunks - __atomic_load_n(counter, __ATOMIC_RELAXED) > threads;
            then = early ? next() : Task{-1, 0};
            compute(task, then);
            if (!early) then = next();
        }
    }

private:
    __attribute__((always_inline)) Task next() {
        if (at < end) return {at / given, at++ % given};
        const int64_t task = next_task(counter), rest = columns - given;
        return task < rest * chunks ? Task{task / rest, given + task % rest} : Task{-1, 0};
    }
};
