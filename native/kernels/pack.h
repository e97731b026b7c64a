// Packing of weights: one panel of 16 rows of the matrix, to bf16 [Kp/2][16][2] or f32 [Kp][16].
#pragma once

static void pack_panel(void *dst, const void *const rows[16], const int32_t is_f32[16], int64_t k, int64_t kp, int32_t f32) {
    for (int r = 0; r < LANES; r++) {
        const float *wide = (const float *)rows[r];
        const bf16 *narrow = (const bf16 *)rows[r];
        const bool from_f32 = is_f32[r];
        if (f32) {
            float *out = (float *)dst + r;
            for (int64_t i = 0; i < kp; i++) out[i * LANES] = i < k && wide ? (from_f32 ? wide[i] : get_act(narrow[i])) : 0.0f;
        } else {
            bf16 *out = (bf16 *)dst + r * 2;
            for (int64_t i = 0; i < kp; i++) {
                const uint32_t bits = i < k && wide ? (from_f32 ? as_bits(wide[i]) : (uint32_t)narrow[i] << 16) : 0u;
                out[i / 2 * 2 * LANES + i % 2] = (bf16)(round_bits1(bits) >> 16);
            }
        }
    }
}
