// Quantized products in matrix units: 32 rows × 2 panels, one step at a time. A pair of panels is expanded first, once for all the
// rows that pass by: its codes to signed bytes, code - zero, so that nothing has to be taken off the sums (which are exact either
// way), its scales and minima to float32. What is done between steps is the contract of quant.h.
//
// Vector units work while matrix units do: they take up the sums of the step before, and finish the results of the block before.
#pragma once

// Tiles 4, 5: 16 rows of activations each; 6, 7: panels; of a step's k, at most 64. 0 to 3: sums.
static void configure_quant(int step) {
    TileConfig c = {};
    const int k = step < 64 ? step : 64;
    c.palette = 1;
    for (int t = 0; t < 8; t++) c.bytes[t] = 64, c.rows[t] = 16;
    c.bytes[4] = c.bytes[5] = (uint16_t)k, c.rows[6] = c.rows[7] = (uint8_t)(k / 4);
    tile_config(&c);
}

// What a pair of panels is expanded to: for each panel codes [steps · step][16] in quads, scales [steps][16], minima [steps][16].
struct Expanded {
    int64_t codes, scales, bytes;  // sizes for one panel
    Expanded(const LayoutInfo &l, int64_t kp)
        : codes(steps_of(l, kp) * l.step * LANES), scales(steps_of(l, kp) * LANES * 4),
          bytes(codes + scales * (has_minimum(l) ? 2 : 1)) {}
};

template <int ID> static void expand_panels(const uint8_t *w, int64_t stride, int np, int64_t kp, char *out) {
    constexpr LayoutInfo L = LAYOUTS[ID];
    constexpr uint32_t zero = (uint32_t)L.zero * 0x01010101u;
    const Expanded size(L, kp);
    for (int p = 0; p < np; p++, w += stride, out += size.bytes) {
        const uint8_t *codes = w + scale_bytes(L, kp);
        for (int64_t b = 0; b < kp / 32; b++)
#pragma GCC unroll 8
            for (int q = 0; q < 8; q++)
                for (int v = 0; v < NV; v++) {
                    typedef uint8_t NB __attribute__((vector_size(OCTAVO_WIDTH * 4)));
                    const NB code = (NB)quad_of<L.bits>(codes + b * code_bytes(L), q, v);
                    store<NB>(out + (b * 8 + q) * 64 + v * OCTAVO_WIDTH * 4, code - (NB)(NU{} + zero));
                }
        __builtin_memset(out + kp * LANES, 0, (size_t)(size.codes - kp * LANES));  // a short last step
        char *scales = out + size.codes;
        for (int64_t s = 0; s < steps_of(L, kp); s++)
            for (int v = 0; v < NV; v++) {
                NF scale = {}, minimum = {};
                scales_of<ID>(w, kp, s, v, &scale, &minimum);
                store<NF>(scales + s * 64 + v * OCTAVO_WIDTH * 4, scale);
                if constexpr (has_minimum(L)) store<NF>(scales + size.scales + s * 64 + v * OCTAVO_WIDTH * 4, minimum);
            }
    }
}

// What is done beside a block's steps: finishing the last block (`finish` is finish_expanded), and fetching what comes next.
struct Meanwhile {
    const Op &op;
    const Part &part;
    void (*finish)(const Op &, const Part &, Pending &, int);
    Pending waits = {};
    Fetch fetch = {};
    int lines = 0;  // to fetch for every step
};

// d[panel · 2 + (row ≥ 16)] = the whole-number sums of one step, from k on. Calls meanwhile(j) for the j-th 64 of it.
template <int STEP, class Beside>
FN void tile_step(const ActRows &a, bool high, const char *const codes[2], int64_t k, int32_t (*d)[16 * LANES], Beside meanwhile) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
#pragma GCC unroll 2
    for (int j = 0; j < (STEP + 63) / 64; j++, k += 64) {
        TILE_LOAD(6, codes[0] + k * LANES, 64);
        TILE_LOAD_ONCE(4, a.row + k, a.ld);
        TILE_DOT_BYTES(0, 4, 6);
        TILE_LOAD(7, codes[1] + k * LANES, 64);
        TILE_DOT_BYTES(2, 4, 7);
        if (high) {
            TILE_LOAD_ONCE(5, a.row + 16 * a.ld + k, a.ld);
            TILE_DOT_BYTES(1, 5, 6);
            TILE_DOT_BYTES(3, 5, 7);
        }
        meanwhile(j);
    }
    TILE_STORE(0, d[0], 64);
    TILE_STORE(2, d[2], 64);
    if (!high) return;
    TILE_STORE(1, d[1], 64);
    TILE_STORE(3, d[3], 64);
}

// out[panel][32][16] of up to 32 rows × 2 panels, which lie expanded at `panels`. Rows behind the last are read, and thrown away.
template <int ID> static void quant_tiles(int rows, int np, const ActRows &act, const char *panels, int64_t kp, float *out, Meanwhile &beside) {
    constexpr LayoutInfo L = LAYOUTS[ID];
    constexpr int parts = (L.step + 63) / 64;
    const ActRows a = act;
    const Expanded size(L, kp);
    const int64_t steps = steps_of(L, kp);
    const bool high = rows > 16;
    const char *const codes[2] = {panels, panels + (np - 1) * size.bytes};
    const int each = (int)((BLOCK_ROWS + steps * parts - 1) / (steps * parts));  // rows of the last block
    int32_t d[2][4][16 * LANES] __attribute__((aligned(64)));
    const auto take_up = [&](int64_t s, int from, int to) __attribute__((always_inline)) {
        const int32_t(*sums)[16 * LANES] = d[s % 2];
        F scale[2], minimum[2] = {};
        for (int p = 0; p < 2; p++) scale[p] = load<F>(codes[p] + size.codes + s * 64);
        if constexpr (has_minimum(L))
            for (int p = 0; p < 2; p++) minimum[p] = load<F>(codes[p] + size.codes + size.scales + s * 64);
        for (int r = from; r < to; r++) {
            const char *row = a.row + r * a.ld;
            const float by = ((const float *)(row + a.scale))[s];
#pragma GCC unroll 2
            for (int p = 0; p < 2; p++) {
                float *c = out + (p * BLOCK_ROWS + r) * LANES;
                F t = lanes_to<float>(load<I>(sums[p * 2] + r * LANES)) * by * scale[p];
                t = s == 0 ? F{} + t : load<F>(c) + t;
                if constexpr (has_minimum(L)) t = t + minimum[p] * ((const float *)(row + a.sums))[s];
                store<F>(c, t);
            }
        }
    };
    for (int64_t s = 0; s < steps; s++) {
        tile_step<L.step>(a, high, codes, s * L.step, d[s % 2], [&](int j) __attribute__((always_inline)) {
            if (s > 0) take_up(s - 1, rows * j / parts, rows * (j + 1) / parts);
            beside.finish(beside.op, beside.part, beside.waits, each);
        });
        fetch_some(beside.fetch, beside.lines);
    }
    take_up(steps - 1, 0, rows);
}
