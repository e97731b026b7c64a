// What the parts of the native library share. Plain C types only: this header is also compiled into the
// instruction-set files, where an inline std template could leak AVX code into the baseline (ODR).
//
// Legend: T tokens of the step, S sequences, R sampled rows, K inner size, N outputs, D head size, G KV heads.
// "p" behind a size means padded to a multiple of 32. "act" is bfloat16, or float32 in float32 mode.
// A panel holds 16 columns (outputs, tokens or dims): bf16 [Kp/2][16][2], f32 [Kp][16].
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "layouts.h"

namespace octavo {

constexpr int LANES = 16;           // columns of a panel; virtual lanes of every reduction
constexpr int KBLOCK = 32;          // products summed between two additions to the accumulator
constexpr int TOKENS = 16;          // tokens of a KV block
constexpr int PARTITION = 256;      // tokens of a softmax partition
constexpr int SCORES = PARTITION + LANES;  // floats from a row's scores of one to the next row's: rows 1 KiB apart share few sets of the first cache
constexpr int QROWS = 16;           // query rows of an attention tile
constexpr int QTILES = 2;           // tiles of an attention task, at most
constexpr int FUSED_ROWS = 8;       // up to so many rows, a linear op norms its own input in every thread
constexpr int SAMPLE_ROWS = 64;     // rows of a tile of the sample segment
constexpr int FEW_ROWS = 64;        // up to so many rows, a linear op with quantized weights on matrix units runs at memory speed; without, rows of a task
constexpr int EXPAND_ROWS = 64;     // rows whose bf16 input is widened to f32 at a time
constexpr int MAX_HEAD_DIM = 512;
constexpr uint32_t FLOAT_MODE = 0x1f80 | 0x8040;  // MXCSR while kernels run: all exceptions masked, to nearest even, FTZ, DAZ

enum OpCode : int32_t { OP_EMBED, OP_NORM, OP_LINEAR, OP_ROPE_TABLE, OP_ROPE_STORE, OP_ATTENTION, OP_TAKE_ROWS, OP_SAMPLE, OP_QUANTIZE, OP_COUNT };
enum Epilogue : int32_t { EPI_STORE, EPI_RESIDUAL, EPI_SILU_MUL };
enum RowKind : int32_t { ROWS_T, ROWS_R, ROWS_TILE };
enum KvType : int32_t { KV_BF16, KV_F32, KV_FP8, KV_INT8, KV_INT4, KV_COUNT };
constexpr int32_t FLAG_F32 = 1;    // act is float32
constexpr int32_t FLAG_FUSED = 2;  // norm, quantize: skip when rows <= FUSED_ROWS, the linear op behind it does it; linear: do it
constexpr int32_t FLAG_NORM = 4;   // quantize, and linear with quantized weights: the rows are normed first

// One recorded op. ops/native.py packs it as "<2i10Q12i4f"; what each field means stands at the kernel.
struct Op {
    int32_t code, flags;
    uint64_t p[10];
    int32_t n[12];
    float f[4];
};
static_assert(sizeof(Op) == 152, "ops/native.py packs this layout");

// The arrays of ops/table.py, in the order of STEP_FIELDS and SLOT_FIELDS.
struct Step {
    int32_t *header, *tokens, *positions, *kv_slots, *q_start, *seq_slot, *kv_len, *rows, *row_slot, *row_pos, *row_target, *row_top, *out_token;
    float *out_logprob;
    int32_t *out_rank, *top_ids;
    float *top_logprobs;
};
struct Slots {
    int32_t *block_table;
    float *temperature;
    int32_t *top_k;
    float *top_p, *min_p, *repetition, *presence, *frequency;
    uint64_t *seed, *mask, *bias, *seen_ids, *seen_counts;
    int32_t *num_seen;
};

// Attention work: `rows` packed query rows of a sequence, from row `row`, over partitions begin … end of what they see, or one piece of these.
// Or, shared: the rows of several sequences of one token each, whose blocks are the same there.
struct Tile {
    int32_t seq, row, rows, begin = 0, end = 0, piece = 0, pieces = 1;
    int32_t split = -1;   // which of Run::splits takes the results; -1: none, the tile is all of its rows' work
    int32_t shared = -1;  // the first of Run::members whose rows these are; -1: `seq`
};
struct Member {
    int32_t token, split;
};
// Rows whose work is cut into pieces. Their partitions' results lie at `at`, [KV head][partition][tiles of QROWS rows][partial_floats],
// and whoever finishes the last piece of a KV head combines them.
struct Split {
    float *at;
    int32_t seq, row, rows, partitions, pieces;
    int32_t *done;  // [KV heads] pieces that are finished; 0 again behind the op
};

struct Kernels;

// Everything that an op may read during one run; the same for all threads.
struct Run {
    const Kernels *k;
    Step step;
    Slots slots;
    int32_t T, S, R, threads;
    int32_t cap_t, cap_s, cap_r, vocab, num_blocks, table_stride, top_stride;
    char *kv;
    size_t block_bytes;
    const Tile *tiles;
    int32_t num_tiles;
    const Split *splits;
    const Member *members;
    const uint8_t *zero_tail;  // [T] this token is the last one of a block that the step began: clear V behind it
    char **scratch;            // [threads]
};

constexpr int64_t MAX_LANES = 16;

// Where one call of an op works: its thread, its rows, and counters (MAX_LANES, zero at start) to hand out tasks with.
struct Part {
    int32_t thread, row0, rows;
    int32_t *counter;
};

using OpFn = void (*)(const Op &, const Run &, const Part &);

struct Source {  // rows of a weight matrix as they come
    const void *data;
    int64_t rows, row_bytes;
    int32_t kind;  // 0: the bits of bfloat16, 1: float32, 2: blocks of GGUF's type with the layout's name
};

struct Kernels {
    const char *name;
    void (*enter)();  // at the start and the end of a thread's part of a run (matrix units)
    void (*leave)();
    OpFn op[OP_COUNT];
    // One panel, 16 rows of the matrix: rows[i] null is a row of zeros.
    void (*pack_panel)(void *dst, const void *const rows[16], const int32_t is_f32[16], int64_t k, int64_t kp, int32_t f32);
    // The same in another layout; kinds as in Source. Returns 0 if a number does not fit it.
    int (*pack_quant)(void *dst, int32_t layout, const void *const rows[16], const int32_t kinds[16], int64_t k, int64_t kp);
    // Parts of the sampler; n is a multiple of 16, the tail filled by the caller with -inf (or 0).
    float (*max)(const float *x, int64_t n);                           // NaN never wins; -inf if there is nothing else
    float (*sum_exp)(const float *x, int64_t n, float max);            // sum of exp(x - max), partitions of 4096
    int64_t (*count_above)(const float *x, int64_t n, float bound);    // how many x > bound
    int64_t (*first_equal)(const float *x, int64_t n, float value);    // lowest index, -1 if none
    void (*edit)(float *dst, const float *x, const uint32_t *mask, const float *bias, int64_t n);  // mask, bias (may be null), n = V
    void (*weights)(uint32_t *q, const float *x, int64_t n, float max, float temperature, float min_p);
    uint64_t (*sum)(const uint32_t *q, int64_t n);
    void (*exp_test)(float *dst, const float *x, int64_t n, bool rounded);  // exp, or softmax's (x ≤ 0), for tests
    int64_t (*probe_products)(int64_t rounds, float *sink);            // ceilings to measure against: kernels/probe.h
    int64_t (*probe_codes)(int64_t rounds, float *sink, int bits);
    uint64_t (*probe_read)(const char *data, int64_t bytes);
    uint64_t (*checksum)(const char *data, int64_t bytes);             // kernels/checksum.h
};

// arch/*.cpp; null where this build or this CPU has none.
const Kernels *kernels_generic();
const Kernels *kernels_avx2();
const Kernels *kernels_avx512();
const Kernels *kernels_avx512_vnni();
const Kernels *kernels_avx512_bf16();
bool pairs_pay();  // whether avx512_bf16 is faster here than avx512_vnni; to be asked only where it can run
const Kernels *kernels_amx();
const Kernels *kernels_amx_emulated();  // for tests; never chosen

void op_sample(const Op &, const Run &, const Part &);  // sampler.cpp
size_t sample_scratch(int64_t vocab);

// Floats of one partition's result for up to QROWS rows: the outputs, and for QROWS the largest scores and the masses.
constexpr int64_t partial_floats(int64_t dp, int64_t rows = QROWS) { return (rows < QROWS ? rows : QROWS) * dp + 2 * QROWS; }

inline int64_t pad(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

}  // namespace octavo
