// linear: rows of act values times packed weights, and what follows in the same breath: bias, residual, silu·mul.
//
// p: a, weights, bias (0: none), residual (0: none), out, and for a fused norm: x, w.
// n: rows kind, kp, panels (even), epilogue, ld of out (and of the residual), d of the norm. f: eps of the norm.
// The ld of a and x is kp: every buffer's rows are padded to 32 columns, and the padding holds zeros.
#pragma once

// silu(gate) · up, as act.
FN F gated(F gate, F up) { return gate / (splat(1.0f) + exp16(-gate)) * up; }
FN void store_gated(float *out, F gate, F up) { store<F>(out, gated(gate, up)); }
// The same bits as round_act<bf16>(gated(…)) in half the steps: as exp_rounded (softmax.h), from a result that is less than 24 units in the
// last place away (silu 8 of them: all gates were tried). Where so little decides the rounding, one vector in 90, or where something is
// not usual (zero, tiny, infinite, no number), the long way is gone.
FN void store_gated(bf16 *out, F gate, F up) {
#if defined(__AVX512F__)
    const F k = fused(gate, splat(-1.44269504f), splat(12582912.0f)) - 12582912.0f, x = fused(k, splat(-0.693147180f), -gate);
    const F q = (F)_mm512_maskz_scalef_ps((__mmask16)-1, (__m512)exp_short(x), (__m512)k) + 1.0f;
    const F rough = (F)_mm512_maskz_rcp14_ps((__mmask16)-1, (__m512)q), inverse = fused(rough, fused(-q, rough, splat(1.0f)), rough);
    const U u = f_to_bits(gate * inverse * up);
    const __mmask16 far = _mm512_cmpgt_epu32_mask((__m512i)(f_to_bits(gate) & 0x7fffffffu), _mm512_set1_epi32(0x42a00000));                // 80
    const __mmask16 odd = _mm512_cmpgt_epu32_mask((__m512i)((u & 0x7fffffffu) - 0x21800000u), _mm512_set1_epi32(0x7f000000 - 0x21800000));  // 2^-60, 2^127
    const __mmask16 close = _mm512_cmple_epu32_mask((__m512i)((u & 0xffffu) - 0x7fe8u), _mm512_set1_epi32(48));
    if (__builtin_expect((far | odd | close) == 0, 1)) return store<H>(out, lanes_to<uint16_t>((u + 0x8000u) >> 16));
#elif defined(__AVX2__)
    U u;
    NU other = {};
    for (int i = 0; i < F::registers; i++) {
        const NF g = gate.r[i], t = fused(g, nsplat(-1.44269504f), nsplat(12582912.0f)), k = t - 12582912.0f;
        const NF q = (NF)((NU)exp_short(fused(k, nsplat(-0.693147180f), -g)) + ((NU)t << 23)) + 1.0f;
        const NU y = u.r[i] = (NU)(g / q * up.r[i]);
        const NI size = (NI)(y & 0x7fffffffu), rest = (NI)(y & 0xffffu);
        other |= (NU)((NI)((NU)g & 0x7fffffffu) > 0x42a00000) | (NU)(size < 0x21800000) | (NU)(size > 0x7f000000) | (NU)((rest >= 0x7fe8) & (rest <= 0x7fe8 + 48));
    }
    if (__builtin_expect(none(other), 1)) return store<H>(out, lanes_to<uint16_t>((u + 0x8000u) >> 16));
#endif
    store_act(out, gated(gate, up));
}

// Results of rows row0 … and panels panel … to memory. value(p, r): the products of panel p and row r of these.
template <class E, class Value> FN void finish(const Op &op, int64_t row0, int rows, int64_t panel, int np, Value value) {
    const float *bias = (const float *)op.p[2];
    const int64_t ld = op.n[4];
    if (op.n[3] == EPI_SILU_MUL) {  // panels alternate: 16 columns of gate, the same of up
        for (int p = 0; p < np; p += 2)
            for (int r = 0; r < rows; r++) {
                F gate = value(p, r), up = value(p + 1, r);
                if (bias) gate = gate + load<F>(bias + (panel + p) * LANES), up = up + load<F>(bias + (panel + p + 1) * LANES);
                store_gated((E *)op.p[4] + (row0 + r) * ld + (panel + p) / 2 * LANES, gate, up);
            }
        return;
    }
    const float *residual = (const float *)op.p[3];
    for (int p = 0; p < np; p++)
        for (int r = 0; r < rows; r++) {
            const int64_t at = (row0 + r) * ld + (panel + p) * LANES;
            F y = value(p, r);
            if (bias) y = y + load<F>(bias + (panel + p) * LANES);
            if (residual) y = load<F>(residual + at) + y;
            store<F>((float *)op.p[4] + at, y);
        }
}
// From sums[panel][row][16], panels `stride` floats apart.
template <class E> FN void finish(const Op &op, int64_t row0, int rows, int64_t panel, int np, const float *sums, int64_t stride) {
    finish<E>(op, row0, rows, panel, np, [=](int p, int r) __attribute__((always_inline)) { return load<F>(sums + p * stride + r * LANES); });
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

// Up to EXPAND_ROWS rows × 2 panels, wide (product.h). c: [2][EXPAND_ROWS][16].
template <class E> FN void wide_block(int rows, const float *a, const E *panels, int64_t stride, int64_t kp, Fetch &next, float *c) {
    float w[WIDE_FLOATS] __attribute__((aligned(64)));
    for (int64_t k = 0; k < kp; k += WIDE_K) {
        const int64_t size = kp - k < WIDE_K ? kp - k : WIDE_K;
        widen(panels + k * LANES, panels + stride + k * LANES, size, w);
        wide_rows<E, KBLOCK>(rows, a + k, kp, w, size, k == 0, next, c, EXPAND_ROWS * LANES, LANES);
    }
}

// Many rows without matrix units: tasks of 64 rows × 2 panels; a panel stays in the first cache while rows pass by, and the panels of
// this thread's next task come nearer.
template <class E> static void linear_many(const Op &op, const Run &run, const Part &part) {
    const int64_t kp = op.n[1], stride = kp * LANES;
    const int unit = op.n[3] == EPI_SILU_MUL ? 2 : 1;
    Operand<E> *wide = (Operand<E> *)run.scratch[part.thread];
    int64_t held = -1;
    float acc[2 * MAX_ROWS * LANES] __attribute__((aligned(64)));
    float sums[WIDE ? 2 * EXPAND_ROWS * LANES : 1] __attribute__((aligned(64)));
    const auto panel = [&](int64_t p) { return (const E *)op.p[1] + p * stride; };
    Tasks tasks(op.n[2] / 2, (part.rows + EXPAND_ROWS - 1) / EXPAND_ROWS, part, run.threads);
    tasks.each([&](Tasks::Task task, Tasks::Task then) __attribute__((always_inline)) {
        const int64_t chunk = task.chunk, column = task.column * 2;
        const int64_t row0 = part.row0 + chunk * EXPAND_ROWS;
        const int64_t left = part.rows - chunk * EXPAND_ROWS;
        const int rows = left < EXPAND_ROWS ? (int)left : EXPAND_ROWS;
        const E *src = (const E *)op.p[0] + row0 * kp;
        if (sizeof(E) == 2 && held != chunk) expand(wide, src, rows * kp), held = chunk;
        const Operand<E> *a = sizeof(E) == 2 ? wide : (const Operand<E> *)(const void *)src;
        Fetch fetch;
        if (then.chunk >= 0) fetch = fetch_beside(panel(then.column * 2), 2 * stride * (int64_t)sizeof(E), panel(column), 2, (rows + MAX_ROWS - 1) / MAX_ROWS, kp);
        if constexpr (WIDE)
            if (rows >= WIDE_LEAST) {
                fetch.each *= 2;  // of both panels
                wide_block(rows, a, panel(column), stride, kp, fetch, sums);
                finish<E>(op, row0, rows, column, 2, sums, EXPAND_ROWS * LANES);
                return;
            }
        for (int64_t p = column; p < column + 2; p += unit)
            for (int r = 0; r < rows; r += MAX_ROWS) {
                const int n = rows - r < MAX_ROWS ? rows - r : MAX_ROWS;
                product_rows<E>(n, unit, a + r * kp, kp, panel(p), stride, kp, fetch, acc, MAX_ROWS * LANES, LANES);
                finish<E>(op, row0 + r, n, p, unit, acc, MAX_ROWS * LANES);
            }
    });
}

#ifdef OCTAVO_AMX
constexpr int BLOCK_ROWS = 32;
constexpr int64_t LANE_ROWS = 128;  // fewer rows would read the panels too often

// Sums of a block of up to 32 rows × 2 panels that wait to be finished, which is done bit by bit while the next block is multiplied.
struct Pending {
    int64_t row = 0, panel = 0;  // of the op's rows in this part, and of the panels that it reads
    int rows = 0, panels = 2, done = 0;
    const void *sums = nullptr;  // [panels][32][16]
};

// Matrix units: 32 rows × 2 panels in four accumulator tiles, over all of K. `finish(waits, n)` finishes n rows of the last block meanwhile,
// and the panels that this thread reads next come nearer. Rows behind the last are read from the buffer's spare rows and thrown away: a
// tile's rows do not touch each other.
//
// Up to TILE_ROWS_FEW rows memory speed decides: every thread streams its own share of the panels. More rows are tasks of chunks of
// rows × 2 panels, handed out by lanes: each thread begins with a lane of rows, so that what it writes it also reads in the next op, and goes
// on with the others' when its own is done.
template <bool BYTES, class Finish> FN void linear_tiles(const TileOperands &o, int64_t panels, const Run &run, const Part &part, Finish finish) {
    const int64_t pairs = (panels + 1) / 2, rows = part.rows;
    const bool few = rows <= TILE_ROWS_FEW;
    const int64_t most = run.threads < MAX_LANES ? run.threads : MAX_LANES, lanes = rows < 2 * LANE_ROWS ? 1 : rows / LANE_ROWS < most ? rows / LANE_ROWS : most;
    const int64_t lane_rows = pad((rows + lanes - 1) / lanes, BLOCK_ROWS), chunks = (lane_rows + TILE_CHUNK - 1) / TILE_CHUNK;
    const int64_t chunk_rows = pad((lane_rows + chunks - 1) / chunks, BLOCK_ROWS);
    const int each = (int)((BLOCK_ROWS + o.groups - 1) / o.groups);                                     // rows for every group of k
    const int lines = (int)((TILE_BYTES / 64 * BLOCK_ROWS + chunk_rows - 1) / chunk_rows) * (rows > 16 ? 1 : 2);  // for every 16 rows of it
    const auto width = [&](int64_t pair) { return pair * 2 + 1 < panels ? 2 : 1; };
    float sums[2][2 * BLOCK_ROWS * LANES] __attribute__((aligned(64)));
    int now = 0;
    Pending waits;
    const auto some = [&](int n) __attribute__((always_inline)) {
        const int left = waits.rows - waits.done;
        if (n > left) n = left;
        if (n > 0) finish(waits, n), waits.done += n;
    };
    struct Task {
        int64_t first, last, pair;  // rows, and a pair of panels; none: pair < 0
    };
    int64_t from, to, tried = 0;
    share(pairs, part.thread, run.threads, &from, &to);
    const auto take = [&]() __attribute__((always_inline)) {
        if (few) return from < to ? Task{0, rows, from++} : Task{0, 0, -1};
        for (; tried < lanes; tried++) {
            const int64_t lane = (part.thread + tried) % lanes, task = next_task(part.counter + lane);
            if (task >= pairs * chunks) continue;
            const int64_t end = (lane + 1) * lane_rows < rows ? (lane + 1) * lane_rows : rows, first = lane * lane_rows + task / pairs * chunk_rows;
            return Task{first, first + chunk_rows < end ? first + chunk_rows : end, task % pairs};
        }
        return Task{0, 0, -1};
    };
    Task task = take(), next;
    for (; task.pair >= 0; task = next) {
        next = take();
        Fetch ahead;
        if (next.pair >= 0) {
            const char *at = o.panels + next.pair * 2 * o.stride;
            ahead = {at, at + (width(next.pair) - 1) * o.stride + o.groups * TILE_BYTES};
        }
        for (int64_t r = task.first; r < task.last; r += BLOCK_ROWS) {
            const int n = task.last - r < BLOCK_ROWS ? (int)(task.last - r) : BLOCK_ROWS, two = width(task.pair);
            const auto nearer = [&]() __attribute__((always_inline)) { fetch_pairs(ahead, lines); };
            const auto meanwhile = [&]() __attribute__((always_inline)) { some(each); };
            n > 16 ? tile_block<BYTES, true>(o, r, task.pair * 2, two, sums[now], nearer, meanwhile)
                   : tile_block<BYTES, false>(o, r, task.pair * 2, two, sums[now], nearer, meanwhile);
            some(BLOCK_ROWS);
            waits = {r, task.pair * 2, n, two, 0, sums[now]};
            now = 1 - now;
        }
    }
    some(BLOCK_ROWS);
}

FN void finish_act(const Op &op, const Part &part, const Pending &waits, int n) {
    finish<bf16>(op, part.row0 + waits.row + waits.done, n, waits.panel, waits.panels, (const float *)waits.sums + waits.done * LANES, BLOCK_ROWS * LANES);
}
static void linear_tiles_act(const Op &op, const Run &run, const Part &part) {
    const int64_t kp = op.n[1];
    const bf16 *rows = (const bf16 *)op.p[0] + part.row0 * kp;
    if ((op.flags & FLAG_FUSED) && part.rows <= FUSED_ROWS) {
        bf16 *normed = (bf16 *)run.scratch[part.thread];
        for (int r = 0; r < part.rows; r++)
            norm_row<bf16>((const float *)op.p[5] + (part.row0 + r) * kp, (const float *)op.p[6], op.f[0], op.n[5], kp, normed + r * kp);
        rows = normed;
    }
    linear_tiles<false>({(const char *)rows, kp * 2, (const char *)op.p[1], kp * LANES * 2, kp / KBLOCK}, op.n[2], run, part,
                        [&](const Pending &waits, int n) __attribute__((always_inline)) { finish_act(op, part, waits, n); });
}
#endif

template <class E> static void linear(const Op &op, const Run &run, const Part &part) {
    if (part.rows == 0) return;
#ifdef OCTAVO_AMX
    if (sizeof(E) == 2 && part.rows > TILE_ROWS_NONE) return linear_tiles_act(op, run, part);
#endif
    if (part.rows <= FUSED_ROWS) return linear_few<E>(op, run, part);
    linear_many<E>(op, run, part);
}
