// A recorded model: two lists of ops (segments) and what they are bound to. Replayed by one call per step, or per segment.
#pragma once
#include <string>
#include <vector>

#include "pool.h"

namespace octavo {

// Sizes a program is bound to; ops/native.py packs it as "<12q".
struct Bounds {
    int64_t cap_t, cap_s, cap_r;         // tokens of a step, slots, rows that are sampled
    int64_t vocab, num_blocks, block_bytes, table_stride, top_stride;
    int64_t group;                       // query heads of a KV head (0: no attention): rows of a token in a tile
    int64_t scratch;                     // bytes of scratch that the ops need in a thread, besides the sampler's
    int64_t kv;                          // address of the blocks
    int64_t seqs;                        // sequences of a step, at most as many as slots
};
static_assert(sizeof(Bounds) == 96, "ops/native.py packs this layout");

class Program {
public:
    enum Segment { FORWARD = 1, SAMPLE = 2 };
    Program(Pool *pool, const Bounds &bounds, const uint64_t *step, const uint64_t *slots, std::vector<Op> forward, std::vector<Op> sample);
    ~Program();
    // Replays segments (FORWARD | SAMPLE). Returns an empty string, or what is wrong with the step's numbers; then nothing ran.
    std::string run(int segments);
    // Scratch of all threads, and room for partial results; pages count when they are touched.
    size_t scratch_bytes() const { return scratch_bytes_ + partials_bytes_; }
    int64_t busy_ns() const { return busy_ns_; }  // spent in run() so far
    int64_t tokens_shared() const { return tokens_shared_; }  // of all runs so far: tokens of context that one sequence read with others, the first not counted
    // Measures each op from now on, or no longer. Returns the nanoseconds of every op (forward's, then sample's) since the last call.
    std::vector<int64_t> profile(bool on);

private:
    std::string check_forward() const;
    std::string check_sample() const;
    void plan_attention();
    void find_shared();
    void share(size_t from, size_t to, int32_t begin);
    int64_t partials_of(int64_t rows, int64_t partitions) const;
    int32_t add_split(int32_t seq, int32_t row, int64_t rows, int64_t partitions);
    void add_tiles(Tile tile, int64_t target);
    static void job(void *self, int thread);
    void forward(int thread);
    void sample(int thread);
    void mark(int thread, size_t op);
    int32_t rows(const Op &op) const { return op.n[0] == ROWS_T ? run_.T : run_.R; }

    Pool *pool_;
    Bounds bounds_;
    Run run_;
    std::vector<Op> segments_[2];
    int running_ = 0;  // segments of the run
    int64_t busy_ns_ = 0, marked_ns_ = 0, tokens_shared_ = 0;
    bool profiling_ = false;
    std::vector<int64_t> op_ns_;
    int64_t kv_heads_ = 0, head_pad_ = 0;  // of the attention ops
    bool windows_ = false;                 // some layer has one
    std::vector<Tile> tiles_;
    std::vector<Split> splits_;
    std::vector<int32_t> pieces_done_;  // zeros between two runs
    std::vector<Member> members_;
    // Sequences that read the same blocks. `order_`: those that decode, by their blocks; `alike_`: partitions that one has in common with
    // the next; `begin_`: partitions of each sequence that others read with it.
    struct Shared {
        size_t from, to;  // of order_
        int32_t begin, end;
    };
    std::vector<Shared> shared_;
    std::vector<int32_t> order_, alike_, begin_, split_of_;
    char *partials_ = nullptr;  // results of partitions of tiles that are cut over threads
    char *partials_free_ = nullptr, *partials_end_ = nullptr;
    std::vector<uint8_t> zero_tail_;
    size_t scratch_bytes_ = 0, partials_bytes_ = 0;
    char *scratch_ = nullptr;
    std::vector<char *> scratch_of_;
    struct alignas(64) Counter {
        int32_t value[MAX_LANES];
    };
    std::vector<Counter> counters_;
};

// dispatch.cpp
const Kernels *find_kernels(const char *name);  // null: this CPU or this build has no such variant
const Kernels *best_kernels();
std::string available_variants();  // comma separated, from the plainest on
void ask_for_matrix_units();  // once, before threads start

}  // namespace octavo
