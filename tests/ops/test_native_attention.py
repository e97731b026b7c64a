"""rope_store and attention: a numpy restatement bit for bit, float64 within a bound, and row purity under any cut."""

from itertools import pairwise

import numpy as np
import pytest
from tests.ops.native_support import DTYPES, ISAS, Rig, act, contract_exp, contract_product, f32, provider, same_bits, tiny_spec

HEADS = [(1, 1, 16), (2, 1, 8), (3, 1, 64), (6, 2, 24), (4, 1, 80), (7, 1, 32), (8, 2, 128)]  # H, G, D


class Sequence:
    """Tokens whose q, k, v are given; feeds them in chunks, returns the attention's output."""

    def __init__(self, rng, spec, length):
        self.qkv = rng.standard_normal((length, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)).astype(f32)
        self.length = length


def make_rig(p, spec, window, *, layers=1, dirty=True):
    spec.num_layers = layers
    rig = Rig(p, tokens=192, seqs=8, blocks=160, table=48, spec=spec)
    rig.qkv = rig.ops.input("f32", "T", (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
    rig.q = rig.ops.rope_store(rig.qkv, layers - 1, spec.rope)
    rig.out = rig.ops.attention(rig.q, layers - 1, window)
    rig.finish(rig.q, rig.out)
    rig.slots["block_table"][:] = np.random.default_rng(7).permutation(160).reshape(8, 20)[:, np.arange(48) % 20]
    if dirty:  # what a former owner may have left
        rig.kv.blocks.view(np.uint16 if p.dtype == "bfloat16" else np.uint32)[:] = 0x7FC1 if p.dtype == "bfloat16" else 0x7FC00001
    return rig


def step(rig, parts):
    """parts: (slot, start, qkv rows). Runs one step; returns the q and out rows of each part."""
    t = 0
    for s, (slot, start, rows) in enumerate(parts):
        at = np.arange(start, start + len(rows))
        rig.step["positions"][t : t + len(rows)] = at
        rig.step["kv_slots"][t : t + len(rows)] = rig.slots["block_table"][slot, at // 16] * 16 + at % 16
        rig.step["seq_slot"][s], rig.step["kv_len"][s] = slot, start + len(rows)
        rig.step["q_start"][s : s + 2] = t, t + len(rows)
        t += len(rows)
    rig.fill(rig.qkv, np.concatenate([rows for _, _, rows in parts]))
    rig.run(t, len(parts))
    q, out = rig.read(rig.q, t), rig.read(rig.out, t)
    bounds = rig.step["q_start"][: len(parts) + 1]
    return [(q[a:b], out[a:b]) for a, b in pairwise(bounds)]


def feed(rig, slot, sequence, chunks):
    done, q, out = 0, [], []
    for size in chunks:
        ((a, b),) = step(rig, [(slot, done, sequence.qkv[done : done + size])])
        q.append(a)
        out.append(b)
        done += size
    assert done == sequence.length
    return np.concatenate(q), np.concatenate(out)


def rotated(spec, qkv, dtype):
    """q [T, H, D], k and v [T, G, D], as the cache has them."""
    h, g, d = spec.num_heads, spec.num_kv_heads, spec.head_dim
    x = qkv.reshape(len(qkv), h + 2 * g, d)
    angle = np.arange(len(qkv), dtype=f32)[:, None] * np.array(spec.rope.inv_freq, f32)
    cos, sin = (fn(angle.astype(float)).astype(f32)[:, None] for fn in (np.cos, np.sin))
    low, high = x[..., : d // 2], x[..., d // 2 :]
    turned = np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)
    return act(turned[:, :h], dtype), act(turned[:, h : h + g], dtype), act(x[:, h + g :], dtype)


def restated(spec, qkv, dtype, window):
    """The contract, row by row. float32."""
    q, k, v = rotated(spec, qkv, dtype)
    out = np.zeros((len(qkv), spec.num_heads, spec.head_dim), f32)
    scale = f32(1) / np.sqrt(f32(spec.head_dim))
    per = spec.num_heads // spec.num_kv_heads
    padded = -(-spec.head_dim // 32) * 32
    for h in range(spec.num_heads):
        scores = contract_product(np.pad(q[:, h], ((0, 0), (0, padded - spec.head_dim))), k[:, h // per]) * scale
        for t in range(len(qkv)):
            low = max(0, t - window + 1) if window else 0
            top = mass = total = None
            for base in range(low // 256 * 256, t + 1, 256):
                end = min(base + 256, -(-(t + 1) // 16) * 16)
                at = np.arange(base, end)
                seen = (at >= low) & (at <= t)
                s = np.full(len(at), -np.inf, f32)
                s[seen] = scores[t, at[seen]]
                high = s.max()
                p = act(np.where(seen, contract_exp(s - high), f32(0)), dtype)
                lanes = np.zeros(16, f32)
                for row in p.reshape(-1, 16):
                    lanes = lanes + row
                here = lanes[0]
                for lane in lanes[1:]:
                    here = here + lane
                values = np.zeros((len(at), spec.head_dim), f32)
                values[: len(v[base:end])] = v[base:end, h // per]
                values[~seen] = 0
                part = contract_product(p[None], np.ascontiguousarray(values.T), 16)[0]
                if top is None:
                    top, mass, total = high, here, part
                    continue
                both = max(top, high)
                a, b = contract_exp(np.array([top - both, high - both], f32))
                total = total * a + part * b
                mass = mass * a + here * b
                top = both
            out[t, h] = total / mass
    return q.reshape(len(qkv), -1), act(out, dtype).reshape(len(qkv), -1)


def exact(spec, qkv, dtype, window):
    q, k, v = (x.astype(float) for x in rotated(spec, qkv, dtype))
    k, v = (np.repeat(x, spec.num_heads // spec.num_kv_heads, 1) for x in (k, v))
    s = np.einsum("thd,uhd->htu", q, k) / np.sqrt(spec.head_dim)
    t, u = np.arange(len(qkv))[:, None], np.arange(len(qkv))
    s = np.where((u <= t) & (u > t - (window or 1 << 30)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("htu,uhd->thd", p / p.sum(-1, keepdims=True), v).reshape(len(qkv), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads,groups,dim", HEADS)
@pytest.mark.parametrize("window", [None, 21])
def test_attention_is_the_contract(heads, groups, dim, window, dtype):
    spec = tiny_spec(heads, groups, dim)
    length = 45 if dim != 64 else 290
    sequence = Sequence(np.random.default_rng(dim), spec, length)
    want_q, want = restated(spec, sequence.qkv, dtype, window)
    near = exact(spec, sequence.qkv, dtype, window)
    assert np.abs(want - near).max() < (0.02 if dtype == "bfloat16" else 2e-5)
    for isa in ISAS:
        for threads in (1, 3) if isa != "generic" else (2,):
            rig = make_rig(provider(dtype, isa, threads), spec, window, layers=2)
            cut = [17, 1, 1, 26] if length == 45 else [100, 90, 1, 99]
            q, out = feed(rig, 0, sequence, cut)
            assert same_bits(q, want_q), (isa, threads)
            assert same_bits(out, want), (isa, threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 40, 300])
def test_any_cut_and_any_company_give_the_same_rows(window, dtype):
    """One token at a time, in chunks, at once, and beside other sequences; over three softmax partitions."""
    spec = tiny_spec(3, 1, 32)
    rng = np.random.default_rng(11)
    main, other, third = Sequence(rng, spec, 530), Sequence(rng, spec, 190), Sequence(rng, spec, 60)
    want = None
    for isa in ISAS:
        p = provider(dtype, isa)
        rig = make_rig(p, spec, window)
        rig.slots["block_table"][:3] = np.arange(120)[np.random.default_rng(1).permutation(120)].reshape(3, 40)[:, np.arange(48) % 40]
        cuts = [[192, 192, 146], [15, 1, 16, 17, 191, 100, 190]] + ([[1] * 60 + [130, 150, 190]] if isa != "generic" else [])
        for cut in cuts:
            rig.kv.blocks[:] = 0xFF  # NaN in both types
            _, out = feed(rig, 0, main, cut)
            want = out if want is None else want
            assert same_bits(out, want), (isa, cut[:3])
        rig.kv.blocks[:] = 0xFF
        done = [0, 0, 0]
        got = []
        while done[0] < main.length:
            parts = [(slot, done[slot], s.qkv[done[slot] : done[slot] + n]) for slot, s, n in ((2, third, 7), (0, main, 61), (1, other, 90))]
            parts = [part for part in parts if len(part[2])]
            results = step(rig, parts)
            for (slot, _, rows), (_, out) in zip(parts, results):
                done[slot] += len(rows)
                if slot == 0:
                    got.append(out)
        assert same_bits(np.concatenate(got), want), isa


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 300])
def test_long_contexts_split_over_threads(window, dtype):
    """One thread walks all partitions; more share them. The same rows: alone, beside short sequences, step after step."""
    spec = tiny_spec(6, 2, 24)
    rng = np.random.default_rng(5)
    long, short = Sequence(rng, spec, 768), [Sequence(rng, spec, n) for n in (5, 30)]
    want = None
    for isa in (ISAS[0], ISAS[-1]):
        for threads in (1, 2, 3, 16):
            rig = make_rig(provider(dtype, isa, threads), spec, window, layers=2)
            rig.slots["block_table"][0] = np.arange(48) + 100
            rig.slots["block_table"][1:3, :2] = [[1, 2], [3, 4]]
            out = []
            rig.kv.blocks[:] = 0xFF
            for start in range(0, 512, 128):
                step(rig, [(0, start, long.qkv[start : start + 128])])
            out += [o for _, o in step(rig, [(0, 512, long.qkv[512:514])])]
            parts = [(0, 514, long.qkv[514:520]), *((i + 1, 0, s.qkv) for i, s in enumerate(short))]
            out += [o for _, o in step(rig, parts)]
            for start in range(520, 760, 120):
                out += [o for _, o in step(rig, [(0, start, long.qkv[start : start + 120])])]
            for at in range(760, 768):
                out += [o for _, o in step(rig, [(0, at, long.qkv[at : at + 1])])]
            want = want or out
            assert all(same_bits(a, b) for a, b in zip(out, want, strict=True)), (isa, threads)


def test_a_layer_writes_only_its_own_part():
    spec = tiny_spec(2, 1, 16)
    p = provider("bfloat16", "generic")
    rig = make_rig(p, spec, None, layers=3, dirty=False)
    feed(rig, 0, Sequence(np.random.default_rng(0), spec, 40), [40])
    blocks = rig.kv.blocks[rig.slots["block_table"][0, :3]]
    thirds = blocks.reshape(3, 3, -1)
    assert not thirds[:, :2].any() and thirds[:, 2].any(axis=-1).all()
    assert not rig.kv.blocks[rig.slots["block_table"][1]].any()


def test_cosines_at_far_positions():
    """Angles up to a million: as exact as float32 can be given the float32 product."""
    spec = tiny_spec(1, 1, 64)
    p = provider("float32", "generic")
    rig = Rig(p, table=70_000, spec=spec)
    qkv = rig.ops.input("f32", "T", 192)
    rig.ops.rope_store(qkv, 0, spec.rope)
    table = next(iter(rig.ops._ropes.values()))
    rig.finish(table)
    positions = np.array([0, 1, 2, 100, 4095, 8191, 131_071, 999_983], np.int32)
    rig.step["positions"][:8] = positions
    rig.run(8)
    angle = (positions.astype(f32)[:, None] * np.array(spec.rope.inv_freq, f32)).astype(float)
    got = rig.read(table, 8)
    assert np.abs(got[:, :32] - np.cos(angle)).max() < 6e-8 and np.abs(got[:, 32:] - np.sin(angle)).max() < 6e-8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 16, 17, 40, 300])
def test_what_lies_behind_the_window_is_never_read(window, dtype):
    """Blocks that no row of a step sees belong to somebody else, who leaves NaN or infinities there; or the table names another block."""
    spec = tiny_spec(6, 2, 24)
    sequence = Sequence(np.random.default_rng(3), spec, 530)
    spare = int(np.random.default_rng(2).permutation(160)[48])
    want = None

    def fill(blocks, half, single):
        rig.kv.blocks.view(np.uint16 if dtype == "bfloat16" else np.uint32)[blocks] = half if dtype == "bfloat16" else single

    for isa in ISAS:
        for threads in (1, 3):
            rig = make_rig(provider(dtype, isa, threads), spec, window)
            rig.slots["block_table"][0] = np.random.default_rng(2).permutation(160)[:48]
            _, alone = feed(rig, 0, sequence, [192, 192, 146])
            want = alone if want is None else want
            assert same_bits(alone, want)
            for what, cut in (("NaN", [192, 192, 146]), ("infinity", [100, 190, 1, 1, 15, 192, 31]), ("another block", [192, 61, 190, 1, 86])):
                rig.slots["block_table"][0] = np.random.default_rng(2).permutation(160)[:48]
                done, out = 0, []
                for size in cut:
                    gone = max(0, done - window + 1) // 16
                    if what == "another block":
                        rig.slots["block_table"][0, :gone] = spare
                        rig.kv.blocks[spare] = 0xFF
                    else:
                        fill(rig.slots["block_table"][0, :gone], *((0x7FC1, 0x7FC00001) if what == "NaN" else (0x7F80, 0x7F800000)))
                    ((_, rows),) = step(rig, [(0, done, sequence.qkv[done : done + size])])
                    out.append(rows)
                    done += size
                assert same_bits(np.concatenate(out), want), (isa, threads, what)
