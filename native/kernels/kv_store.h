// Writing tokens' K and V into the cache (kv.h). Successive tokens of a block go together, in whole lines where they fill them;
// never a byte of another token, which another thread may be writing.
#pragma once

// A row of K or V (float32, Dp values with zeros behind D) as elements in order. Returns the scale's bits.
template <class S, bool K> FN uint16_t to_elements(const float *x, int64_t dp, typename Stored<S>::Element *out) {
    if constexpr (!Stored<S>::scaled) {
        store_row(out, x, dp);
        return 0;
    } else if constexpr (Stored<S>::bits == 8) {
        return (uint16_t)(as_bits(encode(S(), x, dp, (int8_t *)out)) >> 16);
    } else {
        int8_t codes[MAX_HEAD_DIM];
        const float scale = encode(S(), x, dp, codes);
        for (int64_t c = 0; c < dp; c += 2 * LANES) {
            B low = load<B>(codes + c), high = load<B>(codes + c + LANES);
            if (K) {
                const B a = low, b = high;  // by quads: 0 2 of each, 1 3 of each
                low = shuffled<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(a, b);
                high = shuffled<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>(a, b);
            }
            store<B>(out + c / 2, (low & 15) | (high << 4));
        }
        return (uint16_t)(as_bits(scale) >> 16);
    }
}

// x[i][j] becomes x[j][i], by four perfect shuffles. V: 16 lanes of any type.
template <class V> FN void transpose(V (&x)[LANES]) {
#pragma GCC unroll 4
    for (int round = 0; round < 4; round++) {
        V y[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            const V a = x[i], b = x[i + LANES / 2];
            y[2 * i] = shuffled<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(a, b);
            y[2 * i + 1] = shuffled<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(a, b);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) x[i] = y[i];
    }
}

// K of n tokens from `token` on: columns of a panel [count][16] of cells. rows: [n][count] cells, readable for 15 more.
template <class Cell> FN void store_columns(char *panel, int64_t token, int64_t n, const void *rows, int64_t count) {
    typedef Lanes<Cell> V;
    constexpr int64_t size = sizeof(Cell);
    const char *from = (const char *)rows;
    if (n < TOKENS) {
        for (int64_t i = 0; i < n; i++)
            for (int64_t c = 0; c < count; c++) __builtin_memcpy(panel + (c * TOKENS + token + i) * size, from + (i * count + c) * size, size);
        return;
    }
    for (int64_t c = 0; c < count; c += LANES) {
        V x[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) x[i] = load<V>(from + (i * count + c) * size);
        transpose(x);
        for (int i = 0; i < LANES && c + i < count; i++) store<V>(panel + (c + i) * TOKENS * size, x[i]);
    }
}

// V of n tokens: panels of 16 columns, in which the elements of PER tokens lie together. rows: [n][count] elements.
template <int PER, class Element> FN void store_panels(Element *panels, int64_t token, int64_t n, const Element *rows, int64_t count) {
    typedef Lanes<Element> V;
    for (int64_t i = 0; i < n;) {
        const int64_t inner = (token + i) % PER;
        const Element *row = rows + i * count;
        Element *line = panels + (token + i - inner) * LANES;
        if (inner > 0 || i + PER > n) {
            for (int64_t c = 0; c < count; c++) line[c / LANES * (TOKENS * LANES) + c % LANES * PER + inner] = row[c];
            i++;
            continue;
        }
        for (int64_t c = 0; c < count; c += LANES) {
            if constexpr (PER == 1) {
                store<V>(line + c * TOKENS, load<V>(row + c));
            } else {
                U cells = {};
                for (int j = 0; j < PER; j++) cells = cells | (lanes_to<uint32_t>(load<V>(row + j * count + c)) << (32 / PER * j));
                store<U>(line + c * TOKENS, cells);
            }
        }
        i += PER;
    }
}

// K and V of up to 16 successive tokens of one block, for one KV head.
template <class S> struct Stage {
    typedef typename Stored<S>::Element Element;
    typedef typename Stored<S>::Cell Cell;
    static constexpr int64_t per = sizeof(Cell) / sizeof(Element);
    const int64_t dp, count = kv_half<S>(dp) / TOKENS / (int64_t)sizeof(Element);  // elements of a row
    bf16 scales[2][TOKENS];  // of K, of V
    alignas(64) Element k[TOKENS * MAX_HEAD_DIM + LANES * per], v[TOKENS * MAX_HEAD_DIM];

    explicit Stage(int64_t dp) : dp(dp) {}
    void take(int64_t i, const float *key, const float *value) {
        scales[0][i] = to_elements<S, true>(key, dp, k + i * count);
        scales[1][i] = to_elements<S, false>(value, dp, v + i * count);
    }
    // `fresh`: the last of the tokens is the block's last one so far, and what lies behind it a former owner left.
    void write(char *unit, int64_t token, int64_t n, bool fresh) {
        store_columns<Cell>(unit, token, n, k, count / per);
        if constexpr (Stored<S>::scaled) {
            for (int i = 0; i < 2; i++) __builtin_memcpy(unit + 2 * kv_half<S>(dp) + (i * TOKENS + token) * 2, scales[i], (size_t)n * 2);
        } else if (fresh) {  // V behind it would meet probability 0, and 0 · NaN is NaN
            __builtin_memset(v + n * count, 0, (size_t)((TOKENS - token - n) * count) * sizeof(Element));
            n = TOKENS - token;
        }
        store_panels<per>((Element *)(unit + kv_half<S>(dp)), token, n, v, count);
    }
};
