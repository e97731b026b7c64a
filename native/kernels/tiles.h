// AMX matrix units, as assembly with a full memory clobber: gcc 12's intrinsics lack it, and then the compiler may move
// the writing of operands past their use. One TDPBF16PS is one group of the product contract (kernels/product.h).
#pragma once

constexpr int TILE_ROWS_NONE = 2;    // up to so many rows, the chains of product.h run at memory speed
constexpr int TILE_ROWS_FEW = 64;
constexpr int64_t TILE_CHUNK = 512;  // rows that pass by a pair of panels; their inputs have to stay in the second cache

struct __attribute__((aligned(64))) TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];  // of a row
    uint8_t rows[16];
};
#ifdef OCTAVO_TILES_EMULATED  // for tests on machines without matrix units: what the instructions compute, in plain code
static thread_local struct {
    TileConfig shape;
    uint8_t data[8][16][64];
} tiles;
static void tile_config(const TileConfig *c) { __builtin_memset(&tiles, 0, sizeof tiles), tiles.shape = *c; }
static void tile_release() {}
static void tile_load(int t, const void *p, int64_t bytes) {
    __builtin_memset(tiles.data[t], 0, sizeof tiles.data[t]);
    for (int r = 0; r < tiles.shape.rows[t]; r++) __builtin_memcpy(tiles.data[t][r], (const char *)p + r * bytes, tiles.shape.bytes[t]);
}
static void tile_store(int t, void *p, int64_t bytes) {
    for (int r = 0; r < tiles.shape.rows[t]; r++) __builtin_memcpy((char *)p + r * bytes, tiles.data[t][r], tiles.shape.bytes[t]);
}
static void tile_dot(int c, int a, int b) {
    for (int m = 0; m < tiles.shape.rows[c]; m++)
        for (int n = 0; n < tiles.shape.bytes[c] / 4; n++) {
            float *out = (float *)tiles.data[c][m] + n, even = 0, odd = 0;
            for (int k = 0; k < tiles.shape.bytes[a] / 4; k++) {
                const bf16 *x = (const bf16 *)tiles.data[a][m] + 2 * k, *y = (const bf16 *)tiles.data[b][k] + 2 * n;
                even = even + get_act(x[0]) * get_act(y[0]);
                odd = odd + get_act(x[1]) * get_act(y[1]);
            }
            *out = *out + (even + odd);
        }
}
static void tile_dot_bytes(int c, int a, int b) {
    for (int m = 0; m < tiles.shape.rows[c]; m++)
        for (int n = 0; n < tiles.shape.bytes[c] / 4; n++)
            for (int k = 0; k < tiles.shape.bytes[a]; k++)
                ((int32_t *)tiles.data[c][m])[n] += (int8_t)tiles.data[a][m][k] * (int8_t)tiles.data[b][k / 4][n * 4 + k % 4];
}
#define TILE_ZERO(t) __builtin_memset(tiles.data[t], 0, sizeof tiles.data[t])
#define TILE_LOAD(t, p, bytes) tile_load(t, p, bytes)
#define TILE_LOAD_ONCE(t, p, bytes) tile_load(t, p, bytes)
#define TILE_STORE(t, p, bytes) tile_store(t, p, bytes)
#define TILE_DOT(c, a, b) tile_dot(c, a, b)
#define TILE_DOT_BYTES(c, a, b) tile_dot_bytes(c, a, b)
#else
FN void tile_config(const TileConfig *c) { asm volatile("ldtilecfg %0" ::"m"(*c) : "memory"); }
FN void tile_release() { asm volatile("tilerelease" ::: "memory"); }
#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::: "memory")
#define TILE_LOAD(t, p, bytes) asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"((const void *)(p)), "r"((int64_t)(bytes)) : "memory")
#define TILE_LOAD_ONCE(t, p, bytes) asm volatile("tileloaddt1 (%0,%1,1), %%tmm" #t ::"r"((const void *)(p)), "r"((int64_t)(bytes)) : "memory")
#define TILE_STORE(t, p, bytes) asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"((void *)(p)), "r"((int64_t)(bytes)) : "memory")
#define TILE_DOT(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")
#define TILE_DOT_BYTES(c, a, b) asm volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")
#endif

// For linear: 0-3 accumulators, 4-5 rows of a, 6-7 panels, all of 16 rows × 64 bytes.
// For attention: 0-3 accumulators, 4 rows of a (32 products), 5 rows of a (16 products), 6 panel of 32, 7 panel of 16.
static void configure(bool attention) {
    TileConfig c = {};
    c.palette = 1;
    for (int t = 0; t < 8; t++) c.bytes[t] = 64, c.rows[t] = 16;
    if (attention) c.bytes[5] = 32, c.rows[7] = 8;
    tile_config(&c);
}

// `ahead`: elements to what these streams need next, fetched into the second cache meanwhile; 0: none.
FN void fetch_tile(const bf16 *p, int64_t ahead) {
    if (ahead)
        for (int i = 0; i < 16; i++) __builtin_prefetch(p + ahead + i * 32, 0, 2);
}

// Rows are loaded with the hint that they pass by: the panels should stay in the first cache.
// `meanwhile` is called once for every group of k: vector units have little to do while matrix units work.
template <class Meanwhile> FN void tiles_2x2(const bf16 *a, int64_t kp, const bf16 *w, int64_t stride, int64_t ahead, float *acc, Meanwhile meanwhile) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    const bf16 *low = a + 16 * kp, *w1 = w + stride;
    for (int64_t k = 0; k < kp; k += KBLOCK) {
        TILE_LOAD_ONCE(4, a + k, kp * 2);
        TILE_LOAD(6, w + k * LANES, 64);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(7, w1 + k * LANES, 64);
        TILE_DOT(1, 4, 7);
        TILE_LOAD_ONCE(5, low + k, kp * 2);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
        fetch_tile(w + k * LANES, ahead);
        fetch_tile(w1 + k * LANES, ahead);
        meanwhile();
    }
    TILE_STORE(0, acc, 64);
    TILE_STORE(2, acc + 16 * LANES, 64);
    TILE_STORE(1, acc + 32 * LANES, 64);
    TILE_STORE(3, acc + 48 * LANES, 64);
}

static void tiles_1x2(const bf16 *a, int64_t kp, const bf16 *w, int64_t stride, int64_t ahead, float *acc) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    const bf16 *w1 = w + stride;
    for (int64_t k = 0; k < kp; k += KBLOCK) {
        TILE_LOAD(4, a + k, kp * 2);
        TILE_LOAD(6, w + k * LANES, 64);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(7, w1 + k * LANES, 64);
        TILE_DOT(1, 4, 7);
        fetch_tile(w + k * LANES, ahead);
        fetch_tile(w1 + k * LANES, ahead);
    }
    TILE_STORE(0, acc, 64);
    TILE_STORE(1, acc + 32 * LANES, 64);
}

// Four panels in flight: for few rows, when memory speed decides.
static void tiles_1x4(const bf16 *a, int64_t kp, const bf16 *w, int64_t stride, int64_t ahead, float *acc) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t k = 0; k < kp; k += KBLOCK) {
        const bf16 *b = w + k * LANES;
        TILE_LOAD(4, a + k, kp * 2);
        TILE_LOAD(5, b, 64);
        TILE_DOT(0, 4, 5);
        TILE_LOAD(6, b + stride, 64);
        TILE_DOT(1, 4, 6);
        TILE_LOAD(7, b + 2 * stride, 64);
        TILE_DOT(2, 4, 7);
        TILE_LOAD(5, b + 3 * stride, 64);
        TILE_DOT(3, 4, 5);
        for (int p = 0; p < 4; p++) fetch_tile(b + p * stride, ahead);
    }
    TILE_STORE(0, acc, 64);
    TILE_STORE(1, acc + 16 * LANES, 64);
    TILE_STORE(2, acc + 32 * LANES, 64);
    TILE_STORE(3, acc + 48 * LANES, 64);
}
