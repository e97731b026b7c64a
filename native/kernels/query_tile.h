// One tile of attention: up to QROWS packed query rows, their scores over one partition, the probabilities that these become, and how
// partitions are combined. What it is used for stands in attention.h.
//
// E: act; S: what the cache stores.
#pragma once

struct QueryTile {
    int64_t row;  // the first, of the sequence's packed rows of this step
    int rows;
    bool matrix;  // the products go to matrix units
    int64_t dp;
    float *q;       // [QROWS][Dp] float32 values of act precision
    bf16 *q16;      // instead: as bf16, for matrix units; the same woven, where products take that (product.h)
    int32_t *qi;    // the same as pairs of 16-bit numbers, for integer KV types
    int8_t *q8;     // or, for matrix units, their upper and their lower bytes: [2][QROWS][Dp to a multiple of 64]
    char *v;        // for these: a partition's V, together (mix_bytes)
    float *scores;  // [QROWS][SCORES], of which PARTITION are in use; each row then becomes, in its place, probabilities times V's scales: float32 rounded to act,
                    // bf16 for matrix units, woven, or pairs of 16-bit numbers; of these, for matrix units, for each 64 tokens the upper bytes,
                    // then the lower ones
    float *ks, *vs;  // [PARTITION] scales of the tokens, for quantized KV types
    float *sum;     // [QROWS][Dp] so far
    int32_t low[QROWS], high[QROWS];  // first and last token that a row sees
    float scale[QROWS], factor[QROWS];  // of the scores; of the integer products over tokens
    float top[QROWS], mass[QROWS];    // so far: the largest score, the sum of exp(score - top)
    bool begun[QROWS];
};

// What one partition gave: the rows' outputs, largest scores and masses.
struct Partial {
    float *out, *top, *mass;
};
FN Partial partial_at(float *at, int64_t dp, int64_t rows = QROWS) {
    float *top = at + (rows < QROWS ? rows : QROWS) * dp;
    return {at, top, top + QROWS};
}
FN Partial so_far(QueryTile &tile) { return {tile.sum, tile.top, tile.mass}; }
FN bool sees(const QueryTile &tile, int r, int64_t base) { return tile.low[r] < base + PARTITION && tile.high[r] >= base; }

template <class E, class S> constexpr bool woven = sizeof(Operand<E, S>) == 2;
template <class E, class S> FN const Operand<E, S> *queries(const QueryTile &tile) {
    if constexpr (woven<E, S>) return (const Woven *)tile.q16;
    else return tile.q;
}

// Whether products of so many rows go to matrix units; few rows do not pay for it.
template <class E, class S> FN bool matrix_units(int64_t rows) {
#ifdef OCTAVO_AMX
    return ((sizeof(E) == 2 && sizeof(S) == 2) || __is_same(S, Int8)) && rows >= 5;
#else
    (void)rows;
    return false;
#endif
}

constexpr int BYTE_BLOCKS = 4;                                 // of tokens, whose bytes fill a row of a tile
constexpr int64_t BYTE_PANEL = PARTITION * LANES + 64;         // bytes of a partition's V of 16 dims; not a multiple of 4096

// Whole numbers of 16 bits by the largest magnitude: returns what 1 stands for, and sets what to multiply with.
FN float to_whole(float most, float *inv) {
    if (most < LEAST_SCALE) return *inv = 0.0f;
    *inv = 32767.0f / most;
    return most / 32767.0f;
}

// x of a block's 16 tokens from `first` on, where row r sees them.
FN F seen(const QueryTile &tile, int r, int32_t first, F x, float otherwise) {
    const int32_t low = tile.low[r], high = tile.high[r];
    if (first >= low && first + TOKENS - 1 <= high) return x;
    const I token = I{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + first;
    x = pick(token >= isplat(low), x, splat(otherwise));
    return pick(token <= isplat(high), x, splat(otherwise));
}

// Scores of row r times what they are scaled with, -inf where it does not see. Returns the largest of each lane.
template <class S> FN F scale_scores(QueryTile &tile, int r, int32_t base, int from, int to) {
    float *s = tile.scores + r * SCORES;
    F best = splat(-INF);
    for (int j = from; j < to; j++) {
        F x = load<F>(s + j * TOKENS);
        if constexpr (Stored<S>::scaled) x = x * load<F>(tile.ks + j * TOKENS);
        x = seen(tile, r, base + j * TOKENS, x * tile.scale[r], -INF);
        store<F>(s + j * TOKENS, x);
        best = max_keep(best, x);
    }
    return best;
}

// Scores of row r become what V is multiplied with. Returns the sums of the probabilities of each lane.
template <class E, class S> FN F take_exps(QueryTile &tile, int r, int32_t base, int from, int to, float top) {
    float *s = tile.scores + r * SCORES;
    F sum = {};
    const auto weight = [&](int j) {
        F p = load<F>(s + j * TOKENS) - top;
        p = sizeof(E) == 2 ? exp_rounded(p) : exp_small(p);
        p = seen(tile, r, base + j * TOKENS, p, 0.0f);
        sum = sum + p;
        if constexpr (!Stored<S>::scaled) return p;
        p = seen(tile, r, base + j * TOKENS, p * load<F>(tile.vs + j * TOKENS), 0.0f);
        return Stored<S>::integer ? p : round_act<E>(p);
    };
    const auto by_twos = [&](auto value, auto put) __attribute__((always_inline)) {
        int j = from;
        for (; j + 2 <= to; j += 2) {
            const auto first = value(j);
            put(j, first, value(j + 1));
        }
        if (j < to) put(j, value(j));
    };
    const auto halves = [&](auto *out) {
        by_twos(weight, [&](int j, auto... p) __attribute__((always_inline)) { store_halves(out + j * TOKENS, p...); });
        return sum;
    };
    if constexpr (woven<E, S>) return halves((Woven *)s);
    if (sizeof(E) == 2 && sizeof(S) == 2 && tile.matrix) return halves((bf16 *)s);
    I most = {};  // bits of the largest magnitude; a NaN's exceed all
    for (int j = from; j < to; j++) {
        const F p = weight(j);
        store<F>(s + j * TOKENS, p);
        most = larger((I)(f_to_bits(p) & 0x7fffffffu), most);
    }
    if constexpr (Stored<S>::integer) {
        float inv;
        tile.factor[r] = to_whole(as_float((uint32_t)max_lanes(most)), &inv);
        const auto whole = [&](int j) { return nearest_of_numbers(load<F>(s + j * TOKENS) * inv); };
        if (__is_same(S, Int8) && tile.matrix) {
            for (int j = from / BYTE_BLOCKS * BYTE_BLOCKS; j < to; j += BYTE_BLOCKS) {
                I all[BYTE_BLOCKS];  // all of them first: their bytes take the place of the first two
                for (int b = 0; b < BYTE_BLOCKS; b++) all[b] = j + b >= from && j + b < to ? whole(j + b) : I{};
                int8_t *bytes = (int8_t *)s + j * 2 * TOKENS;
                for (int b = 0; b < BYTE_BLOCKS; b++) {
                    store_codes(bytes + b * TOKENS, all[b] >> 8);
                    store_codes(bytes + (BYTE_BLOCKS + b) * TOKENS, all[b]);
                }
            }
            return sum;
        }
        by_twos(whole, [&](int j, auto... n) __attribute__((always_inline)) { store_quads((int32_t *)s + j * TOKENS / 2, n...); });
    }
    return sum;
}

// The scores of one partition become probabilities. Blocks from … to of it were scored.
template <class E, class S> static void softmax(QueryTile &tile, int64_t base, int from, int to, float *top, float *mass) {
    F rows[QROWS];
    for (int r = 0; r < QROWS; r++) rows[r] = r < tile.rows && sees(tile, r, base) ? scale_scores<S>(tile, r, (int32_t)base, from, to) : splat(-INF);
    transpose(rows);
    for (int i = 1; i < LANES; i++) rows[0] = max_keep(rows[0], rows[i]);
    store<F>(top, rows[0]);
    for (int r = 0; r < QROWS; r++) {
        rows[r] = F{};
        if (r >= tile.rows) continue;
        if (sees(tile, r, base)) {
            rows[r] = take_exps<E, S>(tile, r, (int32_t)base, from, to, top[r]);
        } else {  // the tile's other rows see this partition; this one must not meet old numbers
            __builtin_memset(tile.scores + r * SCORES, 0, PARTITION * 4);
            tile.factor[r] = 0;
        }
    }
    transpose(rows);
    for (int i = 1; i < LANES; i++) rows[0] = rows[0] + rows[i];
    store<F>(mass, rows[0]);
}

// Adds a partition to what the rows that see it have so far. Lanes are rows where they can be.
static void combine(QueryTile &tile, int64_t base, const Partial &here) {
    const int64_t dp = tile.dp;
    if (here.out == tile.sum) {  // the first one, which was put into its place
        for (int r = 0; r < tile.rows; r++) tile.begun[r] = sees(tile, r, base);
        return;
    }
    const F old = load<F>(tile.top), top = load<F>(here.top), both = pick(top > old, top, old);
    const F before = exp16(old - both), now = exp16(top - both);
    const F mass = load<F>(tile.mass) * before + load<F>(here.mass) * now;
    for (int r = 0; r < tile.rows; r++) {
        if (!sees(tile, r, base)) continue;
        float *sum = tile.sum + r * dp;
        const float *part = here.out + r * dp;
        if (!tile.begun[r]) {
            tile.begun[r] = true, tile.top[r] = here.top[r], tile.mass[r] = here.mass[r];
            __builtin_memcpy(sum, part, (size_t)dp * 4);
            continue;
        }
        const float a = before[r], b = now[r];
        for (int64_t c = 0; c < dp; c += LANES) store<F>(sum + c, load<F>(sum + c) * a + load<F>(part + c) * b);
        tile.mass[r] = mass[r], tile.top[r] = both[r];
    }
}
