// Ops that work on single rows: embedding, RMSNorm, picking rows.
#pragma once

// embed. p: tokens, table, out. n: rows kind, dp, ld of out.
template <class E> static void embed(const Op &op, const Run &, const Part &part, int threads) {
    const int32_t *tokens = (const int32_t *)op.p[0];
    const E *table = (const E *)op.p[1];
    float *out = (float *)op.p[2];
    const int64_t dp = op.n[1], ld = op.n[2];
    int64_t from, to;
    share(part.rows, part.thread, threads, &from, &to);
    for (int64_t t = from; t < to; t++) {
        const int64_t row = tokens[t], column = row % LANES;
        const E *src = table + row / LANES * dp * LANES;
        float *dst = out + t * ld;
        for (int64_t k = 0; k < dp; k++)
            dst[k] = sizeof(E) == 2 ? get_act(src[(k / 2 * LANES + column) * 2 + k % 2]) : get_act(src[k * LANES + column]);
    }
}

// One row's RMSNorm: value(i) is 16 values of x / sqrt(mean(x²) + eps) · w from i on, rounded to E's precision. The squares are summed in 16 lanes.
template <class E> FN auto normed(const float *x, const float *w, float eps, int64_t d, int64_t dp) {
    F squares = {};
    for (int64_t i = 0; i < dp; i += LANES) {
        F v = load<F>(x + i);
        squares = squares + v * v;
    }
    const float mean = sum_lanes(squares) / (float)d;
    const float inv = 1.0f / __builtin_sqrtf(mean + eps);
    return [=](int64_t i) __attribute__((always_inline)) { return round_act<E>((load<F>(x + i) * inv) * load<F>(w + i)); };
}
template <class E, class Out> FN void norm_row(const float *x, const float *w, float eps, int64_t d, int64_t dp, Out *out) {
    const auto value = normed<E>(x, w, eps, d, dp);
    for (int64_t i = 0; i < dp; i += LANES) store_act(out + i, value(i));
}

// norm. p: x, w, out. n: rows kind, d, dp (also the ld of all). f: eps.
template <class E> static void norm(const Op &op, const Run &, const Part &part, int threads) {
    const int64_t d = op.n[1], dp = op.n[2];
    int64_t from, to;
    share(part.rows, part.thread, threads, &from, &to);
    for (int64_t t = from; t < to; t++)
        norm_row<E>((const float *)op.p[0] + t * dp, (const float *)op.p[1], op.f[0], d, dp, (E *)op.p[2] + t * dp);
}

// take_rows. p: x, rows, out. n: rows kind, words of 4 bytes in a row.
static void take_rows(const Op &op, const Run &run, const Part &part) {
    const int32_t *rows = (const int32_t *)op.p[1];
    const int64_t ld = op.n[1];
    int64_t from, to;
    share(part.rows, part.thread, run.threads, &from, &to);
    for (int64_t t = from; t < to; t++) __builtin_memcpy((float *)op.p[2] + t * ld, (const float *)op.p[0] + rows[t] * ld, (size_t)ld * 4);
}
