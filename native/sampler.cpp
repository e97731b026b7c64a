// The sampler: one row of logits to one token. Baseline code; the passes over whole rows are the variant's.
//
// Order: mask, bias, penalties, temperature, min_p, top_k, top_p, then the inverse of the cumulative distribution in id
// order at one uniform. Weights are whole numbers (kernels/sampling.h), so the mass of a set of ids has no order of
// summation. An id whose weight rounds to 0 takes no part. Nothing is sorted but the alternatives that are reported.
#include <algorithm>
#include <cstring>

#include "octavo.h"

namespace octavo {
namespace {

constexpr float INF = __builtin_inff();
constexpr int BUCKETS = 2048;

// Scratch of a thread, for a vocabulary padded to vp.
struct Scratch {
    float *logits;    // after mask, bias, penalties
    uint32_t *mass;   // [vp]
    uint32_t *key;    // of the ids that take part: rises with the logit
    int32_t *id;
    uint32_t *pick;   // indices, while a threshold is searched
    uint64_t *bucket; // [BUCKETS]
};

Scratch lay_out(char *at, int64_t vp) {
    Scratch s;
    s.logits = (float *)at, at += vp * 4;
    s.mass = (uint32_t *)at, at += vp * 4;
    s.key = (uint32_t *)at, at += vp * 4;
    s.id = (int32_t *)at, at += vp * 4;
    s.pick = (uint32_t *)at, at += vp * 4;
    s.bucket = (uint64_t *)at;
    return s;
}

uint32_t order_key(float x) {  // unsigned order of keys = order of numbers; NaN lowest, -0 as +0
    if (x != x) return 0;
    x = x == 0 ? 0.0f : x;
    uint32_t u;
    memcpy(&u, &x, 4);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// Natural logarithm of x ≥ 1 (a sum that holds exp(0)): m·2^e, and the series of artanh in double.
double log_of(double x) {
    if (!(x < 1e300)) return x;  // infinity, NaN
    uint64_t u;
    memcpy(&u, &x, 8);
    int64_t e = (int64_t)(u >> 52) - 1023;
    u = (u & 0xfffffffffffffull) | 0x3ff0000000000000ull;
    double m;
    memcpy(&m, &u, 8);
    if (m > 1.4142135623730951) m *= 0.5, e += 1;
    const double f = (m - 1.0) / (m + 1.0), z = f * f;
    double s = 0;
    for (int i = 25; i >= 1; i -= 2) s = s * z + 1.0 / i;
    return (double)e * 0.6931471805599453 + 2.0 * f * s;
}

// Philox4x32-10, first word. Source: Salmon et al. 2011. Key: the seed; counter: the position.
uint32_t philox(uint64_t seed, uint32_t position) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32), c[4] = {position, 0, 0, 0};
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
        const uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k0, (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k1, (uint32_t)a};
        memcpy(c, next, sizeof c);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c[0];
}

// Of n entries in id order, keeps the largest by (key, then lowest id) until their weights (1 each if mass is null)
// reach `need`. Returns how many remain, moved to the front in id order. Three rounds of 11, 11 and 10 bits find the
// key at which the need is met; entries with that key are kept in id order.
int64_t keep_largest(uint32_t *key, int32_t *id, uint32_t *mass, int64_t n, bool by_mass, uint64_t need, const Scratch &s) {
    uint64_t above = 0;  // weight of the keys known to be above the threshold
    uint32_t threshold = 0;
    int64_t candidates = n;
    for (int64_t i = 0; i < n; i++) s.pick[i] = (uint32_t)i;
    for (int round = 0; round < 3; round++) {
        const int shift = round == 0 ? 21 : round == 1 ? 10 : 0;
        const uint32_t bits = round == 2 ? 1023 : 2047;
        memset(s.bucket, 0, BUCKETS * 8);
        for (int64_t c = 0; c < candidates; c++) s.bucket[(key[s.pick[c]] >> shift) & bits] += by_mass ? mass[s.pick[c]] : 1;
        int64_t b = bits;
        while (b > 0 && above + s.bucket[b] < need) above += s.bucket[b--];
        threshold |= (uint32_t)b << shift;
        int64_t kept = 0;
        for (int64_t c = 0; c < candidates; c++)
            if (((key[s.pick[c]] >> shift) & bits) == (uint32_t)b) s.pick[kept++] = s.pick[c];
        candidates = kept;
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) {
        if (key[i] < threshold) continue;
        if (key[i] == threshold) {
            if (above >= need) continue;
            above += by_mass ? mass[i] : 1;
        }
        key[kept] = key[i], id[kept] = id[i], mass[kept++] = mass[i];
    }
    return kept;
}

int32_t first_allowed(const uint32_t *mask, int64_t vocab) {
    for (int64_t i = 0; mask && i < vocab; i++)
        if ((mask[i / 32] >> (i % 32)) & 1) return (int32_t)i;
    return 0;
}

void penalize(float *logits, const Slots &slots, int64_t slot, int64_t vocab) {
    const int32_t *ids = (const int32_t *)slots.seen_ids[slot], *counts = (const int32_t *)slots.seen_counts[slot];
    const float repetition = slots.repetition[slot], presence = slots.presence[slot], frequency = slots.frequency[slot];
    for (int32_t i = 0; ids && counts && i < slots.num_seen[slot]; i++) {
        if ((uint32_t)ids[i] >= (uint64_t)vocab) continue;
        float l = logits[ids[i]];
        l = l > 0 ? l / repetition : l * repetition;
        l = l - frequency * (float)counts[i];
        if (counts[i] > 0) l = l - presence;
        logits[ids[i]] = l;
    }
}

int32_t draw(const Run &run, const float *logits, int64_t vocab, int64_t vp, float max, int64_t slot, uint32_t position, const Scratch &s) {
    const Kernels &k = *run.k;
    const Slots &p = run.slots;
    k.weights(s.mass, logits, vp, max, p.temperature[slot], p.min_p[slot]);
    const uint64_t uniform = philox(p.seed[slot], position) >> 8;
    const int64_t top_k = p.top_k[slot];
    const bool filter = (top_k > 0 && top_k < vocab) || p.top_p[slot] < 1.0f;
    uint64_t run_sum = 0;
    if (!filter) {
        const uint64_t at = (uint64_t)(((unsigned __int128)uniform * k.sum(s.mass, vp)) >> 24);
        for (int64_t i = 0; i < vocab; i++)
            if ((run_sum += s.mass[i]) > at) return (int32_t)i;
        return 0;
    }
    int64_t n = 0;
    for (int64_t i = 0; i < vocab; i++)
        if (s.mass[i]) s.key[n] = order_key(logits[i]), s.id[n] = (int32_t)i, s.mass[n++] = s.mass[i];
    if (top_k > 0 && top_k < n) n = keep_largest(s.key, s.id, s.mass, n, false, (uint64_t)top_k, s);
    uint64_t total = 0;
    for (int64_t i = 0; i < n; i++) total += s.mass[i];
    if (p.top_p[slot] < 1.0f) {
        const double share = (double)p.top_p[slot] * (double)total;
        uint64_t need = (uint64_t)share;
        if ((double)need < share || need == 0) need++;
        n = keep_largest(s.key, s.id, s.mass, n, true, need, s);
        total = 0;
        for (int64_t i = 0; i < n; i++) total += s.mass[i];
    }
    const uint64_t at = (uint64_t)(((unsigned __int128)uniform * total) >> 24);
    for (int64_t i = 0; i < n; i++)
        if ((run_sum += s.mass[i]) > at) return s.id[i];
    return 0;
}

// raw_max is finite, so no NaN comes up here: edits make infinities at most.
int32_t choose(const Run &run, const float *raw, float raw_max, int64_t vp, int64_t row, const Scratch &s) {
    const int64_t slot = run.step.row_slot[row], vocab = run.vocab;
    const Slots &p = run.slots;
    const uint32_t *mask = (const uint32_t *)p.mask[slot];
    const float *bias = (const float *)p.bias[slot];
    const float *logits = raw;
    float max = raw_max;
    if (mask || bias || p.num_seen[slot] > 0) {
        run.k->edit(s.logits, raw, mask, bias, vocab);
        for (int64_t i = vocab; i < vp; i++) s.logits[i] = -INF;
        penalize(s.logits, p, slot, vocab);
        logits = s.logits;
        max = run.k->max(logits, vp);
    }
    if (max == -INF) return first_allowed(mask, vocab);  // penalties beyond all numbers
    if (p.temperature[slot] == 0.0f || max == INF) return (int32_t)run.k->first_equal(logits, vp, max);
    return draw(run, logits, vocab, vp, max, slot, (uint32_t)run.step.row_pos[row], s);
}

void report(const Run &run, const float *raw, float max, int64_t vp, int64_t row, int32_t token, const Scratch &s) {
    const Kernels &k = *run.k;
    const double log_sum = log_of((double)k.sum_exp(raw, vp, max));
    run.step.out_logprob[row] = (float)(((double)raw[token] - (double)max) - log_sum);
    run.step.out_rank[row] = (int32_t)(1 + k.count_above(raw, vp, raw[token]));
    int64_t want = run.step.row_top[row];
    want = want < run.top_stride ? want : run.top_stride;
    want = want < run.vocab ? want : run.vocab;
    if (want <= 0) return;
    for (int64_t i = 0; i < run.vocab; i++) s.key[i] = order_key(raw[i]), s.id[i] = (int32_t)i;
    const int64_t n = keep_largest(s.key, s.id, s.mass, run.vocab, false, (uint64_t)want, s);
    const uint32_t *key = s.key;
    const int32_t *id = s.id;
    for (int64_t i = 0; i < n; i++) s.pick[i] = (uint32_t)i;
    std::sort(s.pick, s.pick + n, [key, id](uint32_t a, uint32_t b) { return key[a] != key[b] ? key[a] > key[b] : id[a] < id[b]; });
    for (int64_t i = 0; i < n; i++) {
        const int32_t at = id[s.pick[i]];
        run.step.top_ids[row * run.top_stride + i] = at;
        run.step.top_logprobs[row * run.top_stride + i] = (float)(((double)raw[at] - (double)max) - log_sum);
    }
}

}  // namespace

size_t sample_scratch(int64_t vocab) { return (size_t)(pad(vocab, 32) * 4 * 5 + BUCKETS * 8); }

// sample. p: logits [SAMPLE_ROWS][ld]. n: rows kind, ld. Columns from V to ld become -inf.
void op_sample(const Op &op, const Run &run, const Part &part) {
    const int64_t ld = op.n[1], vp = pad(run.vocab, LANES);
    const Scratch s = lay_out(run.scratch[part.thread], pad(run.vocab, 32));
    for (int32_t task; (task = __atomic_fetch_add(part.counter, 1, __ATOMIC_RELAXED)) < part.rows;) {
        float *raw = (float *)op.p[0] + task * ld;
        const int64_t row = part.row0 + task;
        for (int64_t i = run.vocab; i < vp; i++) raw[i] = -INF;
        const float max = run.k->max(raw, vp);
        if (!(max > -INF && max < INF)) {  // NaN, too: the model has broken down
            run.step.out_token[row] = -1;
            continue;
        }
        const int32_t target = run.step.row_target[row];
        const int32_t token = target >= 0 ? target : choose(run, raw, max, vp, row, s);
        run.step.out_token[row] = token;
        if (target >= 0 || run.step.row_top[row] >= 0) report(run, raw, max, vp, row, token, s);
    }
}

}  // namespace octavo
