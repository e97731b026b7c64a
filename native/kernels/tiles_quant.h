// Quantized products in matrix units: 32 rows × 2 panels, one step at a time. TDPBSUD multiplies s8 rows with u8 panels, exactly; what
// is done between steps is the contract of quant.h. Tiles are shaped as for attention (tiles.h): 64 k in tiles 4 and 6, 32 in 5 and 7.
#pragma once

constexpr int WIDE_ROWS = 32, WIDE_PANELS = 2;

// Blocks of n (1 or 2) times 32 k as bytes: the panel itself, or expanded to `bytes`.
template <int BITS> FN const uint8_t *tile_codes(const uint8_t *block, int n, uint8_t *bytes) {
    if constexpr (BITS == 8) return block;
    for (int b = 0; b < n; b++)
#pragma GCC unroll 8
        for (int q = 0; q < 8; q++)
            for (int v = 0; v < NV; v++) store<NU>(bytes + (b * 8 + q) * 64 + v * OCTAVO_WIDTH * 4, quad_of<BITS>(block + b * 64 * BITS, q, v));
    return bytes;
}

// Accumulator tiles 0 (low rows, first panel), 1 (low, second), 2 (high, first), 3 (high, second) += the step's products.
template <int ID> FN void tile_step(const ActRows &a, bool high, const uint8_t *const codes[2], int64_t k, int64_t end, uint8_t *bytes) {
    constexpr LayoutInfo L = LAYOUTS[ID];
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    while (k < end) {
        const int64_t at = k / 32 * code_bytes(L);
        if (end - k >= 64) {
            TILE_LOAD(6, tile_codes<L.bits>(codes[0] + at, 2, bytes), 64);
            TILE_LOAD(4, a.row + k, a.ld);
            TILE_DOT_BYTES(0, 4, 6);
            if (high) {
                TILE_LOAD(4, a.row + 16 * a.ld + k, a.ld);
                TILE_DOT_BYTES(2, 4, 6);
            }
            TILE_LOAD(6, tile_codes<L.bits>(codes[1] + at, 2, bytes), 64);
            if (high) {
                TILE_DOT_BYTES(3, 4, 6);
                TILE_LOAD(4, a.row + k, a.ld);
            }
            TILE_DOT_BYTES(1, 4, 6);
            k += 64;
        } else {
            TILE_LOAD(7, tile_codes<L.bits>(codes[0] + at, 1, bytes), 64);
            TILE_LOAD(5, a.row + k, a.ld);
            TILE_DOT_BYTES(0, 5, 7);
            if (high) {
                TILE_LOAD(5, a.row + 16 * a.ld + k, a.ld);
                TILE_DOT_BYTES(2, 5, 7);
            }
            TILE_LOAD(7, tile_codes<L.bits>(codes[1] + at, 1, bytes), 64);
            if (high) {
                TILE_DOT_BYTES(3, 5, 7);
                TILE_LOAD(5, a.row + k, a.ld);
            }
            TILE_DOT_BYTES(1, 5, 7);
            k += 32;
        }
    }
}

// As quant_rows, for up to WIDE_ROWS rows and WIDE_PANELS panels; rows behind the last are read, and thrown away.
template <int ID>
static void quant_wide(int rows, int np, const ActRows &a, const uint8_t *w, int64_t stride, int64_t kp, int64_t ahead, float *out, int64_t out_stride) {
    constexpr LayoutInfo L = LAYOUTS[ID];
    if constexpr (L.step < 32) {  // no tile is that flat: chains of vectors
        for (int r = 0; r < rows; r += QUANT_ROWS) {
            ActRows part = a;
            part.row += r * a.ld;
            quant_rows<ID>(rows - r < QUANT_ROWS ? rows - r : QUANT_ROWS, np, part, w, stride, kp, r == 0 ? ahead : 0, out + r * LANES, out_stride);
        }
        return;
    } else {
        const bool high = rows > 16;
        int32_t d[4][16 * LANES] __attribute__((aligned(64)));
        uint8_t bytes[1024] __attribute__((aligned(64)));
        const uint8_t *const panels[2] = {w, np == 2 ? w + stride : w};
        const uint8_t *const codes[2] = {panels[0] + scale_bytes(L, kp), panels[1] + scale_bytes(L, kp)};
        for (int p = 0; p < np; p++)
            for (int r = 0; r < rows; r++) store<F>(out + p * out_stride + r * LANES, F{});
        for (int64_t k = 0, s = 0; k < kp; k += L.step, s++) {
            const int64_t end = k + L.step < kp ? k + L.step : kp;
            if (ahead)
                for (int p = 0; p < np; p++)
                    for (int64_t i = k / 32 * code_bytes(L); i < end / 32 * code_bytes(L); i += 64) __builtin_prefetch(codes[p] + i + ahead, 0, 2);
            tile_step<ID>(a, high, codes, k, end, bytes);
            TILE_STORE(0, d[0], 64);
            TILE_STORE(1, d[1], 64);
            if (high) {
                TILE_STORE(2, d[2], 64);
                TILE_STORE(3, d[3], 64);
            }
            for (int p = 0; p < np; p++) {
                float scales[LANES] __attribute__((aligned(64))), minima[LANES] __attribute__((aligned(64)));
                for (int v = 0; v < NV; v++) {
                    NF scale = {}, minimum = {};
                    scales_of<ID>(panels[p], kp, s, v, &scale, &minimum);
                    store<NF>(scales + v * OCTAVO_WIDTH, scale), store<NF>(minima + v * OCTAVO_WIDTH, minimum);
                }
                const F scale = load<F>(scales), minimum = load<F>(minima);
                for (int r = 0; r < rows; r++) {
                    const char *row = a.row + r * a.ld;
                    I sum = load<I>(d[r / 16 * 2 + p] + r % 16 * LANES);
                    if constexpr (L.zero != 0) sum += ((const int32_t *)(row + a.zeros))[s];
                    F t = __builtin_convertvector(sum, F) * ((const float *)(row + a.scale))[s];
                    if constexpr (L.scale != SCALE_COLUMN) t = t * scale;
                    F c = load<F>(out + p * out_stride + r * LANES) + t;
                    if constexpr (has_minimum(L)) c = c + minimum * ((const float *)(row + a.sums))[s];
                    store<F>(out + p * out_stride + r * LANES, c);
                }
            }
        }
        if constexpr (L.scale == SCALE_COLUMN)
            for (int p = 0; p < np; p++)
                for (int r = 0; r < rows; r++) {
                    float *at = out + p * out_stride + r * LANES;
                    store<F>(at, load<F>(at) * load<F>(panels[p]));
                }
    }
}
