// The kernels of one instruction set, gathered in a table. Included by the arch files inside their own namespace.
#pragma once

static void embed_any(const Op &op, const Run &run, const Part &part) {
    if (op.n[3]) return embed_quant(op, run, part, run.threads);
    op.flags &FLAG_F32 ? embed<float>(op, run, part, run.threads) : embed<bf16>(op, run, part, run.threads);
}
static void norm_any(const Op &op, const Run &run, const Part &part) {
    if ((op.flags & FLAG_FUSED) && part.rows <= FUSED_ROWS) return;
    op.flags &FLAG_F32 ? norm<float>(op, run, part, run.threads) : norm<bf16>(op, run, part, run.threads);
}
static void linear_any(const Op &op, const Run &run, const Part &part) {
    if (op.n[6])
        op.flags &FLAG_F32 ? linear_quant<float>(op, run, part) : linear_quant<bf16>(op, run, part);
    else
        op.flags &FLAG_F32 ? linear<float>(op, run, part) : linear<bf16>(op, run, part);
}
static void quantize_any(const Op &op, const Run &run, const Part &part) {
    op.flags &FLAG_F32 ? quantize<float>(op, run, part) : quantize<bf16>(op, run, part);
}
// The KV type stands in the op; float32 act takes any, bfloat16 act any but float32 (op[…] is never called with that).
template <class E, class Call> FN void with_kv_type(int32_t type, Call &&f) {
    if (type == KV_FP8) return f(Fp8());
    if (type == KV_INT8) return f(Int8());
    if (type == KV_INT4) return f(Int4());
    if constexpr (sizeof(E) == 4) if (type == KV_F32) return f(float());
    f(bf16());
}
static void rope_store_any(const Op &op, const Run &run, const Part &part) {
    if (op.flags & FLAG_F32)
        with_kv_type<float>(op.n[8], [&](auto s) { rope_store<float, decltype(s)>(op, run, part); });
    else
        with_kv_type<bf16>(op.n[8], [&](auto s) { rope_store<bf16, decltype(s)>(op, run, part); });
}
static void attention_any(const Op &op, const Run &run, const Part &part) {
    if (op.flags & FLAG_F32)
        with_kv_type<float>(op.n[8], [&](auto s) { attention<float, decltype(s)>(op, run, part); });
    else
        with_kv_type<bf16>(op.n[8], [&](auto s) { attention<bf16, decltype(s)>(op, run, part); });
}

#ifdef OCTAVO_AMX
static void enter() { configure(false); }
static void leave() { tile_release(); }
#else
static void enter() {}
static void leave() {}
#endif

static constexpr Kernels make(const char *name) {
    return {name,
            enter,
            leave,
            {embed_any, norm_any, linear_any, rope_table, rope_store_any, attention_any, take_rows, op_sample, quantize_any},
            pack_panel,
            pack_quant,
            row_max,
            row_sum_exp,
            row_count_above,
            row_first_equal,
            row_edit,
            row_weights,
            row_sum,
            exp_test,
            probe_products,
            probe_codes,
            probe_read,
            checksum};
}
