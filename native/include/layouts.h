// How weights of few bits lie in a panel, and what a row of quantized activations holds. Constants and sizes only; the
// arithmetic stands in kernels/quant.h, how a panel is made in kernels/pack_quant.h.
//
// A panel of 16 columns is [scales, padded to 64 bytes][codes]. Codes are unsigned and mean code - zero; they come in blocks
// of 32 k, each of 8 quads (4 successive k of all 16 columns: 64 bytes [16][4] when a code has a byte):
//   8 bits  [8 quads][64]
//   4 bits  [4][64]: the low nibbles are quad 2i, the high ones quad 2i + 1
//   5 bits  as 4, then [64]: bit q of a byte is the fifth bit of quad q's
//   6 bits  as 4, then [2][64]: bits 2f and 2f + 1 of row h are the upper two of quad 4h + f
// Scales, by kind; a step is the k that share one, [16] the columns:
//   COLUMN     f32 [16], one for all of K; the codes are those of spread rows (kernels/quant.h), behind K up to a multiple of 64
//   HALF       per step f16 scale [16]              HALF_MIN   per step f16 scale [16], f16 minimum [16]
//   FLOAT_MIN  per step f32 scale [16], f32 minimum [16]
//   SUPER      per 256 k f16 d [16]; then per 32 k s8 [2][16]: scale = d · s8
//   SUPER_MIN  per 256 k f16 d [16], f16 m [16]; then per 32 k u8 [16], u8 [16]: scale = d · first, minimum = -(m · second)
#pragma once
#include <stdint.h>

namespace octavo {

enum Layout : int32_t {
    LAYOUT_ACT,  // bf16 or f32, as the compute dtype: see octavo.h
    LAYOUT_INT8, LAYOUT_Q8_0, LAYOUT_Q4_0, LAYOUT_Q4_1, LAYOUT_Q5_0, LAYOUT_Q5_1, LAYOUT_Q4_K, LAYOUT_Q5_K, LAYOUT_Q6_K, LAYOUT_INT4_G128, LAYOUT_COUNT
};
enum ScaleKind : int32_t { SCALE_COLUMN, SCALE_HALF, SCALE_HALF_MIN, SCALE_FLOAT_MIN, SCALE_SUPER, SCALE_SUPER_MIN };

constexpr int32_t ALL_K = 1 << 30;
constexpr int64_t MAX_K = 1 << 17;  // of such a layout: a sum of products of at most 128 · 127 each fits 31 bits

struct LayoutInfo {
    const char *name;
    int32_t bits, zero;
    int32_t step;   // k that share a weight scale
    int32_t group;  // k that share an activation scale
    int32_t scale;
    int32_t block, block_bytes;  // of the stored form in GGUF files; 0: there is none
};

static constexpr LayoutInfo LAYOUTS[LAYOUT_COUNT] = {
    {"act", 0, 0, 32, 32, SCALE_COLUMN, 0, 0},
    {"int8", 8, 128, ALL_K, ALL_K, SCALE_COLUMN, 0, 0},
    {"Q8_0", 8, 128, 32, 32, SCALE_HALF, 32, 34},
    {"Q4_0", 4, 8, 32, 32, SCALE_HALF, 32, 18},
    {"Q4_1", 4, 0, 32, 32, SCALE_HALF_MIN, 32, 20},
    {"Q5_0", 5, 16, 32, 32, SCALE_HALF, 32, 22},
    {"Q5_1", 5, 0, 32, 32, SCALE_HALF_MIN, 32, 24},
    {"Q4_K", 4, 0, 32, 32, SCALE_SUPER_MIN, 256, 144},
    {"Q5_K", 5, 0, 32, 32, SCALE_SUPER_MIN, 256, 176},
    {"Q6_K", 6, 32, 16, 32, SCALE_SUPER, 256, 210},
    {"int4_g128", 4, 0, 128, 128, SCALE_FLOAT_MIN, 0, 0},
};

static inline constexpr bool has_minimum(const LayoutInfo &l) {
    return l.scale == SCALE_HALF_MIN || l.scale == SCALE_FLOAT_MIN || l.scale == SCALE_SUPER_MIN;
}
static inline constexpr int64_t code_bytes(const LayoutInfo &l) { return 64 * l.bits; }  // of a block of 32 k
static inline constexpr int64_t pad64(int64_t k) { return (k + 63) / 64 * 64; }  // a tile of bytes has 64 k
static inline constexpr int64_t steps_of(const LayoutInfo &l, int64_t kp) { return (kp + l.step - 1) / l.step; }
static inline constexpr int64_t scale_bytes(const LayoutInfo &l, int64_t kp) {
    const int64_t steps = steps_of(l, kp);
    const int64_t bytes = l.scale == SCALE_COLUMN      ? 64
                          : l.scale == SCALE_HALF      ? steps * 32
                          : l.scale == SCALE_HALF_MIN  ? steps * 64
                          : l.scale == SCALE_FLOAT_MIN ? steps * 128
                          : l.scale == SCALE_SUPER     ? kp / 256 * 32 + kp
                                                       : kp / 256 * 64 + kp;
    return (bytes + 63) / 64 * 64;
}
static inline constexpr int64_t panel_bytes(const LayoutInfo &l, int64_t kp) {
    return scale_bytes(l, kp) + (l.scale == SCALE_COLUMN ? pad64(kp) : kp) / 32 * code_bytes(l);
}

// A row of quantized activations: codes (s8, or s16 where an instruction set multiplies those), zeros behind K up to a multiple of 64, then
// per step f32 scale, s32 -zero · (sum of the codes), f32 scale · (sum of the codes); the room is the same for all instruction sets.
static inline constexpr int64_t act_row_bytes(const LayoutInfo &l, int64_t kp) { return (pad64(kp) * 2 + steps_of(l, kp) * 12 + 63) / 64 * 64; }

}  // namespace octavo
