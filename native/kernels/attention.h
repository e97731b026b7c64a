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
//
// query_tile.h: what becomes of a tile's rows. tiles_attention.h: products on matrix units.
#pragma once

// Products of one tile without matrix units. `next` (or null), here and below: the blocks that are read after this partition, fetched meanwhile.
template <class E, class S> static void score_tile(const QueryTile &tile, const char *const *k, const char *const *next, int from, int to) {
    constexpr int most = Stored<S>::integer ? DOT_ROWS : MAX_ROWS;
    for (int r = 0; r < tile.rows; r += most) {
        const int n = tile.rows - r < most ? tile.rows - r : most;
        const char *const *ahead = r == 0 ? next : nullptr;
        float *out = tile.scores + r * SCORES;
        with_rows<most>(n, [&]<int MR>() {
            if constexpr (Stored<S>::integer) {
                constexpr int blocks = OCTAVO_WIDTH < 16 ? 1 : MR <= 4 ? 4 : 2;
                const int32_t *q = tile.qi + r * tile.dp / 2;
                int j = from;
                for (; j + blocks <= to; j += blocks) dot_scores<S, MR, blocks>(q, tile.dp / 2, k + j, ahead ? ahead + j : ahead, tile.dp, out + j * TOKENS, SCORES);
                for (; j < to; j++) dot_scores<S, MR, 1>(q, tile.dp / 2, k + j, ahead ? ahead + j : ahead, tile.dp, out + j * TOKENS, SCORES);
            } else {
                scores<E, S, MR>(queries<E, S>(tile) + r * tile.dp, tile.dp, k + from, ahead ? ahead + from : ahead, to - from, tile.dp, out + from * TOKENS, SCORES);
            }
        });
    }
}

template <class E, class S> static void mix_tile(const QueryTile &tile, const char *const *k, const char *const *next, int from, int to, float *out) {
    constexpr int most = Stored<S>::integer ? DOT_ROWS : MAX_ROWS;
    const int64_t dp = tile.dp, panel = kv_half<S>(LANES);
    for (int r = 0; r < tile.rows; r += most) {
        const int n = tile.rows - r < most ? tile.rows - r : most;
        const char *const *ahead = r == 0 ? next : nullptr;
        with_rows<most>(n, [&]<int MR>() {
            const auto mix_panels = [&]<int NP>(int64_t c) {
                const char *const *v = k + from, *const *then = ahead ? ahead + from : ahead;
                const int64_t offset = kv_half<S>(dp) + c / LANES * panel;
                if constexpr (Stored<S>::integer) {
                    const int32_t *p = (const int32_t *)tile.scores + r * SCORES + from * TOKENS / 2;
                    dot_mix<S, MR, NP>(p, SCORES, v, then, offset, to - from, tile.factor + r, out + r * dp + c, dp);
                } else {
                    const auto *p = (const Operand<E, S> *)(tile.scores + r * SCORES) + from * TOKENS;
                    mix<E, S, MR, NP>(p, SCORES * 4 / sizeof *p, v, then, offset, panel, to - from, out + r * dp + c, dp);
                }
            };
            constexpr int least = Stored<S>::integer ? 2 : 1;  // Dp is a multiple of 32
            constexpr int panels = !Stored<S>::integer ? (OCTAVO_WIDTH < 16 && MR == 1 ? 2 : 1) : OCTAVO_WIDTH == 16 && MR <= 4 ? 4 : 2;
            int64_t c = 0;
            for (; c + panels * LANES <= dp; c += panels * LANES) mix_panels.template operator()<panels>(c);
            for (; c < dp; c += least * LANES) mix_panels.template operator()<least>(c);
        });
    }
}

// Products of both tiles of a task, wide (product.h): each two blocks of K, and each four of V, are widened once for all rows. A last single block
// of K goes the other way, and so does V where widening is little work: its sums are in memory, and groups of 16 tokens add to them often.
template <class E, class S> static void score_wide(const QueryTile *tile, const char *const *k, const char *const *next, int from, int to) {
    float w[WIDE_FLOATS] __attribute__((aligned(64)));
    const int64_t dp = tile->dp;
    Fetch none;
    int j = from;
    for (; j + 2 <= to; j += 2) {
        for (int b = j; next && b < j + 2; b++)
            for (int64_t at = 0; at < kv_half<S>(dp); at += 64) __builtin_prefetch(next[b] + at, 0, 2);
        for (int64_t i = 0; i < dp; i += WIDE_K) {
            const int64_t size = dp - i < WIDE_K ? dp - i : WIDE_K;
            widen((const S *)k[j] + i * LANES, (const S *)k[j + 1] + i * LANES, size, w);
            for (int n = 0; n < QTILES; n++)
                wide_rows<E, KBLOCK>(tile[n].rows, tile[n].q + i, dp, w, size, i == 0, none, tile[n].scores + j * TOKENS, TOKENS, SCORES);
        }
    }
    for (int n = 0; n < QTILES && j < to; n++) score_tile<E, S>(tile[n], k, n == 0 ? next : nullptr, j, to);
}
template <class E, class S> static void mix_wide(const QueryTile *tile, const char *const *k, const char *const *next, int from, int to, const Partial *here) {
    constexpr int BLOCKS = 4;
    float w[BLOCKS * TOKENS * 2 * LANES] __attribute__((aligned(64)));
    const int64_t dp = tile->dp, panel = kv_half<S>(LANES);
    Fetch none;
    for (int64_t c = 0; c < dp; c += 2 * LANES)
        for (int j = from; j < to; j += BLOCKS) {
            const int n = to - j < BLOCKS ? to - j : BLOCKS;
            for (int b = 0; b < n; b++) {
                const int64_t at = kv_half<S>(dp) + c / LANES * panel;
                for (int64_t line = 0; next && line < 2 * panel; line += 64) __builtin_prefetch(next[j + b] + at + line, 0, 2);
                widen((const S *)(k[j + b] + at), (const S *)(k[j + b] + at + panel), TOKENS, w + b * TOKENS * 2 * LANES);
            }
            for (int i = 0; i < QTILES; i++)
                wide_rows<E, TOKENS>(tile[i].rows, tile[i].scores + j * TOKENS, SCORES, w, n * TOKENS, j == from, none, here[i].out + c, LANES, dp);
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
        if (sizeof(S) == 2 && tile.matrix) {
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
            const auto whole = [&](int64_t i) { return nearest_of_numbers(load<F>(x + i) * inv); };
            if (__is_same(S, Int8) && tile.matrix) {
                int8_t *upper = tile.q8 + r * pad64(dp), *lower = upper + QROWS * pad64(dp);
                for (c = 0; c < pad64(dp); c += LANES) {
                    const I n = c < dp ? whole(c) : I{};
                    store_codes(upper + c, n >> 8);
                    store_codes(lower + c, n);
                }
                return;
            }
            for (c = 0; c < dp; c += 2 * LANES) store_quads(tile.qi + (r * dp + c) / 2, whole(c), whole(c + LANES));
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

// Of all tiles of a task, each product the way that is fastest here.
template <class E, class S> static void score_tiles(const QueryTile *tile, int tiles, const char *const *k, const char *const *next, int from, int to) {
#ifdef OCTAVO_AMX
    if constexpr (sizeof(E) == 2 && sizeof(S) == 2)
        if (tile->matrix) return tiles == 1 ? score_matrix<1>(tile, k, next, from, to) : score_matrix<2>(tile, k, next, from, to);
    if constexpr (__is_same(S, Int8))
        if (tile->matrix) return tiles == 1 ? score_bytes<1>(tile, k, next, from, to) : score_bytes<2>(tile, k, next, from, to);
#endif
    if constexpr (WIDE && !Stored<S>::integer)
        if (tiles == QTILES) return score_wide<E, S>(tile, k, next, from, to);
    for (int i = 0; i < tiles; i++) score_tile<E, S>(tile[i], k, i == 0 ? next : nullptr, from, to);
}
template <class E, class S> static void mix_tiles(const QueryTile *tile, int tiles, const char *const *k, const char *const *next, int from, int to, const Partial *here) {
#ifdef OCTAVO_AMX
    if constexpr (sizeof(E) == 2 && sizeof(S) == 2)
        if (tile->matrix) return tiles == 1 ? mix_matrix<1>(tile, k, next, from, to, here) : mix_matrix<2>(tile, k, next, from, to, here);
    if constexpr (__is_same(S, Int8))
        if (tile->matrix) return tiles == 1 ? mix_bytes<1>(tile, k, next, from, to, here) : mix_bytes<2>(tile, k, next, from, to, here);
#endif
    if constexpr (WIDE && __is_same(S, Fp8))
        if (tiles == QTILES) return mix_wide<E, S>(tile, k, next, from, to, here);
    for (int i = 0; i < tiles; i++) mix_tile<E, S>(tile[i], k, i == 0 ? next : nullptr, from, to, here[i].out);
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
    score_tiles<E, S>(tile, tiles, k, ahead, from, to);
    for (int i = 0; i < tiles; i++) softmax<E, S>(tile[i], base, from, to, here[i].top, here[i].mass);
    mix_tiles<E, S>(tile, tiles, k, ahead, from, to, here);
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
    char *const v = (char *)at;
    at += dp / LANES * BYTE_PANEL / 4;
    for (QueryTile &t : tile) {
        t.dp = dp, t.ks = scales, t.vs = scales + PARTITION, t.v = v;
        t.q = at, at += QROWS * dp;
        t.q16 = (bf16 *)at, t.qi = (int32_t *)at, t.q8 = (int8_t *)at, at += QROWS * pad64(dp) / 2;  // of these, one is in use
        t.sum = at, at += QROWS * dp;
        t.scores = at, at += QROWS * SCORES;
    }
#ifdef OCTAVO_AMX
    if (sizeof(E) == 2 && sizeof(S) == 2) configure(true);
#endif
    const int64_t tasks = run.num_tiles * groups;
    const auto take = [&] { return tasks - 1 - next_task(part.counter); };  // a sequence's last tile sees the most tokens: first
    const auto reach_in = [&](int64_t task) { return task >= 0 ? reach_of<S>(op, run, run.tiles[task / groups], task % groups) : Reach{}; };
    // The next task is taken before this one is done, so that what it reads can be fetched; not the last ones, which are for whoever is free.
    const auto many = [&] { return tasks - __atomic_load_n(part.counter, __ATOMIC_RELAXED) > run.threads; };
    int64_t task = take();
    for (Reach reach = reach_in(task); task >= 0;) {
        const bool early = many();
        int64_t next = early ? take() : -1;
        Reach then = reach_in(next);
        attend<E, S>(op, run, tile, run.tiles[task / groups], task % groups, reach, next >= 0 ? blocks_of(run, then, then.from) : Blocks{}, scratch);
        if (!early) next = take(), then = reach_in(next);
        task = next, reach = then;
    }
#ifdef OCTAVO_AMX
    if (sizeof(E) == 2 && sizeof(S) == 2) configure(false);
#endif
}
