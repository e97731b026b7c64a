// linear: rows of act values times packed weights, and what follows in the same breath: bias, residual, silu·mul.
//
// p: a, weights, bias (0: none), residual (0: none), out, and for a fused norm: x, w.
// n: rows kind, kp, panels (even), epilogue, ld of out (and of the residual), d of the norm. f: eps of the norm.
// The ld of a and x is kp: every buffer's rows are padded to 32 columns, and the padding holds zeros.
#pragma once

// Results of rows row0 … and panels panel …, from acc[panel][row][16] (panels `stride` floats apart) to memory.
template <class E> FN void finish(const Op &op, int64_t row0, int rows, int64_t panel, int np, const float *acc, int64_t stride) {
    const float *bias = (const float *)op.p[2];
    const int64_t ld = op.n[4];
    if (op.n[3] == EPI_SILU_MUL) {  // panels alternate: 16 columns of gate, the same of up
        for (int p = 0; p < np; p += 2)
            for (int r = 0; r < rows; r++) {
                F gate = load<F>(acc + p * stride + r * LANES), up = load<F>(acc + (p + 1) * stride + r * LANES);
                if (bias) gate = gate + load<F>(bias + (panel + p) * LANES), up = up + load<F>(bias + (panel + p + 1) * LANES);
                F y = gate / (splat(1.0f) + exp16(-gate)) * up;
                store_act((E *)op.p[4] + (row0 + r) * ld + (panel + p) / 2 * LANES, y);
            }
        return;
    }
    const float *residual = (const float *)op.p[3];
    for (int p = 0; p < np; p++)
        for (int r = 0; r < rows; r++) {
            const int64_t at = (row0 + r) * ld + (panel + p) * LANES;
            F y = load<F>(acc + p * stride + r * LANES);
            if (bias) y = y + load<F>(bias + (panel + p) * LANES);
            if (residual) y = load<F>(residual + at) + y;
            store<F>((float *)op.p[4] + at, y);
        }
}

// Few rows: memory speed decides. Every thread reads its share of the panels once; all rows ride along.
template <class E> static void linear_few(const Op &op, const Run &run, const Part &part) {
    const int64_t kp = op.n[1], stride = kp * LANES;
    const int rows = part.rows, unit = op.n[3] == EPI_SILU_MUL ? 2 : 1;
    int64_t from, to;
    share(op.n[2] / unit, part.thread, run.threads, &from, &to);
    from *= unit, to *= unit;
    if (from == to) return;
    Operand<E> *wide = (Operand<E> *)run.scratch[part.thread];
    const Operand<E> *a = wide;
    if (op.flags & FLAG_FUSED) {
        for (int r = 0; r < rows; r++)
            norm_row<E>((const float *)op.p[5] + (part.row0 + r) * kp, (const float *)op.p[6], op.f[0], op.n[5], kp, wide + r * kp);
    } else if (sizeof(E) == 4) {
        a = (const Operand<E> *)op.p[0] + part.row0 * kp;
    } else {
        expand(wide, (const E *)op.p[0] + part.row0 * kp, rows * kp);
    }
    const E *w = (const E *)op.p[1];
    float acc[4 * MAX_ROWS * LANES] __attribute__((aligned(64)));
    const auto width = [&](int64_t p) { return to - p < 4 ? to - p : 4; };
    for (int64_t p = from; p < to; p += 4) {
        const int np = (int)width(p), times = (rows + MAX_ROWS - 1) / MAX_ROWS;
        Fetch next;
        if (p + 4 < to) next = fetch_beside(w + (p + 4) * stride, width(p + 4) * stride * (int64_t)sizeof(E), w + p * stride, np, times, kp);
        for (int r = 0; r < rows; r += MAX_ROWS) {
            const int n = rows - r < MAX_ROWS ? rows - r : MAX_ROWS;
            product_rows<E>(n, np, a + r * kp, kp, w + p * stride, stride, kp, next, acc, MAX_ROWS * LANES, LANES);
            finish<E>(op, part.row0 + r, n, p, np, acc, MAX_ROWS * LANES);
        }
    }
}

// Many rows without matrix units: tasks of 64 rows × 2 panels; a panel stays in the first cache while rows pass by, and the panels of
// this thread's next task come nearer.
template <class E> static void linear_many(const Op &op, const Run &run, const Part &part) {
    const int64_t kp = op.n[1], stride = kp * LANES;
    const int64_t columns = op.n[2] / 2, chunks = (part.rows + EXPAND_ROWS - 1) / EXPAND_ROWS;
    const int unit = op.n[3] == EPI_SILU_MUL ? 2 : 1;
    Operand<E> *wide = (Operand<E> *)run.scratch[part.thread];
    int64_t held = -1;
    float acc[2 * MAX_ROWS * LANES] __attribute__((aligned(64)));
    const auto panels = [&](int64_t task) { return (const E *)op.p[1] + task % columns * 2 * stride; };
    for (int64_t next = next_task(part.counter); next < columns * chunks;) {
        const int64_t task = next, chunk = task / columns, column = task % columns * 2;
        next = next_task(part.counter);
        const int64_t row0 = part.row0 + chunk * EXPAND_ROWS;
        const int64_t left = part.rows - chunk * EXPAND_ROWS;
        const int rows = left < EXPAND_ROWS ? (int)left : EXPAND_ROWS;
        const E *src = (const E *)op.p[0] + row0 * kp;
        if (sizeof(E) == 2 && held != chunk) expand(wide, src, rows * kp), held = chunk;
        const Operand<E> *a = sizeof(E) == 2 ? wide : (const Operand<E> *)(const void *)src;
        Fetch fetch;
        if (next < columns * chunks) fetch = fetch_beside(panels(next), 2 * stride * (int64_t)sizeof(E), panels(task), 2, (rows + MAX_ROWS - 1) / MAX_ROWS, kp);
        for (int64_t p = column; p < column + 2; p += unit)
            for (int r = 0; r < rows; r += MAX_ROWS) {
                const int n = rows - r < MAX_ROWS ? rows - r : MAX_ROWS;
                product_rows<E>(n, unit, a + r * kp, kp, (const E *)op.p[1] + p * stride, stride, kp, fetch, acc, MAX_ROWS * LANES, LANES);
                finish<E>(op, row0 + r, n, p, unit, acc, MAX_ROWS * LANES);
            }
    }
}

#ifdef OCTAVO_AMX
// Matrix units. Rows behind the last are read from the buffer's spare rows and thrown away: a tile's rows do not touch
// each other. Up to 64 rows memory speed still decides: every thread streams its own share of the panels.
static void linear_tiles_few(const Op &op, const Run &run, const Part &part) {
    const int64_t kp = op.n[1], stride = kp * LANES;
    int64_t from, to;
    share(op.n[2] / 2, part.thread, run.threads, &from, &to);
    from *= 2, to *= 2;
    if (from == to) return;
    const bf16 *a = (const bf16 *)op.p[0] + part.row0 * kp;
    if ((op.flags & FLAG_FUSED) && part.rows <= FUSED_ROWS) {
        bf16 *normed = (bf16 *)run.scratch[part.thread];
        for (int r = 0; r < part.rows; r++)
            norm_row<bf16>((const float *)op.p[5] + (part.row0 + r) * kp, (const float *)op.p[6], op.f[0], op.n[5], kp, normed + r * kp);
        a = normed;
    }
    float acc[4 * 16 * LANES] __attribute__((aligned(64)));
    for (int64_t p = from; p < to;) {
        const bf16 *w = (const bf16 *)op.p[1] + p * stride;
        const int np = part.rows <= 16 && p + 4 <= to ? 4 : 2;
        for (int r = 0; r < part.rows; r += 32) {
            const int rows = part.rows - r < 32 ? part.rows - r : 32;
            const int64_t ahead = r == 0 ? np * stride : 0;
            if (np == 4)
                tiles_1x4(a, kp, w, stride, ahead, acc);
            else if (rows > 16)
                tiles_2x2(a + r * kp, kp, w, stride, ahead, acc, [] {});
            else
                tiles_1x2(a + r * kp, kp, w, stride, ahead, acc);
            finish<bf16>(op, part.row0 + r, rows, p, np, acc, np == 4 ? 16 * LANES : 32 * LANES);
        }
        p += np;
    }
}

// Results of a block of up to 32 rows × 2 panels that wait to be finished, which is done bit by bit while the next block is multiplied.
struct Pending {
    int64_t row0 = 0, panel = 0;
    int rows = 0, panels = 2, done = 0;
    const float *acc = nullptr;  // [panels][32][16]
};
template <class E> static void finish_some(const Op &op, Pending &waits, int rows) {
    const int left = waits.rows - waits.done, n = left < rows ? left : rows;
    if (n <= 0) return;
    finish<E>(op, waits.row0 + waits.done, n, waits.panel, waits.panels, waits.acc + waits.done * LANES, 32 * LANES);
    waits.done += n;
}

// 32 rows × 2 panels in four accumulator tiles, over all of K. Meanwhile the last block is finished, and the panels of this thread's
// next task come nearer.
static void linear_tiles(const Op &op, const Part &part) {
    const int64_t kp = op.n[1], stride = kp * LANES, pairs = op.n[2] / 2;
    const int64_t chunks = (part.rows + TILE_CHUNK - 1) / TILE_CHUNK, chunk_rows = pad((part.rows + chunks - 1) / chunks, 32);
    const int each = (int)((32 * KBLOCK + kp - 1) / kp), lines = (int)((KBLOCK * 32 + chunk_rows - 1) / chunk_rows);  // for every group of k
    const auto panels = [&](int64_t task) { return (const bf16 *)op.p[1] + task % pairs * 2 * stride; };
    float acc[2][2 * 32 * LANES] __attribute__((aligned(64)));
    int now = 0;
    Pending waits;
    int64_t next = next_task(part.counter);
    while (next < pairs * chunks) {
        const int64_t task = next, first = task / pairs * chunk_rows;
        const int64_t last = first + chunk_rows < part.rows ? first + chunk_rows : part.rows;
        Fetch fetch;
        next = next_task(part.counter);
        if (next < pairs * chunks) fetch = {(const char *)panels(next), (const char *)(panels(next) + 2 * stride)};
        for (int64_t r = first; r < last; r += 32) {
            const int rows = last - r < 32 ? (int)(last - r) : 32;
            const bf16 *a = (const bf16 *)op.p[0] + (part.row0 + r) * kp;
            if (rows > 16)
                tiles_2x2(a, kp, panels(task), stride, 0, acc[now], [&] {
                    finish_some<bf16>(op, waits, each);
                    fetch_some(fetch, lines);
                });
            else
                tiles_1x2(a, kp, panels(task), stride, 0, acc[now]);
            finish_some<bf16>(op, waits, 32);
            waits = {part.row0 + r, task % pairs * 2, rows, 2, 0, acc[now]};
            now = 1 - now;
        }
    }
    finish_some<bf16>(op, waits, 32);
}
#endif

template <class E> static void linear(const Op &op, const Run &run, const Part &part) {
    if (part.rows == 0) return;
#ifdef OCTAVO_AMX
    if (sizeof(E) == 2 && part.rows > TILE_ROWS_NONE) return part.rows <= TILE_ROWS_FEW ? linear_tiles_few(op, run, part) : linear_tiles(op, part);
#endif
    if (part.rows <= FUSED_ROWS) return linear_few<E>(op, run, part);
    linear_many<E>(op, run, part);
}
