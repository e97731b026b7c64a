// Linear layers with quantized weights: rows of act values are quantized (quant.h), multiplied, and finished as in linear.h.
#pragma once

struct QuantKernels {
    void (*rows)(int rows, int np, const ActRows &a, const uint8_t *w, int64_t stride, int64_t kp, Fetch &next, float *out, int64_t out_stride);
    void (*column)(const uint8_t *panel, int64_t kp, int64_t column, float *out);
#ifdef OCTAVO_AMX
    void (*expand)(const uint8_t *w, int64_t stride, int np, int64_t kp, char *out);
    void (*tiles)(int rows, int np, const ActRows &a, const char *panels, int64_t kp, float *out, Meanwhile &beside);
};
#define OCTAVO_LAYOUT(ID) {quant_rows<ID>, quant_column<ID>, expand_panels<ID>, quant_tiles<ID>}
#define OCTAVO_LAYOUT_AS_IT_IS(ID) {quant_rows<ID>, quant_column<ID>, nullptr, nullptr}
#else
};
#define OCTAVO_LAYOUT(ID) {quant_rows<ID>, quant_column<ID>}
#define OCTAVO_LAYOUT_AS_IT_IS OCTAVO_LAYOUT
#endif
static constexpr QuantKernels QUANT[LAYOUT_COUNT] = {
    {}, OCTAVO_LAYOUT_AS_IT_IS(1), OCTAVO_LAYOUT(2), OCTAVO_LAYOUT(3), OCTAVO_LAYOUT(4), OCTAVO_LAYOUT(5), OCTAVO_LAYOUT(6), OCTAVO_LAYOUT(7), OCTAVO_LAYOUT(8), OCTAVO_LAYOUT(9),
    OCTAVO_LAYOUT(10)};
#undef OCTAVO_LAYOUT
#undef OCTAVO_LAYOUT_AS_IT_IS

// Row of act values, or of the residual stream behind a norm, to codes. `wide`: kp floats.
template <class E> FN void quantize_act(const Op &op, int64_t row, float *wide, char *out) {
    const int64_t kp = op.n[1];
    const LayoutInfo &l = LAYOUTS[op.n[6]];
    if (op.flags & FLAG_NORM)
        return quantize_row(l, normed<E>((const float *)op.p[5] + row * kp, (const float *)op.p[6], op.f[0], op.n[5], kp), kp, wide, out);
    const E *a = (const E *)op.p[0] + row * kp;
    quantize_row(l, [=](int64_t i) __attribute__((always_inline)) { return load_act(a + i); }, kp, wide, out);
}

// quantize. p: a, -, -, -, -, x and w of the norm (FLAG_NORM), out. n: rows kind, kp, -, -, -, d of the norm, layout. f: eps.
template <class E> static void quantize(const Op &op, const Run &run, const Part &part) {
    const int64_t bytes = act_row_bytes(LAYOUTS[op.n[6]], op.n[1]);
    int64_t from, to;
    share(part.rows, part.thread, run.threads, &from, &to);
    for (int64_t t = from; t < to; t++) quantize_act<E>(op, t, (float *)run.scratch[part.thread], (char *)op.p[7] + t * bytes);
}

#ifdef OCTAVO_AMX
// Matrix units. int8 goes as it lies in the panels: one sum over all of K.
template <class E> FN void finish_int8(const Op &op, const Part &part, const Pending &waits, int n, const ActRows &a) {
    const char *row = a.row + (waits.row + waits.done) * a.ld, *scales = (const char *)op.p[1] + waits.panel * panel_bytes(LAYOUTS[LAYOUT_INT8], op.n[1]);
    const int64_t stride = panel_bytes(LAYOUTS[LAYOUT_INT8], op.n[1]);
    const int32_t *sums = (const int32_t *)waits.sums + waits.done * LANES;
    finish<E>(op, part.row0 + waits.row + waits.done, n, op.n[7] + waits.panel, waits.panels, [=](int p, int r) __attribute__((always_inline)) {
        const char *of = row + r * a.ld;
        const U sum = load<U>(sums + (p * BLOCK_ROWS + r) * LANES) + *(const uint32_t *)(of + a.zeros);
        return lanes_to<float>((I)sum) * *(const float *)(of + a.scale) * load<F>(scales + p * stride);
    });
}
template <class E> static void linear_int8_tiles(const Op &op, const Run &run, const Part &part) {
    const LayoutInfo &l = LAYOUTS[LAYOUT_INT8];
    const int64_t kp = op.n[1];
    const ActRows a = act_rows(l, kp, (const char *)op.p[7] + part.row0 * act_row_bytes(l, kp));
    linear_tiles<true>({a.row, a.ld, (const char *)op.p[1] + scale_bytes(l, kp), panel_bytes(l, kp), pad64(kp) / 64}, op.n[2], run, part,
                       [&](const Pending &waits, int n) __attribute__((always_inline)) { finish_int8<E>(op, part, waits, n, a); });
}

// The other layouts have something to do between steps, and are expanded for that, a pair of panels at a time (tiles_quant.h).
template <class E> static void finish_expanded(const Op &op, const Part &part, Pending &waits, int rows) {
    const int left = waits.rows - waits.done, n = left < rows ? left : rows;
    if (n <= 0) return;
    finish<E>(op, part.row0 + waits.row + waits.done, n, op.n[7] + waits.panel, waits.panels, (const float *)waits.sums + waits.done * LANES, BLOCK_ROWS * LANES);
    waits.done += n;
}
template <class E> static void linear_quant_tiles(const Op &op, const Run &run, const Part &part) {
    const LayoutInfo &l = LAYOUTS[op.n[6]];
    const QuantKernels &kernels = QUANT[op.n[6]];
    const int64_t kp = op.n[1], stride = panel_bytes(l, kp), bytes = act_row_bytes(l, kp), panels = op.n[2], pairs = (panels + 1) / 2;
    const int64_t chunks = (part.rows + TILE_CHUNK - 1) / TILE_CHUNK, chunk_rows = pad((part.rows + chunks - 1) / chunks, BLOCK_ROWS);
    const char *rows = (const char *)op.p[7] + part.row0 * bytes;
    char *expanded = run.scratch[part.thread];
    float acc[2][2 * BLOCK_ROWS * LANES] __attribute__((aligned(64)));
    int now = 0;
    Meanwhile beside = {op, part, finish_expanded<E>};
    beside.lines = (int)(2 * stride / 64 * BLOCK_ROWS / (chunk_rows * steps_of(l, kp)) + 1);
    const auto width = [&](int64_t pair) { return pair * 2 + 1 < panels ? 2 : 1; };
    const auto weights = [&](int64_t pair) { return (const uint8_t *)op.p[1] + pair * 2 * stride; };
    // Task: a pair of panels, for a chunk of rows. `next` comes behind it.
    const auto compute = [&](int64_t task, int64_t next) {
        const int64_t pair = task % pairs, first = task / pairs * chunk_rows, last = first + chunk_rows < part.rows ? first + chunk_rows : part.rows;
        const int np = width(pair);
        kernels.expand(weights(pair), stride, np, kp, expanded);
        if (next < pairs * chunks) beside.fetch = {(const char *)weights(next % pairs), (const char *)weights(next % pairs) + width(next % pairs) * stride};
        for (int64_t r = first; r < last; r += BLOCK_ROWS) {
            const int n = last - r < BLOCK_ROWS ? (int)(last - r) : BLOCK_ROWS;
            kernels.tiles(n, np, act_rows(l, kp, rows + r * bytes), expanded, kp, acc[now], beside);
            finish_expanded<E>(op, part, beside.waits, BLOCK_ROWS);
            beside.waits = {r, pair * 2, n, np, 0, acc[now]};
            now = 1 - now;
        }
    };
    configure_quant(l.step);
    if (part.rows <= FEW_ROWS) {
        int64_t from, to;
        share(pairs, part.thread, run.threads, &from, &to);
        for (int64_t pair = from; pair < to; pair++) compute(pair, pair + 1 < to ? pair + 1 : pairs);
    } else {
        for (int64_t next = next_task(part.counter); next < pairs * chunks;) {
            const int64_t task = next;
            next = next_task(part.counter);
            compute(task, next);
        }
    }
    finish_expanded<E>(op, part, beside.waits, BLOCK_ROWS);
    configure(false);
}
#endif

// linear, n[6] > 0. As quantize; p[1]: panels, p[2]: bias, p[3]: residual, p[4]: out, p[7]: the quantized rows.
// n: as linear; n[7]: first panel of the results' columns. Up to FUSED_ROWS rows are quantized here, in every thread.
template <class E> static void linear_quant(const Op &op, const Run &run, const Part &part) {
    const bool fused = part.rows <= FUSED_ROWS;
#ifdef OCTAVO_AMX
    if (!fused) return op.n[6] == LAYOUT_INT8 ? linear_int8_tiles<E>(op, run, part) : linear_quant_tiles<E>(op, run, part);
#endif
    const LayoutInfo &l = LAYOUTS[op.n[6]];
    const int64_t kp = op.n[1], stride = panel_bytes(l, kp), bytes = act_row_bytes(l, kp), first = op.n[7];
    const int unit = op.n[3] == EPI_SILU_MUL ? 2 : 1;
    const char *rows = (const char *)op.p[7] + part.row0 * bytes;
    const uint8_t *w = (const uint8_t *)op.p[1];
    float acc[4 * DOT_ROWS * LANES] __attribute__((aligned(64)));
    // Rows `from` … `to` times np panels from p on. Meanwhile the `more` panels from `then` on are fetched, which this thread reads next.
    const auto compute = [&](int64_t from, int64_t to, int64_t p, int np, int64_t then, int64_t more) {
        const bool even = np == 4 && to - from > FOUR_ROWS;  // of 5 or 6 rows; 8 at a time are best full, and then the rest
        const int64_t parts = even ? (to - from + FOUR_ROWS - 1) / FOUR_ROWS : (to - from + DOT_ROWS - 1) / DOT_ROWS;
        Fetch next = fetch_beside(w + then * stride, more * stride, w + p * stride, np, parts, kp);
        for (int64_t i = 0, r = from, end; i < parts; i++, r = end) {
            if (even) end = from + (to - from) * (i + 1) / parts;
            else end = to - r < DOT_ROWS ? to : r + DOT_ROWS;
            const int n = (int)(end - r);
            QUANT[op.n[6]].rows(n, np, act_rows(l, kp, rows + r * bytes), w + p * stride, stride, kp, next, acc, DOT_ROWS * LANES);
            finish<E>(op, part.row0 + r, n, first + p, np, acc, DOT_ROWS * LANES);
        }
    };
    const bool four = OCTAVO_WIDTH == 16 && l.scale == SCALE_COLUMN;  // as in quant_rows
    if (fused) {  // memory speed decides: every thread reads its share of the panels once, all rows ride along
        int64_t from, to;
        share(op.n[2] / unit, part.thread, run.threads, &from, &to);
        from *= unit, to *= unit;
        if (from < to) {
            char *scratch = run.scratch[part.thread];
            for (int r = 0; r < part.rows; r++) quantize_act<E>(op, part.row0 + r, (float *)(scratch + FUSED_ROWS * bytes), scratch + r * bytes);
            rows = scratch;
        }
        const int fly = part.rows <= (four ? FOUR_ROWS : 2) ? 4 : four ? 2 : unit;
        const auto width = [&](int64_t p) { return to - p < fly ? (int)(to - p) : fly; };
        for (int64_t p = from; p < to; p += fly) compute(0, part.rows, p, width(p), p + fly, p + fly < to ? width(p + fly) : 0);
    } else {  // tasks of FEW_ROWS rows × 4, 2 panels or 1, as many as leave enough tasks for all threads; a panel stays in the caches while rows pass by
        const int64_t chunks = (part.rows + FEW_ROWS - 1) / FEW_ROWS, all = op.n[2] * chunks;
        const int64_t most = four && all >= 24 * run.threads ? 4 : unit == 2 || all >= 8 * run.threads ? 2 : 1;
        const auto width = [&](int64_t p) { return op.n[2] - p < most ? op.n[2] - p : most; };
        Tasks tasks((op.n[2] + most - 1) / most, chunks, part, run.threads);
        tasks.each([&](Tasks::Task task, Tasks::Task then) __attribute__((always_inline)) {
            const int64_t row0 = task.chunk * FEW_ROWS, p = task.column * most, last = row0 + FEW_ROWS < part.rows ? row0 + FEW_ROWS : part.rows;
            const int64_t next = then.chunk >= 0 ? then.column * most : op.n[2];
            compute(row0, last, p, (int)width(p), next, width(next));
        });
    }
}

// embed from a quantized table. p and n as embed; n[3]: layout; n[4]: d, behind which there are zeros (spread, they had been rounded).
static void embed_quant(const Op &op, const Run &, const Part &part, int threads) {
    const int32_t *tokens = (const int32_t *)op.p[0];
    const int64_t dp = op.n[1], ld = op.n[2], stride = panel_bytes(LAYOUTS[op.n[3]], dp);
    int64_t from, to;
    share(part.rows, part.thread, threads, &from, &to);
    for (int64_t t = from; t < to; t++) {
        float *out = (float *)op.p[2] + t * ld;
        QUANT[op.n[3]].column((const uint8_t *)op.p[1] + tokens[t] / LANES * stride, dp, tokens[t] % LANES, out);
        for (int64_t c = op.n[4]; c < dp; c++) out[c] = 0;
    }
}
