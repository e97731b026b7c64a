"""The native sampler against its rules restated in numpy: exact tokens, distribution, odd logits, alternatives."""

import math

import numpy as np
import pytest
from tests.ops.native_support import BEST, ISAS, Rig, contract_exp, f32, provider

V = 1003


class Sampler:
    """A head over one input column: every row has the same logits, every row its own slot."""

    def __init__(self, logits, isa="generic", rows=80, alternatives=12, threads=2):
        p = provider("float32", isa, threads)
        self.rig = Rig(p, tokens=rows, seqs=rows, alternatives=alternatives)
        x = self.rig.ops.input("act", "R", 1)
        self.rig.ops.head(x, p.linear([np.asarray(logits, f32).reshape(-1, 1)]))
        self.rig.finish()
        self.rig.fill(x, np.ones((rows, 1), f32))
        self.rig.step["row_slot"][:] = np.arange(rows)
        self.keep = []
        self.s, self.step = self.rig.slots, self.rig.step

    def hold(self, array):
        self.keep.append(array)
        return array.ctypes.data

    def run(self, rows):
        self.rig.step["header"][:3] = 0, 0, rows
        self.rig.program.sample()
        return self.step["out_token"][:rows].tolist()


def philox(seed, position):
    k, c = [seed & 0xFFFFFFFF, seed >> 32], [position, 0, 0, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0]


def restated(logits, temperature, top_k, top_p, min_p, seed, position):
    """Sorting, plain and slow."""
    x = np.where(np.isnan(logits), f32(-np.inf), logits).astype(f32)
    with np.errstate(all="ignore"):
        p = contract_exp((x - x.max()) / f32(temperature))
    q = [int(v) if keep else 0 for v, keep in zip((p * f32(2**30) + f32(0.5)).astype(np.int64), p >= f32(min_p))]
    order = [i for i in sorted(range(len(x)), key=lambda i: (-x[i], i)) if q[i]]
    if 0 < top_k < len(order):
        order = order[:top_k]
    if top_p < 1:
        need = max(1, math.ceil(float(f32(top_p)) * sum(q[i] for i in order)))
        before, kept = 0, []
        for i in order:
            if before >= need:
                break
            kept.append(i)
            before += q[i]
        order = kept
    at = (philox(seed, position) >> 8) * sum(q[i] for i in order) >> 24
    total = 0
    for i in sorted(order):
        total += q[i]
        if total > at:
            return i
    raise AssertionError("nothing chosen")


def test_philox_is_philox():
    """Known answers of Random123 for the zero key and counter."""
    assert philox(0, 0) == 0x6627E8D5


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", ["plain", "ties", "flat", "peaked", "steps"])
def test_the_rules_restated(shape, isa):
    rng = np.random.default_rng(1)
    logits = {
        "plain": rng.normal(0, 3, V), "ties": rng.integers(-3, 3, V), "flat": np.zeros(V), "peaked": np.r_[np.full(V - 1, -30.0), 5],
        "steps": np.floor(rng.normal(0, 2, V) * 4) / 4,
    }[shape].astype(f32)  # fmt: skip
    sampler = Sampler(logits, isa, rows=80)
    settings = [(t, k, p, m) for t in (0.3, 1.0, 2.5) for k in (0, 1, 5, 900) for p in (1.0, 0.9, 0.35, 1e-6) for m in (0.0, 0.05)][:80]
    for i, (t, k, p, m) in enumerate(settings):
        sampler.s["temperature"][i], sampler.s["top_k"][i], sampler.s["top_p"][i], sampler.s["min_p"][i] = t, k, p, m
        sampler.s["seed"][i] = 2**63 + 12345 * i
    for position in (0, 7, 131_072):
        sampler.step["row_pos"][:] = position
        got = sampler.run(len(settings))
        want = [restated(logits, t, k, p, m, 2**63 + 12345 * i, position) for i, (t, k, p, m) in enumerate(settings)]
        assert got == want, [(s, a, b) for s, a, b in zip(settings, got, want) if a != b][:3]


def test_the_distribution():
    """Chi-square over 20,000 draws, temperature and top-k in force."""
    logits = np.random.default_rng(2).normal(0, 1, V).astype(f32)
    sampler = Sampler(logits, BEST, rows=500)
    sampler.s["temperature"][:], sampler.s["top_k"][:], sampler.s["seed"][:] = 0.8, 12, 99
    counts = np.zeros(V)
    for draw in range(40):
        sampler.step["row_pos"][:] = np.arange(500) + 500 * draw
        np.add.at(counts, sampler.run(500), 1)
    best = np.argsort(-logits, kind="stable")[:12]
    p = np.exp(logits[best].astype(float) / 0.8)
    want = 20_000 * p / p.sum()
    assert counts.sum() == counts[best].sum() == 20_000
    assert ((counts[best] - want) ** 2 / want).sum() < 31.3  # 11 degrees of freedom, 0.1 %


@pytest.mark.parametrize("isa", ISAS)
def test_greedy_with_masks_bias_and_penalties(isa):
    rng = np.random.default_rng(3)
    logits = rng.integers(-5, 6, V).astype(f32)  # ties everywhere
    rows = 70
    sampler = Sampler(logits, isa, rows=rows)
    want = []
    for i in range(rows):
        x = logits.copy()
        if i % 2:
            words = rng.integers(0, 2**32, -(-V // 32), dtype=np.uint32)
            sampler.s["mask"][i] = sampler.hold(words)
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:V].astype(bool)
            x[~allowed] = -np.inf
        if i % 3 == 0:
            bias = rng.integers(-2, 3, V).astype(f32)
            sampler.s["bias"][i] = sampler.hold(bias)
            x = x + bias
        if i % 5 == 0:
            ids = rng.permutation(V)[:300].astype(np.int32)
            counts = rng.integers(0, 4, 300).astype(np.int32)
            rep, presence, frequency = (f32(v) for v in (rng.uniform(0.5, 2), rng.uniform(-2, 2), rng.uniform(-2, 2)))
            sampler.s["seen_ids"][i], sampler.s["seen_counts"][i], sampler.s["num_seen"][i] = sampler.hold(ids), sampler.hold(counts), 300
            sampler.s["repetition"][i], sampler.s["presence"][i], sampler.s["frequency"][i] = rep, presence, frequency
            seen = x[ids]
            seen = np.where(seen > 0, seen / rep, seen * rep)
            seen = seen - frequency * counts.astype(f32)
            x[ids] = np.where(counts > 0, seen - presence, seen)
        want.append(int(np.argmax(x)))
    assert sampler.run(rows) == want


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-30, 1e30])
def test_odd_logits(temperature, isa):
    """A NaN, or an infinite maximum, breaks the row (-1); where a mask or a penalty leaves nothing, the lowest allowed id."""
    nan, inf = f32(np.nan), f32(np.inf)
    mask = np.zeros(-(-V // 32), np.uint32)
    mask[3] = 1 << 5  # only id 101
    cases = {
        "all nan": (np.full(V, nan), None, -1), "all nan, masked": (np.full(V, nan), mask, -1),
        "one number": (np.r_[np.full(V - 1, nan), 1], None, -1), "the last is nan": (np.r_[np.arange(V - 1), nan], None, -1),
        "the first is nan": (np.r_[nan, np.arange(V - 1)], None, -1), "a nan that is masked": (np.r_[nan, np.arange(V - 1)], mask, -1),
        "infinity": (np.r_[np.arange(500), inf, np.arange(V - 501)], None, -1), "minus infinity": (np.full(V, -inf), None, -1),
        "a maximum": (np.r_[np.full(V - 1, -inf), 1], None, V - 1), "only -inf allowed": (np.r_[np.full(V - 1, -inf), 1], mask, 101),
        "one allowed": (np.arange(V), mask, 101), "nothing allowed": (np.arange(V), np.zeros_like(mask), 0),
        "huge": (np.r_[np.full(V - 1, -3e38), 3e38], None, V - 1),
    }  # fmt: skip
    for name, (logits, words, want) in cases.items():
        sampler = Sampler(logits.astype(f32), isa, rows=3)
        sampler.s["temperature"][:], sampler.s["seed"][:], sampler.s["top_k"][1], sampler.s["top_p"][2] = temperature, 5, 50, 0.9
        sampler.step["row_top"][:] = 3
        if words is not None:
            sampler.s["mask"][:] = sampler.hold(words)
        assert sampler.run(3) == [want] * 3, name
        if want < 0:
            sampler.step["row_target"][:] = 7
            assert sampler.run(3) == [-1] * 3, name


@pytest.mark.parametrize("isa", ISAS)
def test_a_broken_row_leaves_its_neighbours_alone(isa):
    """Rows over two inputs: in the second, the weights overflow."""
    rows = 9
    p = provider("float32", isa, 2)
    rig = Rig(p, tokens=rows, seqs=rows, alternatives=4)
    x = rig.ops.input("act", "R", 2)
    logits = np.random.default_rng(6).normal(0, 3, V).astype(f32)
    rig.ops.head(x, p.linear([np.stack([logits, np.where(np.arange(V) % 2, f32(3e38), f32(-3e38))], 1)]))
    rig.finish()
    given = np.tile(np.array([1, 0], f32), (rows, 1))
    given[4, 1] = 10
    rig.fill(x, given)
    rig.step["row_slot"][:], rig.step["row_top"][:], rig.step["out_logprob"][:] = np.arange(rows), 2, 123
    rig.step["header"][:3] = 0, 0, rows
    rig.program.sample()
    assert rig.step["out_token"][:rows].tolist() == [-1 if row == 4 else int(np.argmax(logits)) for row in range(rows)]
    assert (rig.step["out_logprob"][:rows] == 123).tolist() == [row == 4 for row in range(rows)]


@pytest.mark.parametrize("isa", ISAS)
def test_logprobs_ranks_alternatives_and_targets(isa):
    rng = np.random.default_rng(4)
    logits = (np.floor(rng.normal(0, 4, V) * 8) / 8).astype(f32)
    logits[[3, 700]] = logits.max() + 1  # a tie at the top
    sampler = Sampler(logits, isa, rows=70, alternatives=V)
    exact = logits.astype(float) - (logits.max() + np.log(np.exp(logits.astype(float) - logits.max()).sum()))
    order = np.argsort(-logits, kind="stable")
    tops = [0, 1, 2, 5, 12, 13, 64, 1000, V]
    for i, top in enumerate(tops):
        sampler.step["row_top"][i] = top
    sampler.step["row_target"][9:20], sampler.step["row_top"][9:20] = np.arange(11) * 90, -1
    sampler.step["out_logprob"][:] = 123
    mask = np.full(-(-V // 32), 0xFFFFFFFF, np.uint32)
    mask[0] ^= 1 << 3
    sampler.s["mask"][:9] = sampler.hold(mask)  # bans 3: the logprob is still of the raw distribution
    tokens = sampler.run(70)
    assert tokens[:9] == [700] * 9 and tokens[9:20] == [i * 90 for i in range(11)] and tokens[20:] == [3] * 50
    assert np.abs(sampler.step["out_logprob"][:20] - exact[tokens[:20]]).max() < 3e-6
    assert (sampler.step["out_logprob"][20:70] == 123).all()
    assert sampler.step["out_rank"][:20].tolist() == [1 + int((logits > logits[t]).sum()) for t in tokens[:20]]
    for i, top in enumerate(tops):
        assert sampler.step["top_ids"][i, :top].tolist() == order[:top].tolist()
        assert np.abs(sampler.step["top_logprobs"][i, :top] - exact[order[:top]]).max(initial=0) < 3e-6


def test_variants_and_threads_report_the_same_bits():
    logits = np.random.default_rng(5).normal(0, 5, V).astype(f32)
    seen = set()
    for isa in ISAS:
        for threads in (1, 3):
            sampler = Sampler(logits, isa, rows=66, threads=threads)
            sampler.step["row_top"][:] = 12
            sampler.s["temperature"][:], sampler.s["seed"][:] = 1, np.arange(66)
            sampler.run(66)
            seen.add(tuple(sampler.step[k].tobytes() for k in ("out_token", "out_logprob", "out_rank", "top_ids", "top_logprobs")))
    assert len(seen) == 1
