// Causal attention over the block tables. A task is up to QTILES tiles of QROWS packed query rows (tokens × the heads of one KV
// head) of one sequence, which share what is read; softmax goes by fixed partitions of 256 absolute tokens, combined from left to right.
//
// A task that is much of the step's work is cut into pieces, ranges of whole partitions, for several threads. Their
// results are kept apart, and whoever finishes the last piece combines all of them, from left to right as ever.
//
// Sequences that decode over the same blocks (a prefix that the cache gave to all, samples of one prompt) meet them together: one
// piece takes the rows of all over the partitions that they share, and reads K and V once (Hydragen, Juravsky et al. 2024; here
// the partitions are those of the contract, so the bits are the same).
//
// Row purity: a row's value depends on its own query, its range of tokens and the cache only. Blocks and partitions
// outside a row's range, which it walks through because of its neighbours in the task, have probability 0 and add +0,
// or are skipped for this row.
//
// Quantized types: a token's scores are taken times the scale of its K, and its probability times the scale of its V. fp8
// (scales are powers of two) is then what bfloat16 gives for the same values. With int8 and int4 the products are of whole
// numbers (dot16.h): a query row, and a partition's probabilities times V's scales, become 16-bit numbers by their largest
// magnitude.
//
// E: act; S: what the cache stores.
// p: q, out. n: rows kind, ld (of both), H, G, D, Dp, offset of the layer in a block (bytes), window (0: none), KV type.
// f: scale.
#pragma once

struct QueryTile {
    int64_t row;  // the first, of the sequence's packed rows of this step
    int rows;
    bool matrix;  // the products go to matrix units
    int64_t dp;
    float *q;       // [QROWS][Dp] float32 values of act precision
    bf16 *q16;      // instead: as bf16, for matrix units; the same woven, where products take that (product.h)
    int32_t *qi;    // the same as pairs of 16-bit numbers, for integer KV types
    float *scores;  // [QROWS][PARTITION]; each row then becomes, in its place, probabilities times V's scales: float32 rounded to act,
                    // bf16 for matrix units, woven, or pairs of 16-bit numbers
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
    return sizeof(E) == 2 && sizeof(S) == 2 && rows >= 5;
#else
    (void)rows;
    return false;
#endif
}

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
    x = token >= isplat(low) ? x : splat(otherwise);
    return token <= isplat(high) ? x : splat(otherwise);
}

// Scores of row r times what they are scaled with, -inf where it does not see. Returns the largest of each lane.
template <class S> FN F scale_scores(QueryTile &tile, int r, int32_t base, int from, int to) {
    float *s = tile.scores + r * PARTITION;
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
    float *s = tile.scores + r * PARTITION;
    F sum = {};
    const auto weight = [&](int j) {
        F p = load<F>(s + j * TOKENS) - top;
        p = sizeof(E) == 2 && !Stored<S>::integer ? exp_rounded(p) : exp_small(p);
        p = seen(tile, r, base + j * TOKENS, p, 0.0f);
        sum = sum + p;
        if constexpr (!Stored<S>::scaled) return p;
        p = seen(tile, r, base + j * TOKENS, p * load<F>(tile.vs + j * TOKENS), 0.0f);
        return Stored<S>::integer ? p : round_act<E>(p);
    };
    const auto halves = [&](auto *out) {
        int j = from;
        for (; j + 2 <= to; j += 2) {
            const F p = weight(j);
            store_halves(out + j * TOKENS, p, weight(j + 1));
        }
        if (j < to) store_halves(out + j * TOKENS, weight(j));
        return sum;
    };
    if constexpr (woven<E, S>) return halves((Woven *)s);
    if (sizeof(E) == 2 && sizeof(S) == 2 && tile.matrix) return halves((bf16 *)s);
    I most = {};  // bits of the largest magnitude; a NaN's exceed all
    for (int j = from; j < to; j++) {
        const F p = weight(j);
        store<F>(s + j * TOKENS, p);
        const I mag = (I)(f_to_bits(p) & 0x7fffffffu);
        most = mag > most ? mag : most;
    }
    if constexpr (Stored<S>::integer) {
        float inv;
        tile.factor[r] = to_whole(as_float((uint32_t)max_lanes(most)), &inv);
        for (int j = from; j < to; j++) store_quads((int32_t *)s + j * TOKENS / 2, nearest(load<F>(s + j * TOKENS) * inv));
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
            __builtin_memset(tile.scores + r * PARTITION, 0, PARTITION * 4);
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
    const F old = load<F>(tile.top), top = load<F>(here.top), both = top > old ? top : old;
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

// Products of one or two tiles on matrix units: what is loaded from K and V meets the rows of both. `next` (or null), here and below:
// the blocks that are read after this partition, fetched meanwhile.
#ifdef OCTAVO_AMX
template <int TILES> static void score_matrix(const QueryTile *tile, const char *const *k, const char *const *next, int from, int to) {
    const int64_t dp = tile->dp;
    for (int j = from; j < to; j += 2) {
        const bool two = j + 1 < to;
        TILE_ZERO(0);
        TILE_ZERO(1);
        if (TILES == 2) TILE_ZERO(2);
        if (TILES == 2) TILE_ZERO(3);
        for (int64_t c = 0; c < dp; c += KBLOCK) {
            const bf16 *block = (const bf16 *)k[j] + c * LANES;
            TILE_LOAD(6, block, 64);
            if (next) fetch_tile(block, (next[j] - k[j]) / 2);
            TILE_LOAD(4, tile[0].q16 + c, dp * 2);
            TILE_DOT(0, 4, 6);
            if (TILES == 2) {
                TILE_LOAD(4, tile[1].q16 + c, dp * 2);
                TILE_DOT(2, 4, 6);
            }
            if (!two) continue;
            block = (const bf16 *)k[j + 1] + c * LANES;
            TILE_LOAD(6, block, 64);
            if (next) fetch_tile(block, (next[j + 1] - k[j + 1]) / 2);
            if (TILES == 2) {
                TILE_DOT(3, 4, 6);
                TILE_LOAD(4, tile[0].q16 + c, dp * 2);
            }
            TILE_DOT(1, 4, 6);
        }
        TILE_STORE(0, tile[0].scores + j * TOKENS, PARTITION * 4);
        if (TILES == 2) TILE_STORE(2, tile[1].scores + j * TOKENS, PARTITION * 4);
        if (!two) continue;
        TILE_STORE(1, tile[0].scores + (j + 1) * TOKENS, PARTITION * 4);
        if (TILES == 2) TILE_STORE(3, tile[1].scores + (j + 1) * TOKENS, PARTITION * 4);
    }
}

template <int TILES> static void mix_matrix(const QueryTile *tile, const char *const *k, const char *const *next, int from, int to, const Partial *here) {
    const int64_t dp = tile->dp, half = kv_half<bf16>(dp), panel = kv_half<bf16>(LANES);
    const bf16 *p[QTILES];
    for (int i = 0; i < TILES; i++) p[i] = (const bf16 *)tile[i].scores;
    for (int64_t c = 0; c < dp; c += 2 * LANES) {  // Dp is a multiple of 32
        TILE_ZERO(0);
        TILE_ZERO(1);
        if (TILES == 2) TILE_ZERO(2);
        if (TILES == 2) TILE_ZERO(3);
        for (int j = from; j < to; j++) {
            const char *v = k[j] + half + c / LANES * panel;
            if (next) fetch_tile((const bf16 *)v, (next[j] - k[j]) / 2);  // of both panels
            TILE_LOAD(5, p[0] + j * TOKENS, PARTITION * 4);
            TILE_LOAD(7, v, 64);
            TILE_DOT(0, 5, 7);
            if (TILES == 2) {
                TILE_LOAD(5, p[1] + j * TOKENS, PARTITION * 4);
                TILE_DOT(2, 5, 7);
            }
            TILE_LOAD(7, v + panel, 64);
            if (TILES == 2) {
                TILE_DOT(3, 5, 7);
                TILE_LOAD(5, p[0] + j * TOKENS, PARTITION * 4);
            }
            TILE_DOT(1, 5, 7);
        }
        TILE_STORE(0, here[0].out + c, dp * 4);
        TILE_STORE(1, here[0].out + c + LANES, dp * 4);
        if (TILES == 2) TILE_STORE(2, here[1].out + c, dp * 4);
        if (TILES == 2) TILE_STORE(3, here[1].out + c + LANES, dp * 4);
    }
}
#endif

template <class E, class S> static void score_tile(const QueryTile &tile, const char *const *k, const char *const *next, int from, int to) {
    for (int r = 0; r < tile.rows; r += MAX_ROWS) {
        const int n = tile.rows - r < MAX_ROWS ? tile.rows - r : MAX_ROWS;
        const char *const *ahead = r == 0 ? next : nullptr;
        if constexpr (Stored<S>::integer) {
            with_rows<MAX_ROWS>(n, [&]<int MR>() {
                constexpr int blocks = OCTAVO_WIDTH < 16 ? 1 : MR <= 4 ? 4 : 2;
                const int32_t *q = tile.qi + r * tile.dp / 2;
                float *out = tile.scores + r * PARTITION;
                int j = from;
                for (; j + blocks <= to; j += blocks) dot_scores<S, MR, blocks>(q, tile.dp / 2, k + j, ahead ? ahead + j : ahead, tile.dp, out + j * TOKENS, PARTITION);
                for (; j < to; j++) dot_scores<S, MR, 1>(q, tile.dp / 2, k + j, ahead ? ahead + j : ahead, tile.dp, out + j * TOKENS, PARTITION);
            });
        } else {
            for (int j = from; j < to; j++) {
                Fetch fetch;
                if (ahead) fetch.ahead = ahead[j] - k[j];
                product_rows<E>(n, 1, queries<E, S>(tile) + r * tile.dp, tile.dp, (const S *)k[j], 0, tile.dp, fetch,
                                tile.scores + r * PARTITION + j * TOKENS, 0, PARTITION);
            }
        }
    }
}

template <class E, class S> static void mix_tile(const QueryTile &tile, const char *const *k, const char *const *next, int from, int to, float *out) {
    const int64_t dp = tile.dp, panel = kv_half<S>(LANES);
    for (int r = 0; r < tile.rows; r += MAX_ROWS) {
        const int n = tile.rows - r < MAX_ROWS ? tile.rows - r : MAX_ROWS;
        const char *const *ahead = r == 0 ? next : nullptr;
        if constexpr (Stored<S>::integer) {
            with_rows<MAX_ROWS>(n, [&]<int MR>() {
                const int32_t *p = (const int32_t *)tile.scores + r * PARTITION + from * TOKENS / 2;
                const auto mix_panels = [&]<int NP>(int64_t c) {
                    dot_mix<S, MR, NP>(p, PARTITION, k + from, ahead ? ahead + from : ahead, kv_half<S>(dp) + c / LANES * panel, to - from,
                                       tile.factor + r, out + r * dp + c, dp);
                };
                constexpr int panels = OCTAVO_WIDTH == 16 && MR <= 4 ? 4 : 2;
                int64_t c = 0;
                for (; c + panels * LANES <= dp; c += panels * LANES) mix_panels.template operator()<panels>(c);
                for (; c < dp; c += 2 * LANES) mix_panels.template operator()<2>(c);
            });
        } else {
            const auto *p = (const Operand<E, S> *)(tile.scores + r * PARTITION) + from * TOKENS;
            for (int64_t c = 0; c < dp; c += LANES)
                mix_rows<E, S>(n, p, PARTITION * 4 / sizeof *p, k + from, ahead ? ahead + from : ahead,
                               kv_half<S>(dp) + c / LANES * panel, to - from, out + r * dp + c, dp);
        }
    }
}

FN int64_t token_of(const Run &run, const Tile &work, int64_t i) {  // the i-th of the work's tokens
    return work.shared >= 0 ? run.members[work.shared + i].token : run.step.q_start[work.seq] + i;
}
// Calls visit(row of the tile, token of the step, query head) for each row.
template <class Visit> FN void each_row(const Op &op, const Run &run, const QueryTile &tile, const Tile &work, int64_t g, Visit &&visit) {
    const int64_t per = op.n[2] / op.n[3];
    int64_t token = tile.row / per, i = tile.row % per;
    for (int r = 0; r < tile.rows; r++) {
        visit(r, token_of(run, work, token), g * per + i);
        if (++i == per) i = 0, token++;
    }
}

// The n-th tile of the work: its rows, and the range of tokens of each.
static void begin_tile(const Op &op, const Run &run, QueryTile &tile, const Tile &work, int n, int64_t g) {
    const int64_t window = op.n[7];
    const int left = work.rows - n * QROWS;
    tile.row = work.row + n * QROWS, tile.rows = left < QROWS ? left : QROWS;
    each_row(op, run, tile, work, g, [&](int r, int64_t t, int64_t) {
        tile.high[r] = run.step.positions[t];
        tile.low[r] = window > 0 && tile.high[r] >= window ? tile.high[r] - (int32_t)window + 1 : 0;
        tile.begun[r] = false;
    });
}

// Takes a tile's queries.
template <class E, class S> static void take_queries(const Op &op, const Run &run, QueryTile &tile, const Tile &work, int64_t g) {
    const int64_t ld = op.n[1], d = op.n[4], dp = tile.dp;
    each_row(op, run, tile, work, g, [&](int r, int64_t t, int64_t h) {
        const E *q = (const E *)op.p[0] + t * ld + h * d;
        tile.scale[r] = op.f[0];
        if (sizeof(E) == 2 && tile.matrix) {
            __builtin_memcpy(tile.q16 + r * dp, q, (size_t)d * 2);
            __builtin_memset(tile.q16 + r * dp + d, 0, (size_t)(dp - d) * 2);
            return;
        }
        float *x = tile.q + r * dp;
        int64_t c = 0;
        for (; c + LANES <= d; c += LANES) store<F>(x + c, load_act(q + c));
        for (; c < dp; c++) x[c] = c < d ? get_act(q[c]) : 0;
        if constexpr (woven<E, S>)
            for (c = 0; c < dp; c += LANES) store_act((Woven *)tile.q16 + r * dp + c, load<F>(x + c));
        if constexpr (Stored<S>::integer) {
            float inv;
            spread(x, dp);
            tile.scale[r] = op.f[0] * to_whole(largest(x, dp), &inv);
            for (c = 0; c < dp; c += LANES) store_quads(tile.qi + (r * dp + c) / 2, nearest(load<F>(x + c) * inv));
        }
    });
}

// What a task reads: tokens low … high of its sequence, and of these, partitions from … to.
struct Reach {
    const int32_t *table;  // the sequence's blocks
    const char *unit;      // where the KV head's lies in block 0
    int64_t low, high, from, to;
};
template <class S> FN Reach reach_of(const Op &op, const Run &run, const Tile &work, int64_t g) {
    const int64_t per = op.n[2] / op.n[3], window = op.n[7];
    const auto position = [&](int64_t row) { return (int64_t)run.step.positions[token_of(run, work, row / per)]; };  // of a sequence's rows it rises
    const int64_t token = position(work.row);
    Reach r;
    r.table = run.slots.block_table + (int64_t)run.step.seq_slot[work.seq] * run.table_stride;
    r.unit = run.kv + op.n[6] + g * kv_unit<S>(op.n[5]);
    r.low = window > 0 && token >= window ? token - window + 1 : 0;
    r.high = work.shared >= 0 ? (int64_t)work.end * PARTITION - 1 : position(work.row + work.rows - 1);
    const int64_t first = r.low / PARTITION > work.begin ? r.low / PARTITION : work.begin, count = r.high / PARTITION - first + 1;
    r.from = first + count * work.piece / work.pieces, r.to = first + count * (work.piece + 1) / work.pieces;
    return r;
}
// The blocks of one partition, where the head's K lies in each.
struct Blocks {
    const char *at[PARTITION / TOKENS];
    int from = 0, to = 0;
};
FN Blocks blocks_of(const Run &run, const Reach &reach, int64_t partition) {
    const int64_t base = partition * PARTITION;
    Blocks b;
    b.from = base < reach.low ? (int)((reach.low - base) / TOKENS) : 0;
    b.to = reach.high - base < PARTITION ? (int)((reach.high - base) / TOKENS + 1) : PARTITION / TOKENS;
    for (int j = b.from; j < b.to; j++) b.at[j] = reach.unit + (size_t)reach.table[base / TOKENS + j] * run.block_bytes;
    return b;
}

// Scores, probabilities and output of one partition. `then`: the blocks that this thread reads next, fetched meanwhile.
template <class E, class S> static void partition(QueryTile *tile, int tiles, int64_t base, const Blocks &now, const Blocks &then, const Partial *here) {
    const int from = now.from, to = now.to;
    const char *const *k = now.at, *next[PARTITION / TOKENS];
    for (int j = from; j < to; j++) {
        if (then.to > 0) next[j] = then.at[j - from < then.to - then.from ? then.from + j - from : then.to - 1];
        if constexpr (Stored<S>::scaled) {
            const int64_t at = 2 * kv_half<S>(tile->dp);
            const bf16 *scales = (const bf16 *)(k[j] + at);
            if (then.to > 0) __builtin_prefetch(next[j] + at, 0, 2);
            store<F>(tile->ks + j * TOKENS, load_act(scales) * Stored<S>::unit);
            store<F>(tile->vs + j * TOKENS, load_act(scales + TOKENS) * Stored<S>::unit);
        }
    }
    const char *const *ahead = then.to > 0 ? next : nullptr;
#ifdef OCTAVO_AMX
    if constexpr (sizeof(E) == 2 && sizeof(S) == 2) if (tile->matrix) {
        tiles == 1 ? score_matrix<1>(tile, k, ahead, from, to) : score_matrix<2>(tile, k, ahead, from, to);
        for (int i = 0; i < tiles; i++) softmax<E, S>(tile[i], base, from, to, here[i].top, here[i].mass);
        tiles == 1 ? mix_matrix<1>(tile, k, ahead, from, to, here) : mix_matrix<2>(tile, k, ahead, from, to, here);
        return;
    }
#endif
    for (int i = 0; i < tiles; i++) {
        score_tile<E, S>(tile[i], k, i == 0 ? ahead : nullptr, from, to);
        softmax<E, S>(tile[i], base, from, to, here[i].top, here[i].mass);
        mix_tile<E, S>(tile[i], k, i == 0 ? ahead : nullptr, from, to, here[i].out);
    }
}

// The quotients, rounded to act.
template <class E> static void finish_tile(const Op &op, const Run &run, const QueryTile &tile, const Tile &work, int64_t g) {
    const int64_t ld = op.n[1], d = op.n[4];
    each_row(op, run, tile, work, g, [&](int r, int64_t t, int64_t h) {
        E *out = (E *)op.p[1] + t * ld;
        const float *sum = tile.sum + r * tile.dp;
        int64_t c = 0;
        for (; c + LANES <= d; c += LANES) store_act(out + h * d + c, load<F>(sum + c) / tile.mass[r]);
        for (; c < d; c++) put_act(out + h * d + c, sum[c] / tile.mass[r]);
        if (h == op.n[2] - 1)
            for (c = op.n[2] * d; c < ld; c++) out[c] = 0;
    });
}

// Where a split's results of one partition lie.
FN Partial kept(const Split &split, int64_t g, int64_t partition, int n, int64_t dp) {
    const int64_t tiles = (split.rows + QROWS - 1) / QROWS;
    return partial_at(split.at + ((g * split.partitions + partition) * tiles + n) * partial_floats(dp, split.rows), dp, split.rows);
}
FN void keep_row(const Partial &to, int64_t i, const Partial &from, int r, int64_t dp) {
    __builtin_memcpy(to.out + i * dp, from.out + r * dp, (size_t)dp * 4);
    to.top[i] = from.top[r], to.mass[i] = from.mass[r];
}

// One piece of a split is done. Behind the last one, its partitions are combined.
template <class E> static void finish_piece(const Op &op, const Run &run, QueryTile *tile, const Split &split, int64_t g) {
    if (__atomic_add_fetch(split.done + g, 1, __ATOMIC_ACQ_REL) < split.pieces) return;
    __atomic_store_n(split.done + g, 0, __ATOMIC_RELAXED);  // for the next layer, which is a barrier away
    const Tile work = {.seq = split.seq, .row = split.row, .rows = split.rows};
    for (int n = 0; n * QROWS < split.rows; n++) {
        begin_tile(op, run, tile[n], work, n, g);
        for (int64_t i = tile[n].low[0] / PARTITION; i <= tile[n].high[tile[n].rows - 1] / PARTITION; i++)
            combine(tile[n], i * PARTITION, kept(split, g, i, n, tile->dp));
        finish_tile<E>(op, run, tile[n], work, g);
    }
}

// One task. tile: [QTILES] with memory, scratch: that of as many partials. `behind`: what this thread reads first of its next task.
template <class E, class S>
static void attend(const Op &op, const Run &run, QueryTile *tile, const Tile &work, int64_t g, const Reach &reach, const Blocks &behind, float *scratch) {
    const int64_t dp = tile->dp, per = op.n[2] / op.n[3];
    const int tiles = (work.rows + QROWS - 1) / QROWS;
    for (int n = 0; n < tiles; n++) {
        begin_tile(op, run, tile[n], work, n, g);
        tile[n].matrix = matrix_units<E, S>(work.rows);
        take_queries<E, S>(op, run, tile[n], work, g);
    }
    const bool apart = work.split >= 0 || work.shared >= 0;
    Partial here[QTILES];
    Blocks now = blocks_of(run, reach, reach.from), then;
    for (int64_t i = reach.from; i < reach.to; i++, now = then) {
        then = i + 1 < reach.to ? blocks_of(run, reach, i + 1) : behind;
        for (int n = 0; n < tiles; n++) here[n] = !apart && i == reach.from ? so_far(tile[n]) : partial_at(scratch + n * partial_floats(dp), dp);
        partition<E, S>(tile, tiles, i * PARTITION, now, then, here);
        for (int n = 0; n < tiles; n++) {
            if (!apart) combine(tile[n], i * PARTITION, here[n]);
            for (int r = 0; apart && r < tile[n].rows; r++) {
                const int64_t row = n * QROWS + r;
                if (work.shared >= 0)
                    keep_row(kept(run.splits[run.members[work.shared + row / per].split], g, i, 0, dp), row % per, here[n], r, dp);
                else
                    keep_row(kept(run.splits[work.split], g, i, n, dp), r, here[n], r, dp);
            }
        }
    }
    if (!apart)
        for (int n = 0; n < tiles; n++) finish_tile<E>(op, run, tile[n], work, g);
    else if (work.shared < 0)
        finish_piece<E>(op, run, tile, run.splits[work.split], g);
    else
        for (int64_t i = 0; i < work.rows / per; i++) finish_piece<E>(op, run, tile, run.splits[run.members[work.shared + i].split], g);
}

template <class E, class S> static void attention(const Op &op, const Run &run, const Part &part) {
    const int64_t dp = op.n[5], groups = op.n[3];
    float *at = (float *)run.scratch[part.thread], *const scratch = at, *const scales = scratch + QTILES * partial_floats(dp);
    at = scales + 2 * PARTITION;
    QueryTile tile[QTILES];
    for (QueryTile &t : tile) {
        t.dp = dp, t.ks = scales, t.vs = scales + PARTITION;
        t.q = at, at += QROWS * dp;
        t.q16 = (bf16 *)at, t.qi = (int32_t *)at, at += QROWS * dp / 2;  // of the two, one is in use
        t.sum = at, at += QROWS * dp;
        t.scores = at, at += QROWS * PARTITION;
    }
#ifdef OCTAVO_AMX
    if (sizeof(E) == 2 && sizeof(S) == 2) configure(true);
#endif
    const int64_t tasks = run.num_tiles * groups;
    const auto take = [&] { return tasks - 1 - next_task(part.counter); };  // a sequence's last tile sees the most tokens: first
    const auto reach_in = [&](int64_t task) { return task >= 0 ? reach_of<S>(op, run, run.tiles[task / groups], task % groups) : Reach{}; };
    int64_t task = take();
    for (Reach reach = reach_in(task); task >= 0;) {
        const int64_t next = take();
        const Reach then = reach_in(next);
        attend<E, S>(op, run, tile, run.tiles[task / groups], task % groups, reach, next >= 0 ? blocks_of(run, then, then.from) : Blocks{}, scratch);
        task = next, reach = then;
    }
#ifdef OCTAVO_AMX
    if (sizeof(E) == 2 && sizeof(S) == 2) configure(false);
#endif
}
