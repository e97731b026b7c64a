"""Linear layers with quantized weights: the contract restated in numpy (quant_support.py), bit for bit, on every variant."""

import numpy as np
import pytest
import torch
from tests.ops.native_support import BEST, ISAS, Rig, act, contract_exp, contract_sum16, f32, provider, same_bits, to_bf16_bits
from tests.ops.quant_support import QUANTIZED, STORED, contract_quant, grid_of, int8_grid, quantize_rows, random_stored, stored_grid

from octavo.errors import CheckpointError, UnsupportedError
from octavo.ops import torch_quant

ROWS = list(range(1, 34))
FEW = [1, 2, 3, 4, 8, 9, 33, 66]


def linear_rig(p, parts, k, *, bias=None, residual=None, gate=False, tokens=96):
    rig = Rig(p, tokens=tokens)
    matrix = p.linear(parts, interleave=gate)
    x = rig.ops.input("act", "T", k)
    res = None if residual is None else rig.ops.input("f32", "T", residual)
    out = rig.ops.linear(x, matrix, bias=None if bias is None else p.vector(bias), act="silu_mul" if gate else None, residual=res)
    rig.finish(out)
    return rig, x, res, out


def activations(rng, rows, k, dtype):
    """Rows of very different sizes, with a group of zeros and one below the smallest scale."""
    x = rng.standard_normal((rows, k)) * 10.0 ** rng.uniform(-3, 3, (rows, 1))
    x[rows // 2, :32] = 0
    x[rows // 3, : min(k, 128)] = 2.0**-62
    return act(x.astype(f32), dtype)


# K: a short last group of 32, of 64 and of 128, padding, one step, several; N: odd panels
@pytest.mark.parametrize("k,n", [(8, 24), (64, 33), (160, 40), (576, 64), (130, 16), (264, 50)])
@pytest.mark.parametrize("quantization", QUANTIZED)
def test_quantized_here_is_the_contract(quantization, k, n):
    rng = np.random.default_rng(k * n)
    w = rng.standard_normal((n, k)).astype(f32) * np.exp(rng.standard_normal((n, 1))).astype(f32)
    w[3], w[5, : k // 2] = 0, f32(0.25)
    grid = grid_of(quantization, w)
    exact_error = np.abs(grid.numbers().astype(float) - w).max(axis=1) / np.maximum(np.abs(w).max(axis=1), 1e-30)
    assert exact_error.max() < (0.03 if quantization == "int8" else 0.2)
    for dtype in ("bfloat16", "float32"):
        x = activations(rng, 66, k, dtype)
        want = contract_quant(x, grid)
        for isa in ISAS:
            for threads in (1, 3):
                rig, xin, _, out = linear_rig(provider(dtype, isa, threads, quantization), [w], k)
                for rows in [*ROWS, 66] if (threads, dtype) == (3, "bfloat16") else FEW:
                    rig.fill(xin, x[:rows])
                    rig.run(rows)
                    assert same_bits(rig.read(out, rows), want[:rows]), (isa, threads, dtype, rows)


@pytest.mark.parametrize("kind", STORED)
def test_stored_is_the_contract(kind):
    rng = np.random.default_rng(7)
    k, n = (512 if "K" in kind else 608), 40
    stored = random_stored(kind, n, k, rng)
    grid = stored_grid(stored)
    assert same_bits(grid.numbers(), stored.numbers()), "the oracle's grid is not the stored one"
    x = activations(rng, 66, k, "bfloat16")
    want = contract_quant(x, grid)
    a, scales = quantize_rows(x, 32)
    exact = (a * scales.astype(float)) @ stored.numbers().astype(float).T
    bound = (np.abs(a) * scales.astype(float)) @ np.abs(stored.numbers()).astype(float).T
    assert (np.abs(want - exact) <= 2.0**-24 * (3 * k / grid.step + 4) * (bound + 1e-30) * 40).all()
    for isa in ISAS:
        for threads in (1, 3):
            p = provider("bfloat16", isa, threads, "gguf")
            rig, xin, _, out = linear_rig(p, [stored], k)
            for rows in [*ROWS, 66] if threads == 3 else FEW:
                rig.fill(xin, x[:rows])
                rig.run(rows)
                assert same_bits(rig.read(out, rows), want[:rows]), (isa, threads, rows)


@pytest.mark.parametrize("kind", [*QUANTIZED, *STORED])
def test_an_embedding_of_few_bits_is_its_numbers(kind):
    rng = np.random.default_rng(3)
    k, n = 256, 37
    if kind in QUANTIZED:
        part = rng.standard_normal((n, k)).astype(f32)
        want = int8_grid(part).numbers()  # tables keep 8 bits
    else:
        part = random_stored(kind, n, k, rng)
        want = part.numbers()
    for isa in ISAS:
        p = provider("bfloat16", isa, 2, kind if kind in QUANTIZED else "gguf")
        rig = Rig(p)
        out = rig.ops.embed(p.table(part))
        rig.finish(out)
        rig.step["tokens"][:n] = np.arange(n)[::-1]
        rig.run(n)
        assert same_bits(rig.read(out, n), want[::-1]), isa


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_epilogues(quantization):
    rng = np.random.default_rng(1)
    k, f = 96, 40
    gate, up, down = (rng.standard_normal((f, k)).astype(f32) for _ in range(3))
    bias = rng.standard_normal(2 * f).astype(f32)
    x = act(rng.standard_normal((19, k)), "bfloat16")
    g = contract_quant(x, grid_of(quantization, gate)) + bias[:f]
    u = contract_quant(x, grid_of(quantization, up)) + bias[f:]
    want_gated = act(g / (f32(1) + contract_exp(-g)) * u, "bfloat16")
    res = rng.standard_normal((19, f)).astype(f32)
    want_res = res + (contract_quant(x, grid_of(quantization, down)) + bias[:f])
    for isa in ISAS:
        p = provider("bfloat16", isa, 2, quantization)
        for rows in (1, 5, 9, 19):
            rig, xin, _, out = linear_rig(p, [gate, up], k, bias=[bias[:f], bias[f:]], gate=True)
            rig.fill(xin, x[:rows])
            rig.run(rows)
            assert same_bits(rig.read(out, rows), want_gated[:rows]), (isa, rows)
            rig, xin, rin, out = linear_rig(p, [down], k, bias=[bias[:f]], residual=f)
            rig.fill(xin, x[:rows])
            rig.fill(rin, res[:rows])
            rig.run(rows)
            assert same_bits(rig.read(out, rows), want_res[:rows]), (isa, rows)


def test_parts_of_several_types_are_one_matrix():
    rng = np.random.default_rng(5)
    k = 512
    parts = [random_stored("Q4_K", 48, k, rng), random_stored("Q4_K", 16, k, rng), random_stored("Q6_K", 24, k, rng)]
    bias, res = rng.standard_normal(88).astype(f32), rng.standard_normal((12, 88)).astype(f32)
    x = activations(rng, 12, k, "bfloat16")
    want = res + (np.concatenate([contract_quant(x, stored_grid(part)) for part in parts], axis=1) + bias)
    for isa in ISAS:
        p = provider("bfloat16", isa, 2, "gguf")
        assert p.keeps([part.type for part in parts], [part.shape for part in parts], False)
        rig, xin, rin, out = linear_rig(p, parts, k, bias=[bias], residual=88)
        for rows in (1, 12):
            rig.fill(xin, x[:rows])
            rig.fill(rin, res[:rows])
            rig.run(rows)
            assert same_bits(rig.read(out, rows), want[:rows]), (isa, rows)


def test_what_a_provider_keeps():
    p, plain = provider("bfloat16", BEST, 2, "gguf"), provider("bfloat16", BEST, 2)
    assert p.keeps(["Q4_0"], [(24, 64)], False) and p.keeps(["Q5_K", "Q5_K"], [(24, 256)] * 2, True)
    assert not plain.keeps(["Q4_0"], [(24, 64)], False)
    assert not p.keeps(["Q4_K", "Q6_K"], [(32, 256)] * 2, True)  # gate and up alternate: one type
    assert not p.keeps(["Q4_K", "Q6_K"], [(24, 256), (32, 256)], False)  # a panel would hold two types
    assert not p.keeps(["Q2_K"], [(32, 256)], False) and not p.keeps(["F16"], [(32, 256)], False) and not p.keeps(["Q4_0"], [(32,)], False)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("kept", [False, True])
def test_norm(quantization, kept):
    """Inside the quantization (and no norm op left), or stored because somebody else reads it: the same bits."""
    rng = np.random.default_rng(4)
    d, eps = 72, 1e-5
    x = (rng.standard_normal((20, d)) * 10.0 ** rng.uniform(-3, 3, (20, 1))).astype(f32)
    w, m = rng.standard_normal(d).astype(f32), rng.standard_normal((24, d)).astype(f32)
    inv = f32(1) / np.sqrt(contract_sum16(x * x) / f32(d) + f32(eps))
    normed = act((x * inv[:, None]) * w, "bfloat16")
    want = contract_quant(normed, grid_of(quantization, m))
    for isa in ISAS:
        p = provider("bfloat16", isa, 3, quantization)
        rig = Rig(p)
        xin = rig.ops.input("f32", "T", d)
        buffer = rig.ops.norm(xin, p.vector([w]), eps)
        out = rig.ops.linear(buffer, p.linear([m]))
        rig.finish(*([buffer, out] if kept else [out]))
        assert any(op.code == 1 for op in rig.ops._forward) == kept
        for rows in (1, 3, 8, 9, 20):
            rig.fill(xin, x[:rows])
            rig.run(rows)
            assert same_bits(rig.read(out, rows), want[:rows]), (isa, rows)
            if kept:
                assert same_bits(rig.read(buffer, rows), normed[:rows])


def test_what_is_no_number_stays_none():
    """A NaN or an infinity in a row makes the whole row NaN, and no other row."""
    rng = np.random.default_rng(6)
    k = 288
    w, x = rng.standard_normal((32, k)).astype(f32), act(rng.standard_normal((12, k)), "bfloat16")
    x[2, 7], x[5, 280], x[9, 130] = np.nan, np.inf, -np.inf
    want = contract_quant(x, int8_grid(w))
    assert np.isnan(want[[2, 5, 9]]).all() and np.isfinite(np.delete(want, [2, 5, 9], 0)).all()
    for isa in ISAS:
        rig, xin, _, out = linear_rig(provider("bfloat16", isa, 2, "int8"), [w], k)
        for first, size in [(0, 12), (2, 1), (4, 3), (8, 4)]:
            rig.fill(xin, x[first : first + size])
            rig.run(size)
            assert same_bits(rig.read(out, size), want[first : first + size]), (isa, first, size)


def test_codes_at_the_ends_of_their_range():
    """All codes and activations at the ends, where 16 bits would saturate: exact."""
    k, n = 256, 16
    for kind in STORED:
        stored = random_stored(kind, n, k, np.random.default_rng(8))
        for fill in (0xFF, 0x00, 0x80, 0x7F):
            halves = stored.raw.reshape(-1, stored.raw.shape[1] * n // (stored.raw.size // stored.raw.shape[1]))
            assert halves.size == stored.raw.size
            raw = np.full_like(stored.raw, fill)
            raw = raw.reshape(n, -1)
            patched = _with_scales(kind, raw)
            grid = stored_grid(patched)
            x = np.full((9, k), 1.0, f32)
            x[1], x[2, ::2] = -1, -1
            want = contract_quant(x, grid)
            for isa in ISAS:
                rig, xin, _, out = linear_rig(provider("bfloat16", isa, 1, "gguf"), [patched], k)
                for rows in (1, 3, 9):
                    rig.fill(xin, x[:rows])
                    rig.run(rows)
                    assert same_bits(rig.read(out, rows), want[:rows]), (kind, isa, rows)


def _with_scales(kind, raw):
    from octavo.ops.table import Stored
    from octavo.quant import ggml

    blocks = raw.reshape(-1, ggml.BLOCK_TYPES[kind].nbytes).copy()
    for at in ggml.HALVES[kind]:
        blocks[:, at : at + 2] = np.array([0.5], np.float16).view(np.uint8)
    whole = blocks.reshape(len(raw), -1)
    return Stored(kind, whole, (len(raw), 256), lambda: ggml.dequantize(whole, kind).reshape(len(raw), 256))


@pytest.mark.parametrize("isa", ISAS)
def test_float16_scales_of_every_kind(isa):
    """Every finite float16 as a scale, denormals too."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    n = len(halves) // 16 * 16
    raw = np.zeros((n, 34), np.uint8)
    raw[:, :2], raw[:, 2:] = halves[:n, None].view(np.uint8), np.arange(32)
    from octavo.ops.table import Stored

    stored = Stored("Q8_0", raw, (n, 32), lambda: None)
    x = np.zeros((1, 32), f32)
    x[0, 3], x[0, 9] = 1, 127
    rig, xin, _, out = linear_rig(provider("bfloat16", isa, 2, "gguf"), [stored], 32)
    rig.fill(xin, x)
    rig.run(1)
    assert same_bits(rig.read(out, 1), contract_quant(x, stored_grid(stored)))


def test_bf16_and_f32_sources_and_what_int4_cannot_hold():
    rng = np.random.default_rng(9)
    w = rng.standard_normal((20, 64)).astype(f32)
    bits = to_bf16_bits(w[:7])
    joined = np.concatenate([act(w[:7], "bfloat16"), w[7:]])
    x = act(rng.standard_normal((3, 64)), "bfloat16")
    for quantization in QUANTIZED:
        p = provider("bfloat16", BEST, 2, quantization)
        rig, xin, _, out = linear_rig(p, [bits, w[7:]], 64)
        rig.fill(xin, x)
        rig.run(3)
        assert same_bits(rig.read(out, 3), contract_quant(x, grid_of(quantization, joined)))
    with pytest.raises(CheckpointError, match="beyond its scales"):
        provider("bfloat16", BEST, 2, "int4").linear([np.full((16, 32), 1e6, f32)])


# Matrix units hand out chunks of 512 rows, of equal size up to blocks of 32, and finish a block while the next one is multiplied.
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_chunks_of_rows_are_the_same_rows(quantization, isa):
    rng = np.random.default_rng(3)
    k, f, tokens = 72, 24, 1100
    gate, up = (rng.standard_normal((f, k)).astype(f32) for _ in range(2))
    x = activations(rng, tokens, k, "bfloat16")
    for parts, settings in (([gate, up], {"gate": True}), ([gate], {"residual": f})):
        rigs = [linear_rig(provider("bfloat16", isa, threads, quantization), parts, k, tokens=tokens, **settings) for threads in (1, 3)]
        few, xin, res, out = rigs[0]
        want = []
        for start in range(0, tokens, 2):
            few.fill(xin, x[start : start + 2])
            if res is not None:
                few.fill(res, np.full((2, f), start, f32))
            few.run(2)
            want.append(few.read(out, 2).copy())
        want = np.concatenate(want)
        for rig, xin, res, out in rigs:
            for rows in (65, 513, 545, 1025, 1100):
                rig.fill(xin, x[:rows])
                if res is not None:
                    rig.fill(res, np.repeat(np.arange(0, tokens, 2, dtype=f32), 2)[:rows, None].repeat(f, 1))
                rig.run(rows)
                assert same_bits(rig.read(out, rows), want[:rows]), (rows, settings)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize(("threads", "rows"), [(2, 257), (3, 385), (16, 2049), (20, 2600)])
def test_lanes_of_rows_leave_no_row_out(quantization, threads, rows):
    """One row more than whole blocks for each lane; more threads than lanes. What the buffers held before has no influence."""
    rng = np.random.default_rng(rows)
    k, f = 72, 24  # kp is 96: the last tile of 64 bytes ends behind it
    w, x = rng.standard_normal((f, k)).astype(f32), act(rng.standard_normal((rows, k)), "bfloat16")
    found = []
    for isa, count in (("generic", 1), ("amx_emulated", threads)):
        rig, xin, _, out = linear_rig(provider("bfloat16", isa, count, quantization), [w], k, tokens=rows)
        arena = np.frombuffer(rig.program._arena, np.uint8)
        arena[:] = 0x7F
        arena[xin.address - rig.program._arena.address :][: rows * xin.row_bytes] = 0
        rig.fill(xin, x)
        rig.run(rows)
        found.append(rig.read(out, rows))
    assert same_bits(*found)


@pytest.mark.parametrize("isa", ["generic", BEST])
@pytest.mark.parametrize("k", [24, 44, 50])
def test_an_embedding_s_padding_is_zero(k, isa):
    """Spread, it was rounded with the numbers; the norm behind it would count what is left."""
    rng = np.random.default_rng(k)
    p = provider("bfloat16", isa, 2, "int8")
    rig, w = Rig(p), rng.standard_normal((37, k)).astype(f32)
    out = rig.ops.embed(p.table(w))
    rig.finish(out)
    rig.step["tokens"][:5] = [36, 0, 17, 5, 5]
    rig.run(5)
    arena = np.frombuffer(rig.program._arena, np.uint8)
    rows = arena[out.address - rig.program._arena.address :][: 5 * out.row_bytes].view(f32).reshape(5, -1)
    assert rows.shape[1] > k and not rows[:, k:].any() and same_bits(rows[:, :k], int8_grid(w).numbers()[[36, 0, 17, 5, 5]])


@pytest.mark.parametrize("quantization", ["int8", "int4", "int4_g128"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_refused(quantization, bad):
    w = np.ones((16, 64), f32)
    w[3, 5] = bad
    with pytest.raises(CheckpointError, match=r"numbers that \w+ cannot"):
        provider("bfloat16", "generic", 1, quantization).linear([w])


def test_more_inputs_than_an_int8_sum_takes_are_refused():
    with pytest.raises(UnsupportedError, match="up to 131072 inputs, not 131073"):
        provider("bfloat16", "generic", 1, "int8").linear([np.zeros((16, (1 << 17) + 1), f32)])


@pytest.mark.parametrize("k", [8, 24, 44, 50, 96])
def test_the_oracle_means_the_same_for_any_k(k):
    rng = np.random.default_rng(k)
    w, x = rng.standard_normal((64, k)).astype(f32), act(rng.standard_normal((20, k)), "bfloat16")
    want = contract_quant(x, int8_grid(w))
    found = torch_quant.int8(torch.tensor(w)).product(torch.tensor(x)).numpy()
    assert np.abs(found - want).max() < 1e-6 * np.abs(want).max()
