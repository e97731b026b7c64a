#include "program.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

namespace octavo {
namespace {

constexpr int64_t PIECES = 8;                // attention tasks per thread at which the work counts as even
constexpr size_t PARTIALS = size_t(64) << 20;  // most bytes of partial results: 4 million tokens of context at a head size of 64
constexpr int64_t READING = 4;               // reading K and V of a partition costs about as much as so many rows of arithmetic

size_t scratch_of(const std::vector<Op> &ops, int64_t vocab) {
    size_t most = 0;
    for (const Op &op : ops) {
        size_t bytes = 0;
        if (op.code == OP_LINEAR || op.code == OP_QUANTIZE) bytes = (size_t)op.n[1] * EXPAND_ROWS * 4;  // enough for FUSED_ROWS quantized rows, and for an expanded pair of panels
        if (op.code == OP_ATTENTION) bytes = (size_t)QTILES * QROWS * (op.n[5] * 14 + 128 + SCORES * 4 + 8) + PARTITION * 8 + op.n[5] * (PARTITION + 4);
        if (op.code == OP_SAMPLE) bytes = sample_scratch(vocab);
        most = bytes > most ? bytes : most;
    }
    return most;
}

bool known_layout(const Op &op) {
    const int32_t layout = op.code == OP_EMBED ? op.n[3] : op.code == OP_LINEAR || op.code == OP_QUANTIZE ? op.n[6] : 0;
    return layout >= 0 && layout < LAYOUT_COUNT;
}
int64_t now_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::string at(const char *what, int64_t index, int64_t value, int64_t limit) {
    return std::string(what) + "[" + std::to_string(index) + "] is " + std::to_string(value) + ", outside 0 … " + std::to_string(limit - 1);
}

std::string span(const char *what, const int32_t *values, int64_t n, int64_t limit) {
    for (int64_t i = 0; i < n; i++)
        if ((uint32_t)values[i] >= (uint64_t)limit) return at(what, i, values[i], limit);
    return "";
}

}  // namespace

Program::Program(Pool *pool, const Bounds &b, const uint64_t *step, const uint64_t *slots, std::vector<Op> forward, std::vector<Op> sample)
    : pool_(pool), bounds_(b), run_{}, segments_{std::move(forward), std::move(sample)} {
    static_assert(sizeof(Step) == 17 * 8 && sizeof(Slots) == 14 * 8);
    memcpy(&run_.step, step, sizeof run_.step);
    memcpy(&run_.slots, slots, sizeof run_.slots);
    for (const auto &ops : segments_)
        for (const Op &op : ops)
            if (op.code < 0 || op.code >= OP_COUNT || op.n[0] < ROWS_T || op.n[0] > ROWS_TILE || !known_layout(op))
                throw std::invalid_argument("a recorded op has an unknown code or layout");
    run_.k = pool->kernels();
    run_.threads = pool->threads();
    run_.cap_t = (int32_t)b.cap_t, run_.cap_s = (int32_t)b.cap_s, run_.cap_r = (int32_t)b.cap_r;
    run_.vocab = (int32_t)b.vocab, run_.num_blocks = (int32_t)b.num_blocks;
    run_.table_stride = (int32_t)b.table_stride, run_.top_stride = (int32_t)b.top_stride;
    run_.kv = (char *)b.kv, run_.block_bytes = (size_t)b.block_bytes;
    for (const Op &op : segments_[0])
        if (op.code == OP_ATTENTION) kv_heads_ = op.n[3] > kv_heads_ ? op.n[3] : kv_heads_, head_pad_ = op.n[5] > head_pad_ ? op.n[5] : head_pad_, windows_ |= op.n[7] > 0;
    // Tiles that are cut have more than a PIECES-th of a thread's share each, so they are few, and so are their pieces.
    const int64_t cuts = kv_heads_ && run_.threads > 1 ? PIECES * run_.threads : 0, partitions = b.table_stride * TOKENS / PARTITION + 1;
    pieces_done_.resize((size_t)((cuts + b.seqs) * kv_heads_));
    const int64_t most = cuts * partials_of(QTILES * QROWS, partitions) + b.seqs * partials_of(b.group, partitions);
    partials_bytes_ = (size_t)pad(most < (int64_t)PARTIALS ? most : (int64_t)PARTIALS, 4096);
    zero_tail_.resize((size_t)b.cap_t);
    const int64_t tiles = b.cap_r / SAMPLE_ROWS + 1;
    op_ns_.resize(segments_[0].size() + segments_[1].size());
    counters_.resize(segments_[0].size() + segments_[1].size() * (size_t)tiles);
    const size_t a = scratch_of(segments_[0], b.vocab), c = scratch_of(segments_[1], b.vocab);
    const size_t each = (size_t)pad((int64_t)(a > c ? a : c) + 64, 4096);
    scratch_bytes_ = each * (size_t)run_.threads;
    scratch_ = (char *)std::aligned_alloc(4096, scratch_bytes_ + partials_bytes_);
    if (!scratch_) throw std::bad_alloc();
    partials_ = scratch_ + scratch_bytes_, partials_end_ = partials_ + partials_bytes_;
    for (int t = 0; t < run_.threads; t++) scratch_of_.push_back(scratch_ + each * (size_t)t);
    run_.scratch = scratch_of_.data();
}

Program::~Program() { std::free(scratch_); }

// What would make a kernel read or write outside its buffers. The runner guarantees all of it; this keeps a mistake
// there from becoming a corrupted heap.
std::string Program::check_forward() const {
    const Step &s = run_.step;
    const Bounds &b = bounds_;
    const int64_t T = run_.T, S = run_.S, R = run_.R;
    if (T < 0 || T > b.cap_t || S < 0 || S > b.seqs || R < 0 || R > b.cap_r)
        return "header [T, S, R] is [" + std::to_string(T) + ", " + std::to_string(S) + ", " + std::to_string(R) + "], capacities are [" +
               std::to_string(b.cap_t) + ", " + std::to_string(b.seqs) + ", " + std::to_string(b.cap_r) + "]";
    std::string wrong;
    if (b.vocab && !(wrong = span("tokens", s.tokens, T, b.vocab)).empty()) return wrong;
    if (!(wrong = span("rows", s.rows, R, T)).empty()) return wrong;
    if (!b.group) return "";
    if (!(wrong = span("kv_slots", s.kv_slots, T, b.num_blocks * TOKENS)).empty()) return wrong;
    if (!(wrong = span("positions", s.positions, T, b.table_stride * TOKENS)).empty()) return wrong;
    if (!(wrong = span("seq_slot", s.seq_slot, S, b.cap_s)).empty()) return wrong;
    if (S > 0 && s.q_start[0] != 0) return at("q_start", 0, s.q_start[0], 1);
    if (S > 0 ? s.q_start[S] != T : T != 0) return "q_start[S] is not T: some tokens belong to no sequence";
    for (int64_t i = 0; i < S; i++) {
        if (s.q_start[i + 1] < s.q_start[i] || s.q_start[i + 1] > T) return at("q_start", i + 1, s.q_start[i + 1], T + 1);
        if (s.q_start[i + 1] == s.q_start[i]) continue;
        for (int32_t t = s.q_start[i] + 1; t < s.q_start[i + 1]; t++)  // of rows, the last one is taken to see the most
            if (s.positions[t] < s.positions[t - 1])
                return "positions[" + std::to_string(t) + "] is " + std::to_string(s.positions[t]) + ", before the token in front of it, at " +
                       std::to_string(s.positions[t - 1]);
        const int64_t blocks = s.positions[s.q_start[i + 1] - 1] / TOKENS + 1;
        if (!(wrong = span("block_table", run_.slots.block_table + s.seq_slot[i] * b.table_stride, blocks, b.num_blocks)).empty()) return wrong;
    }
    return "";
}

// What rows cost for a KV head, in rows of one partition.
static int64_t cost_of(int64_t rows, int64_t partitions) { return partitions * (rows + READING); }

int64_t Program::partials_of(int64_t rows, int64_t partitions) const {  // bytes
    return kv_heads_ * partitions * ((rows + QROWS - 1) / QROWS) * partial_floats(head_pad_, rows) * 4;
}

// A place for partial results; -1: there is no room left.
int32_t Program::add_split(int32_t seq, int32_t row, int64_t rows, int64_t partitions) {
    const int64_t bytes = partials_of(rows, partitions), split = (int64_t)splits_.size();
    if (bytes > partials_end_ - partials_free_ || (split + 1) * kv_heads_ > (int64_t)pieces_done_.size()) return -1;
    splits_.push_back({(float *)partials_free_, seq, row, (int32_t)rows, (int32_t)partitions, 0, pieces_done_.data() + split * kv_heads_});
    partials_free_ += bytes;
    return (int32_t)split;
}

// Rows as one piece, or, where they are much of the whole work, as several pieces that share their partitions.
void Program::add_tiles(Tile tile, int64_t target) {
    const int64_t partitions = tile.end - tile.begin, cost = cost_of(tile.rows, partitions);
    const int64_t pieces = cost > target ? (cost + target - 1) / target : 1;
    tile.pieces = (int32_t)(pieces < partitions ? pieces : partitions);
    if (tile.shared < 0) {
        if (tile.pieces > 1 && tile.split < 0) tile.split = add_split(tile.seq, tile.row, tile.rows, tile.end);
        if (tile.split < 0) tile.pieces = 1;
        else splits_[(size_t)tile.split].pieces += tile.pieces;
    } else {
        for (int64_t i = 0; i < tile.rows / bounds_.group; i++) splits_[(size_t)members_[(size_t)(tile.shared + i)].split].pieces += tile.pieces;
    }
    for (; tile.piece < tile.pieces; tile.piece++) tiles_.push_back(tile);
}

// Which sequences that decode have whole partitions of blocks in common: sorted by their blocks, they stand side by side. Nothing of it
// depends on what the blocks mean, or changes a result.
void Program::find_shared() {
    const Step &s = run_.step;
    shared_.clear(), order_.clear(), alike_.clear();
    begin_.assign((size_t)run_.S, 0);
    if (windows_ || !bounds_.group || bounds_.group > QROWS) return;
    constexpr int64_t BLOCKS = PARTITION / TOKENS;
    const auto table = [&](int32_t seq) { return run_.slots.block_table + s.seq_slot[seq] * bounds_.table_stride; };
    const auto whole = [&](int32_t seq) { return s.positions[s.q_start[seq]] / PARTITION; };  // partitions in front of the last one
    for (int32_t i = 0; i < run_.S; i++)
        if (s.q_start[i + 1] - s.q_start[i] == 1 && whole(i) > 0) order_.push_back(i);
    if (order_.size() < 2) return;
    std::sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
        const int order = memcmp(table(a), table(b), (size_t)(std::min(whole(a), whole(b)) * BLOCKS) * 4);
        return order ? order < 0 : whole(a) < whole(b);
    });
    for (size_t k = 0; k + 1 < order_.size(); k++) {
        const int32_t a = order_[k], b = order_[k + 1], most = std::min(whole(a), whole(b));
        int32_t alike = 0;
        while (alike < most && !memcmp(table(a) + alike * BLOCKS, table(b) + alike * BLOCKS, BLOCKS * 4)) alike++;
        alike_.push_back(alike);
    }
    share(0, order_.size(), 0);
    int64_t bytes = 0;
    for (const int32_t i : order_)
        if (begin_[(size_t)i] > 0) bytes += partials_of(bounds_.group, whole(i) + 1);
    if (bytes > partials_end_ - partials_free_) shared_.clear(), begin_.assign((size_t)run_.S, 0);  // no room: each reads for itself
}

// Of order_[from … to), which have `begin` partitions in common: the further ones that all have, then what parts of them have.
void Program::share(size_t from, size_t to, int32_t begin) {
    if (to - from < 2) return;
    const int32_t end = *std::min_element(alike_.begin() + (std::ptrdiff_t)from, alike_.begin() + (std::ptrdiff_t)to - 1);
    if (end > begin) {
        shared_.push_back({from, to, begin, end});
        for (size_t k = from; k < to; k++) begin_[(size_t)order_[k]] = end;
    }
    for (size_t k = from, start = from; k < to; k++)
        if (k + 1 == to || alike_[k] == end) share(start, k + 1, end), start = k + 1;
}

// Cuts the attention work into tiles, and marks the tokens behind which a fresh block's V must be cleared.
void Program::plan_attention() {
    const Step &s = run_.step;
    tiles_.clear(), splits_.clear(), members_.clear();
    partials_free_ = partials_;
    memset(zero_tail_.data(), 0, (size_t)run_.T);
    find_shared();
    // Wide ones read less, where there are enough of them to be shared out evenly.
    const bool wide = run_.T * bounds_.group * kv_heads_ >= QTILES * QROWS * PIECES * run_.threads;
    const int64_t most = wide ? QTILES * QROWS : QROWS;
    // Each tile's rows, and the end of the partitions that they see; the target is of all KV heads, so their number cancels.
    const auto own = [&](auto &&visit) {
        for (int32_t i = 0; i < run_.S && bounds_.group; i++) {
            const int32_t first = s.q_start[i];
            const int64_t total = (s.q_start[i + 1] - first) * bounds_.group;
            for (int64_t row = 0; row < total; row += most) {
                const int64_t rows = total - row < most ? total - row : most;
                visit(i, (int32_t)row, rows, (int64_t)s.positions[first + (row + rows - 1) / bounds_.group] / PARTITION + 1);
            }
        }
    };
    // The same of those that are shared: as many sequences as fit a task.
    const auto together = [&](auto &&visit) {
        const size_t fit = bounds_.group ? (size_t)(QTILES * QROWS / bounds_.group) : 1;
        for (const Shared &part : shared_)
            for (size_t k = part.from; k < part.to; k += fit) visit(part, k, part.to - k < fit ? part.to - k : fit);
    };
    int64_t target = INT64_MAX;
    if (run_.threads > 1) {
        int64_t cost = 0;
        own([&](int32_t seq, int32_t, int64_t rows, int64_t end) { cost += cost_of(rows, end - begin_[(size_t)seq]); });
        together([&](const Shared &part, size_t, size_t n) { cost += cost_of((int64_t)n * bounds_.group, part.end - part.begin); });
        target = cost * kv_heads_ / (PIECES * run_.threads) + 1;
    }
    split_of_.assign((size_t)run_.S, -1);
    for (int32_t i = 0; i < run_.S; i++)
        if (begin_[(size_t)i] > 0) split_of_[(size_t)i] = add_split(i, 0, bounds_.group, s.positions[s.q_start[i]] / PARTITION + 1);
    own([&](int32_t seq, int32_t row, int64_t rows, int64_t end) {
        add_tiles({.seq = seq, .row = row, .rows = (int32_t)rows, .begin = begin_[(size_t)seq], .end = (int32_t)end, .split = split_of_[(size_t)seq]}, target);
    });
    together([&](const Shared &part, size_t k, size_t n) {
        const int32_t first = (int32_t)members_.size();
        tokens_shared_ += (int64_t)(n - 1) * (part.end - part.begin) * PARTITION;
        for (size_t i = k; i < k + n; i++) members_.push_back({s.q_start[order_[i]], split_of_[(size_t)order_[i]]});
        add_tiles({.seq = order_[k], .row = 0, .rows = (int32_t)((int64_t)n * bounds_.group), .begin = part.begin, .end = part.end, .shared = first}, target);
    });
    for (int32_t i = 0; i < run_.S && bounds_.group; i++) {
        const int32_t first = s.q_start[i], end = s.q_start[i + 1];
        if (end > first && end - 1 - s.kv_slots[end - 1] % TOKENS >= first) zero_tail_[(size_t)end - 1] = 1;
    }
    run_.tiles = tiles_.data(), run_.num_tiles = (int32_t)tiles_.size(), run_.splits = splits_.data(), run_.members = members_.data();
    run_.zero_tail = zero_tail_.data();
}

std::string Program::check_sample() const {
    const Step &s = run_.step;
    std::string wrong;
    if (run_.R < 0 || run_.R > bounds_.cap_r) return at("header", 2, run_.R, bounds_.cap_r + 1);
    if (!(wrong = span("row_slot", s.row_slot, run_.R, bounds_.cap_s)).empty()) return wrong;
    for (int64_t i = 0; i < run_.R; i++)
        if (s.row_target[i] >= bounds_.vocab) return at("row_target", i, s.row_target[i], bounds_.vocab);
    return "";
}

std::string Program::run(int segments) {
    const int64_t began = now_ns();
    const int32_t *header = run_.step.header;
    run_.T = header[0], run_.S = header[1], run_.R = header[2];
    running_ = segments;
    std::string wrong;
    if ((segments & FORWARD) && !(wrong = check_forward()).empty()) return wrong;
    if ((segments & SAMPLE) && !(wrong = check_sample()).empty()) return wrong;
    if (segments & FORWARD) plan_attention();
    memset(counters_.data(), 0, counters_.size() * sizeof(Counter));
    marked_ns_ = began;
    pool_->run(job, this);
    busy_ns_ += now_ns() - began;
    return "";
}

std::vector<int64_t> Program::profile(bool on) {
    std::vector<int64_t> found(segments_[0].size() + segments_[1].size());
    found.swap(op_ns_);
    profiling_ = on;
    return found;
}

// After the barrier behind an op: what has passed since the last one is its time, waiting included.
void Program::mark(int thread, size_t op) {
    if (!profiling_ || thread != 0) return;
    const int64_t now = now_ns();
    op_ns_[op] += now - marked_ns_;
    marked_ns_ = now;
}

void Program::job(void *self, int thread) {
    Program *p = (Program *)self;
    p->run_.k->enter();
    if (p->running_ & FORWARD) p->forward(thread);
    if (p->running_ & SAMPLE) p->sample(thread);
    p->run_.k->leave();
}

void Program::forward(int thread) {
    Barrier &barrier = pool_->barrier();
    const std::vector<Op> &ops = segments_[0];
    for (size_t i = 0; i < ops.size(); i++) {
        const Op &op = ops[i];
        const int32_t n = rows(op);
        if (n == 0) continue;
        if (op.code != OP_LINEAR && (op.flags & FLAG_FUSED) && n <= FUSED_ROWS) continue;
        run_.k->op[op.code](op, run_, {thread, 0, n, counters_[i].value});
        barrier.wait();
        mark(thread, i);
    }
}

// Head and sampler, a tile of rows at a time: the logits of one tile are all that is ever held.
void Program::sample(int thread) {
    Barrier &barrier = pool_->barrier();
    size_t counter = segments_[0].size();
    for (int32_t row0 = 0; row0 < run_.R; row0 += SAMPLE_ROWS) {
        const int32_t n = run_.R - row0 < SAMPLE_ROWS ? run_.R - row0 : SAMPLE_ROWS;
        for (size_t i = 0; i < segments_[1].size(); i++) {
            Op op = segments_[1][i];
            if (op.code == OP_LINEAR) {
                op.p[0] += (uint64_t)row0 * (uint64_t)op.n[1] * (op.flags & FLAG_F32 ? 4 : 2);
                if (op.n[6]) op.p[7] += (uint64_t)row0 * (uint64_t)act_row_bytes(LAYOUTS[op.n[6]], op.n[1]);
            }
            // The logits' buffer holds one tile, so the head's rows count from its start; the sampler's are the step's.
            run_.k->op[op.code](op, run_, {thread, op.code == OP_LINEAR ? 0 : row0, n, counters_[counter++].value});
            barrier.wait();
            mark(thread, segments_[0].size() + i);
        }
    }
}

}  // namespace octavo
