"""rope_store and attention: a numpy restatement bit for bit, float64 within a bound, and row purity under any cut."""

from itertools import pairwise

import numpy as np
import pytest
from tests.ops.kv_support import PAIRS, e4m3, exact, restated
from tests.ops.native_support import BEST, ISAS, Rig, f32, provider, same_bits, tiny_spec

from octavo.models.spec import RopeSpec

HEADS = [(1, 1, 16), (2, 1, 8), (3, 1, 64), (6, 2, 24), (4, 1, 80), (7, 1, 32), (8, 2, 128)]  # H, G, D


class Sequence:
    """Tokens whose q, k, v are given; feeds them in chunks, returns the attention's output."""

    def __init__(self, rng, spec, length):
        self.qkv = rng.standard_normal((length, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)).astype(f32)
        self.length = length


def record_attention(rig, window=None, bias=None):
    """rope_store and attention of the last layer, from rig.qkv to rig.q and rig.out."""
    spec, layer = rig.spec, rig.spec.num_layers - 1
    rig.qkv = rig.ops.input("f32", "T", (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
    rig.bias = bias
    rig.q = rig.ops.rope_store(rig.qkv, layer, spec.rope, bias)
    rig.out = rig.ops.attention(rig.q, layer, window)
    rig.finish(rig.q, rig.out)
    return rig


def make_rig(p, spec, window, *, layers=1, dirty=True, kv=None, bias=None):
    spec.num_layers = layers
    rig = Rig(p, tokens=192, seqs=8, blocks=160, table=48, spec=spec, kv=kv)
    record_attention(rig, window, None if bias is None else p.vector([bias]))
    rig.slots["block_table"][:] = np.random.default_rng(7).permutation(160).reshape(8, 20)[:, np.arange(48) % 20]
    if dirty:  # what a former owner may have left
        wide = (kv or p.dtype) == "float32"
        rig.kv.blocks.view(np.uint32 if wide else np.uint16)[:] = 0x7FC00001 if wide else 0x7FC1
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


@pytest.mark.parametrize(("dtype", "kv"), PAIRS)
@pytest.mark.parametrize(("heads", "groups", "dim"), HEADS)
@pytest.mark.parametrize("window", [None, 21])
def test_attention_is_the_contract(heads, groups, dim, window, dtype, kv):
    spec = tiny_spec(heads, groups, dim)
    length = 45 if dim != 64 else 290
    sequence = Sequence(np.random.default_rng(dim), spec, length)
    sequence.qkv[3] = 0
    sequence.qkv[7] *= f32(1e-20)  # less than the types can tell from 0
    want_q, want = restated(spec, sequence.qkv, dtype, window, kv)
    near = exact(spec, sequence.qkv, dtype, window, kv)
    bound = 0.02 if dtype == "bfloat16" else 5e-4 if kv in ("int8", "int4") else 2e-5  # queries and probabilities of 16 bits
    assert np.abs(want - near).max() < bound
    for isa in ISAS:
        for threads in (1, 3) if isa != "generic" else (2,):
            rig = make_rig(provider(dtype, isa, threads), spec, window, layers=2, kv=kv)
            cut = [17, 1, 1, 26] if length == 45 else [100, 90, 1, 99]
            q, out = feed(rig, 0, sequence, cut)
            assert same_bits(q, want_q), (isa, threads)
            assert same_bits(out, want), (isa, threads)


@pytest.mark.parametrize(("dtype", "kv"), PAIRS)
@pytest.mark.parametrize(("heads", "groups", "dim"), [(3, 1, 64), (6, 2, 24)])
def test_keys_with_a_large_bias_in_slow_dims(heads, groups, dim, dtype, kv):
    """As in Qwen2: it is subtracted where it does not rotate away. Bit for bit the contract, and near attention over the keys as they are."""
    spec = tiny_spec(heads, groups, dim)
    slow = [i >= dim // 4 and i % 3 > 0 for i in range(dim // 2)]
    spec.rope = RopeSpec(tuple(x * 1e-3 if late else x for x, late in zip(spec.rope.inv_freq, slow, strict=True)))
    rng = np.random.default_rng(dim)
    sequence = Sequence(rng, spec, 70)
    bias = rng.standard_normal(sequence.qkv.shape[1]).astype(f32)
    keys = bias.reshape(-1, dim)[heads : heads + groups]
    keys[:, np.tile(slow, 2)] *= 100
    sequence.qkv += bias
    _, want = restated(spec, sequence.qkv, dtype, None, kv, bias)
    exactly = exact(spec, sequence.qkv, "float32", None, "float32")
    assert np.sqrt(((want - exactly) ** 2).mean()) < {"float32": 1e-5, "bfloat16": 0.06, "fp8_e4m3": 0.03, "int8": 0.006, "int4": 0.1}[kv]
    for isa in ISAS:
        rig = make_rig(provider(dtype, isa), spec, None, kv=kv, bias=bias)
        _, out = feed(rig, 0, sequence, [33, 37])
        assert same_bits(out, want), isa


@pytest.mark.parametrize(("dtype", "kv"), PAIRS)
@pytest.mark.parametrize("window", [None, 40, 300])
def test_any_cut_and_any_company_give_the_same_rows(window, dtype, kv):
    """One token at a time, in chunks, at once, and beside other sequences; over three softmax partitions."""
    spec = tiny_spec(3, 1, 32)
    rng = np.random.default_rng(11)
    main, other, third = Sequence(rng, spec, 530), Sequence(rng, spec, 190), Sequence(rng, spec, 60)
    want = None
    for isa in ISAS:
        rig = make_rig(provider(dtype, isa), spec, window, kv=kv)
        rig.slots["block_table"][:3] = np.arange(120)[np.random.default_rng(1).permutation(120)].reshape(3, 40)[:, np.arange(48) % 40]
        cuts = [[192, 192, 146], [15, 1, 16, 17, 191, 100, 190]] + ([[1] * 60 + [130, 150, 190]] if isa != "generic" else [])
        for cut in cuts:
            rig.kv.blocks[:] = 0xFF  # NaN in both types, and in scales
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


@pytest.mark.parametrize(("dtype", "kv"), PAIRS)
@pytest.mark.parametrize("window", [None, 300])
def test_long_contexts_split_over_threads(window, dtype, kv):
    """One thread walks all partitions; more share them. The same rows: alone, beside short sequences, step after step."""
    spec = tiny_spec(6, 2, 24)
    rng = np.random.default_rng(5)
    long, short = Sequence(rng, spec, 768), [Sequence(rng, spec, n) for n in (5, 120)]
    want = None
    for isa in (ISAS[0], BEST):
        for threads in (1, 2, 3, 16):
            rig = make_rig(provider(dtype, isa, threads), spec, window, layers=2, kv=kv)
            rig.slots["block_table"][0] = np.arange(48) + 100
            rig.slots["block_table"][1:3, :8] = np.arange(16).reshape(2, 8)
            out = []
            rig.kv.blocks[:] = 0xFF
            for start in range(0, 512, 128):
                step(rig, [(0, start, long.qkv[start : start + 128])])
            out += [o for _, o in step(rig, [(0, 512, long.qkv[512:514])])]
            parts = [(0, 514, long.qkv[514:530]), *((i + 1, 0, s.qkv) for i, s in enumerate(short))]  # with 2 and 3 threads: wide tiles, cut
            out += [o for _, o in step(rig, parts)]
            for start in range(530, 760, 115):
                out += [o for _, o in step(rig, [(0, start, long.qkv[start : start + 115])])]
            for at in range(760, 768):
                out += [o for _, o in step(rig, [(0, at, long.qkv[at : at + 1])])]
            want = want or out
            assert all(same_bits(a, b) for a, b in zip(out, want, strict=True)), (isa, threads)


@pytest.mark.parametrize(("dtype", "kv"), PAIRS)
@pytest.mark.parametrize(("heads", "groups", "dim"), [(6, 2, 24), (7, 1, 32), (16, 1, 16)])
def test_sequences_over_the_same_blocks_are_read_together(heads, groups, dim, dtype, kv):
    """Prefixes that fork like a tree, some too short to matter: what each row gives alone. Reads are saved, and as many as there can be."""
    spec = tiny_spec(heads, groups, dim)
    rng = np.random.default_rng(heads)
    # Slot: parts of its context. 0-4 have 512 tokens in common, of these 0-2 a third partition; 5, 6 the first partition of all; 7 nothing.
    parts = {0: "abcd", 1: "abce", 2: "abcf", 3: "abgh", 4: "abij", 5: "aklm", 6: "anop", 7: "qrs"}
    names = sorted(set("".join(parts.values())))
    blocks = dict(zip(names, rng.permutation(len(names) * 16).reshape(-1, 16), strict=True))
    data = {name: Sequence(rng, spec, 256).qkv for name in names}
    last = {slot: Sequence(rng, spec, 1).qkv for slot in parts}
    ends = {slot: 256 * len(text) - 250 + 37 * slot % 249 for slot, text in parts.items()}  # inside the last part
    ends[3] = 512  # nothing of its own but the token
    want = None
    for isa in (ISAS[0], *ISAS[2:]):
        for threads in (1, 2, 5) if isa == BEST else (2,):
            spec.num_layers = 2
            rig = record_attention(Rig(provider(dtype, isa, threads), tokens=256, seqs=8, blocks=len(names) * 16, table=64, spec=spec, kv=kv))
            rig.kv.blocks[:] = 0xFF
            for slot, text in parts.items():
                rig.slots["block_table"][slot, : 16 * len(text)] = np.concatenate([blocks[name] for name in text])
                for i, name in enumerate(text):
                    step(rig, [(slot, 256 * i, data[name])])
            alone = [step(rig, [(slot, ends[slot], last[slot])])[0][1] for slot in parts]
            assert rig.program._program.tokens_shared == 0
            want = want or alone
            order = rng.permutation(list(parts))
            for company in (order, order[:3], [7, 0, 6, 1], [3, 4]):
                got = step(rig, [(slot, ends[slot], last[slot]) for slot in company])
                assert all(same_bits(out, want[slot]) for slot, (_, out) in zip(company, got, strict=True)), (isa, threads, company)
            before = rig.program._program.tokens_shared
            step(rig, [(slot, ends[slot], last[slot]) for slot in order])
            fit = 32 // (heads // groups)  # sequences in one task
            saved = [sum(n - -(-n // fit) for n in level) for level in ([7], [5], [3])]
            assert rig.program._program.tokens_shared - before == 256 * sum(saved)
            chunk = Sequence(rng, spec, 20).qkv  # and beside a chunk of a prompt
            mixed = step(rig, [(0, ends[0], last[0]), (7, 100, chunk), (2, ends[2], last[2])])
            assert all(same_bits(mixed[i][1], want[slot]) for i, slot in ((0, 0), (2, 2)))


def tangled(rng, blocks, own, pages, rows):
    """Sequences over block tables that share what they share by accident: forks inside a partition, partitions met twice, in another order.

    → tables, and parts for ``step``: some decode at the ends of blocks and partitions, some bring more tokens or none, one slot is there twice.
    """
    seqs = len(own) - 1
    tables, parts = rng.choice(blocks, (seqs, pages)), []
    for s in range(seqs):
        for _ in range(rng.integers(3)):  # as a former one begins: whole partitions, or only blocks
            size = rng.integers(pages // 16 + 1) * 16 if rng.random() < 0.7 else rng.integers(pages)
            tables[s, :size] = tables[rng.integers(s + 1), :size]
        if rng.random() < 0.3:  # and a partition from anywhere
            at, to = rng.integers(pages // 16, size=2) * 16
            tables[s, to : to + 16] = tables[rng.integers(s + 1), at : at + 16]
        n = rng.choice([0, 1, 1, 1, 1, 1, 1, 1, rng.integers(2, 33)])
        last = rng.integers(pages * 16)
        start = rng.choice([last, last // 16 * 16, last // 256 * 256, last // 256 * 256 + 255])
        parts.append((s, min(int(start), pages * 16 - max(n, 1)), rows[s : s + n]))
    for s, start, new in parts:  # what the step writes is nobody else's
        first, last = start // 16, (start + max(len(new), 1) - 1) // 16
        tables[s, first : last + 1] = own[s, : last + 1 - first]
    slot, start, _ = parts[rng.integers(seqs)]
    if start >= 16:
        at = int(rng.integers(start // 16 * 16))
        tables[slot, at // 16] = own[-1, 0]
        parts.append((slot, at, rows[-1:]))
    return tables, parts


@pytest.mark.parametrize(("dtype", "kv"), [("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("float32", "float32")])
@pytest.mark.parametrize(("heads", "groups", "dim"), [(3, 1, 32), (10, 2, 16), (16, 1, 16), (17, 1, 16)])
def test_tangled_tables_give_the_same_rows(heads, groups, dim, dtype, kv):
    """Random tables and company: what each sequence gives alone, with any number of threads."""
    spec = tiny_spec(heads, groups, dim)
    rng = np.random.default_rng(heads)
    seqs, pages = 12, 80
    cells = rng.permutation(64 + 3 * (seqs + 1))
    blocks, own = cells[:64], cells[64:].reshape(-1, 3)
    data, rows = Sequence(rng, spec, 1024).qkv.reshape(4, 256, -1), Sequence(rng, spec, seqs + 32).qkv
    want = None
    for isa, threads, cases in ((BEST, 1, 15), (BEST, 2, 15), (BEST, 5, 15), (ISAS[0], 2, 3)):
        rig = record_attention(Rig(provider(dtype, isa, threads), tokens=256, seqs=seqs + 1, blocks=len(cells), table=pages, spec=spec, kv=kv))
        rig.kv.blocks[:] = 0
        for i, values in enumerate(data):
            rig.slots["block_table"][0, :16] = blocks[16 * i : 16 * i + 16]
            step(rig, [(0, 0, values)])
        draw, outs = np.random.default_rng(dim), []
        for _ in range(cases):
            rig.slots["block_table"][:seqs], parts = tangled(draw, blocks, own, pages, rows)
            together = [out for _, out in step(rig, parts)]
            alone = [step(rig, [part])[0][1] for part in parts if len(part[2])]
            assert all(same_bits(a, b) for a, b in zip([out for out in together if len(out)], alone, strict=True)), (isa, threads)
            some = draw.permutation(len(parts))[: draw.integers(2, len(parts))]
            fewer = step(rig, [parts[i] for i in some])
            assert all(same_bits(together[i], out) for i, (_, out) in zip(some, fewer, strict=True)), (isa, threads)
            outs.append(np.concatenate(together))
        want = want or outs
        assert all(same_bits(a, b) for a, b in zip(outs, want, strict=False)), (isa, threads)
        assert (rig.program._program.tokens_shared > 0) == (heads // groups <= 16)
        rig.step["header"][:3] = 0
        rig.program.forward()  # nobody


def test_results_of_partitions_that_find_no_room():
    """Of 64 MiB, 8 sequences over the same blocks find none. 6 do, whoever else is there; a long prompt's pieces then find too little."""
    spec = tiny_spec(128, 8, 512)  # 257 KiB a partition of one token
    rows = Sequence(np.random.default_rng(0), spec, 256).qkv
    rig = record_attention(Rig(provider("bfloat16", BEST, 16), tokens=256, seqs=11, blocks=16 + 11, table=36 * 16, spec=spec))
    tables = rig.slots["block_table"]
    tables[:] = np.arange(36 * 16) % 16
    step(rig, [(0, 0, rows)])
    tables[8], tables[9] = np.roll(tables[8], 1), np.roll(tables[9], 2)
    tables[:, -1] = 16 + np.arange(11)
    parts = [(s, 36 * 256 - 10, rows[s : s + (4 if s == 10 else 1)]) for s in range(11)]
    want = [step(rig, [part])[0][1] for part in parts]
    for company, shared in ((range(8), 0), ([8, *range(6), 10, 9], 3 * 35 * 256)):
        before = rig.program._program.tokens_shared
        got = step(rig, [parts[s] for s in company])
        assert all(same_bits(out, want[s]) for s, (_, out) in zip(company, got, strict=True))
        assert rig.program._program.tokens_shared - before == shared


@pytest.mark.parametrize(("dtype", "kv"), PAIRS)
def test_a_layer_writes_only_its_own_part(dtype, kv):
    spec = tiny_spec(2, 1, 16)
    rig = make_rig(provider(dtype, "generic"), spec, None, layers=3, dirty=False, kv=kv)
    feed(rig, 0, Sequence(np.random.default_rng(0), spec, 40), [40])
    blocks = rig.kv.blocks[rig.slots["block_table"][0, :3]]
    thirds = blocks.reshape(3, 3, -1)
    assert not thirds[:, :2].any() and thirds[:, 2].any(axis=-1).all()
    assert not rig.kv.blocks[rig.slots["block_table"][1]].any()


@pytest.mark.parametrize(("dtype", "kv"), PAIRS)
def test_what_is_no_number_reaches_exactly_the_rows_that_see_it(dtype, kv):
    """A NaN or an infinity in K or V breaks the rows that see its token: those from it on, while the window holds it.

    Not so V of the float types, which meets the probability 0 of the rows before it in the block.
    """
    floats = kv in ("bfloat16", "float32")
    spec = tiny_spec(2, 1, 16)
    sequence = Sequence(np.random.default_rng(2), spec, 70)
    clean = sequence.qkv.copy()
    written = {}
    for isa in ISAS:
        for column, bad in ((32, np.nan), (33, -np.inf), *(() if floats else ((48, np.inf), (63, np.nan)))):  # of K, of V
            sequence.qkv = clean.copy()
            rig = make_rig(provider(dtype, isa), spec, 20, kv=kv)
            _, want = feed(rig, 0, sequence, [70])
            sequence.qkv[30, column] = bad
            rig = make_rig(provider(dtype, isa), spec, 20, kv=kv)
            _, got = feed(rig, 0, sequence, [37, 33])
            broken = np.isnan(got).any(-1) | np.isinf(got).any(-1)
            rows = np.arange(70)
            sees = (rows >= 30) & (rows < 50)
            if column == 33 and floats:  # a score of -inf is one of weight 0
                assert not broken[~sees].any()
            else:
                assert (broken == sees).all(), (isa, column)
            assert same_bits(got[~sees], want[~sees])
            if not floats:  # what is in the cache, too: the same on all
                blocks = rig.kv.blocks[rig.slots["block_table"][0, :5]]
                assert np.array_equal(blocks, written.setdefault(column, blocks)), (isa, column)


@pytest.mark.parametrize("isa", ISAS)
def test_fp8_codes_are_those_of_ocp(isa):
    """Every value, every midpoint and its neighbours, subnormals, saturation: a row whose largest value is 448 has the scale 1."""
    codes = np.arange(127, dtype=np.uint8)
    values = np.where(codes < 8, codes * 2.0**-9, (8 + codes % 8) * 2.0 ** (codes // 8 - 10.0)).astype(f32)
    middles = (values[1:] + values[:-1]) / 2
    x = np.concatenate([values, middles, np.nextafter(middles, f32(0)), np.nextafter(middles, f32(500)), [1e-9, 2.0**-10, 2.0**-11, 0]]).astype(f32)
    x = np.concatenate([x, -x])
    assert (e4m3(values) == codes).all() and e4m3(f32(1e9)) == 126
    torch = pytest.importorskip("torch")
    assert np.array_equal(e4m3(x), torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy())
    rows = np.full((-(-len(x) // 31), 32), 448, f32)
    rows[:, :31] = np.pad(x, (0, 31 * len(rows) - len(x))).reshape(-1, 31)
    spec = tiny_spec(1, 1, 32)
    rig = make_rig(provider("float32", isa), spec, None, kv="fp8_e4m3")
    step(rig, [(0, 0, np.concatenate([rows * 0, rows * 0, rows], -1)[:160])])  # V is not turned
    blocks = rig.kv.blocks[rig.slots["block_table"][0, :10]]
    got = blocks[:, 512:1024].reshape(-1, 2, 16, 16).transpose(0, 2, 1, 3).reshape(-1, 32)[: len(rows)]  # [block, dims / 16, token, 16]
    assert np.array_equal(got, e4m3(rows))
    scales = blocks[:, 1024 + 32 :].copy().view(np.uint16).reshape(-1)[: len(rows)]
    assert (scales == 0x3F80).all()


def test_cosines_at_far_positions():
    """Angles up to a million: as exact as float32 can be given the float32 product."""
    spec = tiny_spec(1, 1, 64)
    p = provider("float32", "generic")
    rig = Rig(p, table=70_000, spec=spec)
    qkv = rig.ops.input("f32", "T", 192)
    rig.ops.rope_store(qkv, 0, spec.rope)
    table, _ = next(iter(rig.ops._ropes.values()))
    rig.finish(table)
    positions = np.array([0, 1, 2, 100, 4095, 8191, 131_071, 999_983], np.int32)
    rig.step["positions"][:8] = positions
    rig.run(8)
    angle = (positions.astype(f32)[:, None] * np.array(spec.rope.inv_freq, f32)).astype(float)
    got = rig.read(table, 8)
    assert np.abs(got[:, :32] - np.cos(angle)).max() < 6e-8 and np.abs(got[:, 32:] - np.sin(angle)).max() < 6e-8


@pytest.mark.parametrize(("dtype", "kv"), PAIRS)
@pytest.mark.parametrize("window", [1, 17, 40, 300])
def test_what_lies_behind_the_window_is_never_read(window, dtype, kv):
    """Blocks that no row of a step sees belong to somebody else, who leaves NaN or infinities there; or the table names another block."""
    spec = tiny_spec(6, 2, 24)
    sequence = Sequence(np.random.default_rng(3), spec, 530)
    spare = int(np.random.default_rng(2).permutation(160)[48])
    want = None

    def fill(blocks, half, single):
        rig.kv.blocks.view(np.uint32 if kv == "float32" else np.uint16)[blocks] = single if kv == "float32" else half

    for isa in ISAS:
        for threads in (1, 3) if isa == BEST else (2,):
            rig = make_rig(provider(dtype, isa, threads), spec, window, kv=kv)
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
