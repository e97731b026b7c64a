// Products of one or two tiles of attention on matrix units, with a bfloat16 cache or an int8 one: what is loaded from K and V meets the
// rows of both. `next` (or null): the blocks that are read after this partition, fetched meanwhile.
#pragma once

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
        TILE_STORE(0, tile[0].scores + j * TOKENS, SCORES * 4);
        if (TILES == 2) TILE_STORE(2, tile[1].scores + j * TOKENS, SCORES * 4);
        if (!two) continue;
        TILE_STORE(1, tile[0].scores + (j + 1) * TOKENS, SCORES * 4);
        if (TILES == 2) TILE_STORE(3, tile[1].scores + (j + 1) * TOKENS, SCORES * 4);
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
            TILE_LOAD(5, p[0] + j * TOKENS, SCORES * 4);
            TILE_LOAD(7, v, 64);
            TILE_DOT(0, 5, 7);
            if (TILES == 2) {
                TILE_LOAD(5, p[1] + j * TOKENS, SCORES * 4);
                TILE_DOT(2, 5, 7);
            }
            TILE_LOAD(7, v + panel, 64);
            if (TILES == 2) {
                TILE_DOT(3, 5, 7);
                TILE_LOAD(5, p[0] + j * TOKENS, SCORES * 4);
            }
            TILE_DOT(1, 5, 7);
        }
        TILE_STORE(0, here[0].out + c, dp * 4);
        TILE_STORE(1, here[0].out + c + LANES, dp * 4);
        if (TILES == 2) TILE_STORE(2, here[1].out + c, dp * 4);
        if (TILES == 2) TILE_STORE(3, here[1].out + c + LANES, dp * 4);
    }
}

// Products with an int8 cache: 16-bit numbers are 256 · their upper byte + their lower one, so two products of bytes give the exact sum.
FN F whole_sum(const int32_t *upper, const int32_t *lower) { return lanes_to<float>((I)((load<U>(upper) << 8) + load<U>(lower))); }

template <int TILES> static void score_bytes(const QueryTile *tile, const char *const *k, const char *const *next, int from, int to) {
    const int64_t dp = tile->dp, ld = pad64(dp);
    int32_t sums[2][QTILES][2][QROWS * LANES] __attribute__((aligned(64)));  // of two blocks in turn
    const auto take = [&](int j) __attribute__((always_inline)) {
        for (int i = 0; i < TILES; i++)
            for (int r = 0; r < QROWS; r++)
                store<F>(tile[i].scores + r * SCORES + j * TOKENS, whole_sum(sums[j % 2][i][0] + r * LANES, sums[j % 2][i][1] + r * LANES));
    };
    for (int j = from; j < to; j++) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        if (TILES == 2) TILE_ZERO(2);
        if (TILES == 2) TILE_ZERO(3);
        for (int64_t c = 0; c < dp; c += 64) {  // behind Dp, queries are 0, and what is read of the unit does not matter
            TILE_LOAD(6, k[j] + c * TOKENS, 64);
            if (next)
                for (int i = 0; i < 16; i++) __builtin_prefetch(next[j] + c * TOKENS + i * 64, 0, 2);
            TILE_LOAD(4, tile[0].q8 + c, ld);
            TILE_DOT_BYTES(0, 4, 6);
            TILE_LOAD(5, tile[0].q8 + QROWS * ld + c, ld);
            TILE_DOT_LOWER(1, 5, 6);
            if (TILES == 1) continue;
            TILE_LOAD(4, tile[1].q8 + c, ld);
            TILE_DOT_BYTES(2, 4, 6);
            TILE_LOAD(5, tile[1].q8 + QROWS * ld + c, ld);
            TILE_DOT_LOWER(3, 5, 6);
        }
        TILE_STORE(0, sums[j % 2][0][0], 64);
        TILE_STORE(1, sums[j % 2][0][1], 64);
        if (TILES == 2) TILE_STORE(2, sums[j % 2][1][0], 64);
        if (TILES == 2) TILE_STORE(3, sums[j % 2][1][1], 64);
        if (j > from) take(j - 1);
    }
    take(to - 1);
}

// V of 64 tokens fills a tile, but lies in four blocks: they are copied together first, panel by panel.
template <int TILES> static void mix_bytes(const QueryTile *tile, const char *const *k, const char *const *next, int from, int to, const Partial *here) {
    const int64_t dp = tile->dp, half = kv_half<Int8>(dp), panel = kv_half<Int8>(LANES);
    char *const v = tile->v;
    for (int j = from; j < to; j++)
        for (int64_t p = 0; p < dp / LANES; p++)
            for (int64_t at = 0; at < panel; at += 64) {
                const int64_t of = half + p * panel + at;
                if (next) __builtin_prefetch(next[j] + of, 0, 2);
                store<U>(v + p * BYTE_PANEL + j * panel + at, load<U>(k[j] + of));
            }
    int32_t sums[2][QTILES][2][QROWS * LANES] __attribute__((aligned(64)));  // of two panels in turn
    const auto take = [&](int64_t p) __attribute__((always_inline)) {
        for (int i = 0; i < TILES; i++)
            for (int r = 0; r < QROWS; r++)
                store<F>(here[i].out + r * dp + p * LANES, whole_sum(sums[p % 2][i][0] + r * LANES, sums[p % 2][i][1] + r * LANES) * tile[i].factor[r]);
    };
    for (int64_t p = 0; p < dp / LANES; p++) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        if (TILES == 2) TILE_ZERO(2);
        if (TILES == 2) TILE_ZERO(3);
        for (int j = from / BYTE_BLOCKS * BYTE_BLOCKS; j < to; j += BYTE_BLOCKS) {
            TILE_LOAD(6, v + p * BYTE_PANEL + j * panel, 64);
            for (int i = 0; i < TILES; i++) {
                const char *bytes = (const char *)tile[i].scores + j * 2 * TOKENS;
                TILE_LOAD(4, bytes, SCORES * 4);
                TILE_LOAD(5, bytes + 64, SCORES * 4);
                if (i == 0) {
                    TILE_DOT_BYTES(0, 4, 6);
                    TILE_DOT_LOWER(1, 5, 6);
                } else {
                    TILE_DOT_BYTES(2, 4, 6);
                    TILE_DOT_LOWER(3, 5, 6);
                }
            }
        }
        TILE_STORE(0, sums[p % 2][0][0], 64);
        TILE_STORE(1, sums[p % 2][0][1], 64);
        if (TILES == 2) TILE_STORE(2, sums[p % 2][1][0], 64);
        if (TILES == 2) TILE_STORE(3, sums[p % 2][1][1], 64);
        if (p > 0) take(p - 1);
    }
    take(dp / LANES - 1);
}
