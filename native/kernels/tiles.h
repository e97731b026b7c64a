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
template <class Row, class Code> static void tile_dot_bytes(int c, int a, int b) {
    for (int m = 0; m < tiles.shape.rows[c]; m++)
        for (int n = 0; n < tiles.shape.bytes[c] / 4; n++)
            for (int k = 0; k < tiles.shape.bytes[a]; k++)
                ((uint32_t *)tiles.data[c][m])[n] += (uint32_t)((Row)tiles.data[a][m][k] * (Code)tiles.data[b][k / 4][n * 4 + k % 4]);
}
#define TILE_ZERO(t) __builtin_memset(tiles.data[t], 0, sizeof tiles.data[t])
#define TILE_LOAD(t, p, bytes) tile_load(t, p, bytes)
#define TILE_LOAD_ONCE(t, p, bytes) tile_load(t, p, bytes)
#define TILE_STORE(t, p, bytes) tile_store(t, p, bytes)
#define TILE_DOT(c, a, b) tile_dot(c, a, b)
#define TILE_DOT_BYTES(c, a, b) tile_dot_bytes<int8_t, int8_t>(c, a, b)   // rows signed, panels signed
#define TILE_DOT_CODES(c, a, b) tile_dot_bytes<int8_t, uint8_t>(c, a, b)  // rows signed, panels not
#define TILE_DOT_LOWER(c, a, b) tile_dot_bytes<uint8_t, int8_t>(c, a, b)  // panels signed, rows not
#else
FN void tile_config(const TileConfig *c) { asm volatile("ldtilecfg %0" ::"m"(*c) : "memory"); }
FN void tile_release() { asm volatile("tilerelease" ::: "memory"); }
#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::: "memory")
#define TILE_LOAD(t, p, bytes) asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"((const void *)(p)), "r"((int64_t)(bytes)) : "memory")
#define TILE_LOAD_ONCE(t, p, bytes) asm volatile("tileloaddt1 (%0,%1,1), %%tmm" #t ::"r"((const void *)(p)), "r"((int64_t)(bytes)) : "memory")
#define TILE_STORE(t, p, bytes) asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"((void *)(p)), "r"((int64_t)(bytes)) : "memory")
#define TILE_DOT(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")
#define TILE_DOT_BYTES(c, a, b) asm volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")
#define TILE_DOT_CODES(c, a, b) asm volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")
#define TILE_DOT_LOWER(c, a, b) asm volatile("tdpbusd %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")
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

// Rows and panels as matrix units take them: in groups of k that fill a row of a tile, 32 of bfloat16 or 64 bytes (rows signed, panels not).
constexpr int64_t TILE_BYTES = 16 * 64;
struct TileOperands {
    const char *rows;    // the first of them
    int64_t ld;          // bytes from row to row
    const char *panels;  // codes of the first panel
    int64_t stride;      // bytes from panel to panel
    int64_t groups;
};

// sums[panel][32][16] of 32 rows, or of 16 (HIGH false), times two panels, from row `row` and panel `panel` on (the second one is the first
// again where there is but one). `meanwhile` is called once for every group of k, `nearer` once for every 16 rows of it: vector units and
// memory have little to do while matrix units work. Rows are loaded with the hint that they pass by: the panels should stay in the first cache.
template <bool BYTES, bool HIGH, class Nearer, class Meanwhile>
FN void tile_block(const TileOperands &o, int64_t row, int64_t panel, int panels, void *sums, Nearer nearer, Meanwhile meanwhile) {
    const char *a = o.rows + row * o.ld, *w0 = o.panels + panel * o.stride, *w1 = w0 + (panels - 1) * o.stride;
    const int64_t ld = o.ld, high = 16 * ld;
    TILE_ZERO(0);
    TILE_ZERO(1);
    if (HIGH) TILE_ZERO(2);
    if (HIGH) TILE_ZERO(3);
    for (int64_t g = 0; g < o.groups; g++, a += 64) {
        TILE_LOAD_ONCE(4, a, ld);
        TILE_LOAD(6, w0 + g * TILE_BYTES, 64);
        if (BYTES) TILE_DOT_CODES(0, 4, 6);
        else TILE_DOT(0, 4, 6);
        nearer();
        TILE_LOAD(7, w1 + g * TILE_BYTES, 64);
        if (BYTES) TILE_DOT_CODES(1, 4, 7);
        else TILE_DOT(1, 4, 7);
        if (HIGH) {
            TILE_LOAD_ONCE(5, a + high, ld);
            if (BYTES) TILE_DOT_CODES(2, 5, 6);
            else TILE_DOT(2, 5, 6);
            nearer();
            if (BYTES) TILE_DOT_CODES(3, 5, 7);
            else TILE_DOT(3, 5, 7);
        }
        meanwhile();
    }
    char *out = (char *)sums;
    TILE_STORE(0, out, 64);
    TILE_STORE(1, out + 2 * TILE_BYTES, 64);
    if (HIGH) TILE_STORE(2, out + TILE_BYTES, 64);
    if (HIGH) TILE_STORE(3, out + 3 * TILE_BYTES, 64);
}
