// Causal attention over the block tables. A task is QROWS packed query rows (tokens × the heads of one KV head) of one
// sequence; softmax goes by fixed partitions of 256 absolute tokens, combined from left to right.
//
// A tile that is much of the step's work is cut into pieces, ranges of whole partitions, for several threads. Their
// results are kept apart, and whoever finishes the last piece combines all of them, from left to right as ever.
//
// Row purity: a row's value depends on its own query, its range of tokens and the cache only. Blocks and partitions
// outside a row's range, which it walks through because of its neighbours in the tile, have probability 0 and add +0,
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
    int rows;
    int64_t dp;
    float *q;       // [QROWS][Dp] float32 values of act precision; spread for integer KV types
    bf16 *q16;      // the same as bf16, for matrix units
    int32_t *qi;    // the same as pairs of 16-bit numbers, for integer KV types
    float *scores;  // [QROWS][PARTITION]; then the probabilities, rounded to act, times V's scales
    bf16 *p16;      // [QROWS][PARTITION] for matrix units
    int32_t *pi;    // [QROWS][PARTITION / 2] pairs, for integer KV types
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
    Partial(float *at, int64_t dp) : out(at), top(at + QROWS * dp), mass(top + QROWS) {}
};
FN bool sees(const QueryTile &tile, int r, int64_t base) { return tile.low[r] < base + PARTITION && tile.high[r] >= base; }

// Whether this tile's products go to matrix units; few rows do not pay for it.
template <class E, class S> FN bool matrix_units(const QueryTile &tile) {
#ifdef OCTAVO_AMX
    return sizeof(E) == 2 && sizeof(S) == 2 && tile.rows >= 5;
#else
    (void)tile;
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
    if (matrix_units<E, S>(tile)) {
        bf16 *out = tile.p16 + r * PARTITION;
        int j = from;
        for (; j + 2 <= to; j += 2) {
            const F p = weight(j);
            store_halves(out + j * TOKENS, p, weight(j + 1));
        }
        if (j < to) store<H>(out + j * TOKENS, __builtin_convertvector(f_to_bits(weight(j)) >> 16, H));
        return sum;
    }
    I most = {};  // bits of the largest magnitude; a NaN's exceed all
    for (int j = from; j < to; j++) {
        const F p = weight(j);
        store<F>(s + j * TOKENS, p);
        const I mag = (I)(f_to_bits(p) & 0x7fffffffu);
        most = mag > most ? mag : most;
    }
    if constexpr (Stored<S>::integer) {
        int32_t largest = 0;
        float inv;
        for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
        tile.factor[r] = to_whole(as_float((uint32_t)largest), &inv);
        for (int j = from; j < to; j++) store_quads(tile.pi + (r * PARTITION + j * TOKENS) / 2, nearest(load<F>(s + j * TOKENS) * inv));
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
            __builtin_memset(tile.p16 + r * PARTITION, 0, PARTITION * 2);
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

// `next`: where the tile will read after this partition, a block for a block; it is fetched ahead.
template <class E, class S> static void score_blocks(const QueryTile &tile, const char *const *k, const char *const *next, int from, int to) {
#ifdef OCTAVO_AMX
    if constexpr (sizeof(E) == 2 && sizeof(S) == 2) if (matrix_units<E, S>(tile)) {
        const int64_t dp = tile.dp;
        for (int j = from; j < to; j += 2) {
            const bool two = j + 1 < to;
            TILE_ZERO(0);
            TILE_ZERO(1);
            for (int64_t c = 0; c < dp; c += KBLOCK) {
                TILE_LOAD(4, tile.q16 + c, dp * 2);
                TILE_LOAD(6, (const bf16 *)k[j] + c * LANES, 64);
                TILE_DOT(0, 4, 6);
                if (!two) continue;
                TILE_LOAD(6, (const bf16 *)k[j + 1] + c * LANES, 64);
                TILE_DOT(1, 4, 6);
            }
            TILE_STORE(0, tile.scores + j * TOKENS, PARTITION * 4);
            if (two) TILE_STORE(1, tile.scores + (j + 1) * TOKENS, PARTITION * 4);
        }
        return;
    }
#endif
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
            for (int j = from; j < to; j++)
                product_rows<E>(n, 1, tile.q + r * tile.dp, tile.dp, (const S *)k[j], 0, tile.dp, ahead ? (ahead[j] - k[j]) / (int64_t)sizeof(S) : 0,
                                tile.scores + r * PARTITION + j * TOKENS, 0, PARTITION);
        }
    }
}

template <class E, class S> static void mix_blocks(const QueryTile &tile, const char *const *k, const char *const *next, int from, int to, float *out) {
    const int64_t dp = tile.dp, panel = kv_half<S>(LANES);
#ifdef OCTAVO_AMX
    if constexpr (sizeof(E) == 2 && sizeof(S) == 2) if (matrix_units<E, S>(tile)) {
        for (int64_t c = 0; c < dp; c += 2 * LANES) {  // Dp is a multiple of 32
            TILE_ZERO(0);
            TILE_ZERO(1);
            for (int j = from; j < to; j++) {
                const char *v = k[j] + kv_half<S>(dp) + c / LANES * panel;
                TILE_LOAD(5, tile.p16 + j * TOKENS, PARTITION * 2);
                TILE_LOAD(7, v, 64);
                TILE_DOT(0, 5, 7);
                TILE_LOAD(7, v + panel, 64);
                TILE_DOT(1, 5, 7);
            }
            TILE_STORE(0, out + c, dp * 4);
            TILE_STORE(1, out + c + LANES, dp * 4);
        }
        return;
    }
#endif
    for (int r = 0; r < tile.rows; r += MAX_ROWS) {
        const int n = tile.rows - r < MAX_ROWS ? tile.rows - r : MAX_ROWS;
        const char *const *ahead = r == 0 ? next : nullptr;
        if constexpr (Stored<S>::integer) {
            with_rows<MAX_ROWS>(n, [&]<int MR>() {
                const int32_t *p = tile.pi + (r * PARTITION + from * TOKENS) / 2;
                const auto mix_panels = [&]<int NP>(int64_t c) {
                    dot_mix<S, MR, NP>(p, PARTITION / 2, k + from, ahead ? ahead + from : ahead, kv_half<S>(dp) + c / LANES * panel, to - from,
                                       tile.factor + r, out + r * dp + c, dp);
                };
                constexpr int panels = OCTAVO_WIDTH == 16 && MR <= 4 ? 4 : 2;
                int64_t c = 0;
                for (; c + panels * LANES <= dp; c += panels * LANES) mix_panels.template operator()<panels>(c);
                for (; c < dp; c += 2 * LANES) mix_panels.template operator()<2>(c);
            });
        } else {
            for (int64_t c = 0; c < dp; c += LANES)
                mix_rows<E, S>(n, tile.scores + r * PARTITION + from * TOKENS, PARTITION, k + from, ahead ? ahead + from : ahead,
                               kv_half<S>(dp) + c / LANES * panel, to - from, out + r * dp + c, dp);
        }
    }
}

// Takes a tile's queries, and the range of tokens of each.
template <class E, class S> static void begin_tile(const Op &op, const Run &run, QueryTile &tile, const Tile &work, int64_t g) {
    const int64_t ld = op.n[1], per = op.n[2] / op.n[3], d = op.n[4], dp = tile.dp, window = op.n[7];
    const int32_t first = run.step.q_start[work.seq];
    const int64_t left = (int64_t)(run.step.q_start[work.seq + 1] - first) * per - work.row;
    tile.rows = left < QROWS ? (int)left : QROWS;
    for (int r = 0; r < tile.rows; r++) {
        const int64_t t = first + (work.row + r) / per, h = g * per + (work.row + r) % per;
        const E *q = (const E *)op.p[0] + t * ld + h * d;
        int64_t c = 0;
        for (; c + LANES <= d; c += LANES) store<F>(tile.q + r * dp + c, load_act(q + c));
        for (; c < dp; c++) tile.q[r * dp + c] = c < d ? get_act(q[c]) : 0;
        tile.scale[r] = op.f[0];
        if constexpr (Stored<S>::integer) {
            float inv;
            spread(tile.q + r * dp, dp);
            tile.scale[r] = op.f[0] * to_whole(largest(tile.q + r * dp, dp), &inv);
            for (c = 0; c < dp; c += LANES) store_quads(tile.qi + (r * dp + c) / 2, nearest(load<F>(tile.q + r * dp + c) * inv));
        } else if (sizeof(E) == 2) {
            for (c = 0; c < dp; c += LANES) store_act(tile.q16 + r * dp + c, load<F>(tile.q + r * dp + c));
        }
        tile.high[r] = run.step.positions[t];
        tile.low[r] = window > 0 && tile.high[r] >= window ? tile.high[r] - (int32_t)window + 1 : 0;
        tile.begun[r] = false;
    }
}

// Scores, probabilities and output of one partition. `table`: the sequence's blocks; `unit`: where the KV head's lies in block 0.
template <class E, class S> static void partition(const Run &run, QueryTile &tile, const int32_t *table, const char *unit, int64_t base, const Partial &here) {
    const int64_t low = tile.low[0], high = tile.high[tile.rows - 1];  // both rise with the row
    const int from = base < low ? (int)((low - base) / TOKENS) : 0;
    const int to = high - base < PARTITION ? (int)((high - base) / TOKENS + 1) : PARTITION / TOKENS;
    const char *k[PARTITION / TOKENS], *next[PARTITION / TOKENS];
    const int64_t last = high / TOKENS;  // what lies behind it is another's, or no block
    const bool more = base + PARTITION <= high;
    for (int j = from; j < to; j++) {
        const int64_t then = base / TOKENS + PARTITION / TOKENS + j;
        if (more) next[j] = unit + (size_t)table[then < last ? then : last] * run.block_bytes;
        k[j] = unit + (size_t)table[base / TOKENS + j] * run.block_bytes;
        if constexpr (Stored<S>::scaled) {
            const bf16 *scales = (const bf16 *)(k[j] + 2 * kv_half<S>(tile.dp));
            store<F>(tile.ks + j * TOKENS, load_act(scales) * Stored<S>::unit);
            store<F>(tile.vs + j * TOKENS, load_act(scales + TOKENS) * Stored<S>::unit);
        }
    }
    const char *const *ahead = more ? next : nullptr;
    score_blocks<E, S>(tile, k, ahead, from, to);
    softmax<E, S>(tile, base, from, to, here.top, here.mass);
    mix_blocks<E, S>(tile, k, ahead, from, to, here.out);
}

// The quotients, rounded to act.
template <class E> static void finish_tile(const Op &op, const Run &run, QueryTile &tile, const Tile &work, int64_t g) {
    const int64_t ld = op.n[1], per = op.n[2] / op.n[3], d = op.n[4], dp = tile.dp;
    const int32_t first = run.step.q_start[work.seq];
    for (int r = 0; r < tile.rows; r++) {
        const int64_t t = first + (work.row + r) / per, h = g * per + (work.row + r) % per;
        E *out = (E *)op.p[1] + t * ld + h * d;
        for (int64_t c = 0; c < dp; c += LANES) store<F>(tile.sum + r * dp + c, load<F>(tile.sum + r * dp + c) / tile.mass[r]);
        store_row(out, tile.sum + r * dp, d);
        if (h == op.n[2] - 1)
            for (int64_t c = op.n[2] * d; c < ld; c++) ((E *)op.p[1])[t * ld + c] = 0;
    }
}

template <class E, class S> static void attend(const Op &op, const Run &run, QueryTile &tile, const Tile &work, int64_t g, float *scratch) {
    begin_tile<E, S>(op, run, tile, work, g);
    const int32_t *table = run.slots.block_table + (int64_t)run.step.seq_slot[work.seq] * run.table_stride;
    const char *unit = run.kv + op.n[6] + g * kv_unit<S>(tile.dp);
    const int64_t first = tile.low[0] / PARTITION, count = tile.high[tile.rows - 1] / PARTITION - first + 1;
    if (work.pieces == 1) {
        const Partial here(scratch, tile.dp);
        for (int64_t i = first; i < first + count; i++) {
            partition<E, S>(run, tile, table, unit, i * PARTITION, here);
            combine(tile, i * PARTITION, here);
        }
        return finish_tile<E>(op, run, tile, work, g);
    }
    const Split &split = run.splits[work.split];
    const auto kept = [&](int64_t i) { return Partial(split.at + (g * split.partitions + i) * partial_floats(tile.dp), tile.dp); };
    for (int64_t i = count * work.piece / work.pieces; i < count * (work.piece + 1) / work.pieces; i++)
        partition<E, S>(run, tile, table, unit, (first + i) * PARTITION, kept(i));
    if (__atomic_add_fetch(split.done + g, 1, __ATOMIC_ACQ_REL) < work.pieces) return;
    __atomic_store_n(split.done + g, 0, __ATOMIC_RELAXED);  // for the next layer, which is a barrier away
    for (int64_t i = 0; i < count; i++) combine(tile, (first + i) * PARTITION, kept(i));
    finish_tile<E>(op, run, tile, work, g);
}

template <class E, class S> static void attention(const Op &op, const Run &run, const Part &part) {
    const int64_t dp = op.n[5], groups = op.n[3];
    QueryTile tile;
    tile.dp = dp;
    float *at = (float *)run.scratch[part.thread], *const scratch = at;
    at += partial_floats(dp);
    tile.q = at, at += QROWS * dp;
    tile.sum = at, at += QROWS * dp;
    tile.scores = at, at += QROWS * PARTITION;
    tile.ks = at, at += PARTITION;
    tile.vs = at, at += PARTITION;
    tile.q16 = (bf16 *)at, tile.qi = (int32_t *)at;  // of the two, one is in use, and they are of one size
    tile.p16 = tile.q16 + QROWS * dp, tile.pi = tile.qi + QROWS * dp / 2;
#ifdef OCTAVO_AMX
    if (sizeof(E) == 2 && sizeof(S) == 2) configure(true);
#endif
    const int64_t tasks = run.num_tiles * groups;
    for (int64_t task; (task = next_task(part.counter)) < tasks;) {
        task = tasks - 1 - task;  // a sequence's last tile sees the most tokens: first
        attend<E, S>(op, run, tile, run.tiles[task / groups], task % groups, scratch);
    }
#ifdef OCTAVO_AMX
    if (sizeof(E) == 2 && sizeof(S) == 2) configure(false);
#endif
}
