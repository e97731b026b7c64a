"""linear, norm, embed, take_rows, exp: the contract restated in numpy, bit for bit, on every variant and thread count."""

import ctypes

import numpy as np
import pytest
from tests.ops.native_support import (
    BEST,
    DTYPES,
    ISAS,
    Rig,
    act,
    contract_exp,
    contract_product,
    contract_sum16,
    f32,
    flush,
    from_bits,
    provider,
    same_bits,
    to_bf16_bits,
)  # fmt: skip

from octavo.errors import ConfigError

SHAPES = [(8, 24), (32, 16), (40, 33), (96, 70), (576, 64), (33, 130)]  # K, N
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33]


def linear_rig(p, w, *, x_cols, bias=None, residual=False, gate=False, tokens=64):
    rig = Rig(p, tokens=tokens)
    matrix = p.linear(w, interleave=gate)
    x = rig.ops.input("act", "T", x_cols)
    res = rig.ops.input("f32", "T", w[0].shape[0]) if residual else None
    out = rig.ops.linear(x, matrix, bias=None if bias is None else p.vector(bias), act="silu_mul" if gate else None, residual=res)
    rig.finish(out)
    return rig, x, res, out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k,n", SHAPES)
def test_linear_is_the_contract(k, n, dtype):
    rng = np.random.default_rng(k * n)
    w = rng.standard_normal((n, k)).astype(f32)
    x = act(rng.standard_normal((33, k)), dtype)
    want = contract_product(x, act(w, dtype))
    exact = x.astype(float) @ act(w, dtype).astype(float).T
    bound = np.abs(x).astype(float) @ np.abs(act(w, dtype)).astype(float).T * 2.0**-24 * (k / 32 + 20)
    assert (np.abs(want - exact) <= bound).all()
    for isa in ISAS:
        for threads in (1, 3):
            rig, xin, _, out = linear_rig(provider(dtype, isa, threads), [w], x_cols=k)
            for rows in ROWS:
                rig.fill(xin, x[:rows])
                rig.run(rows)
                assert same_bits(rig.read(out, rows), want[:rows]), (isa, threads, rows)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_by_many_threads(dtype, quantization):
    """Chunks of rows, blocks of inputs with a rest, tasks given beforehand and taken: each once, by however many threads, narrow matrices, too."""
    rng = np.random.default_rng(21)
    k, rows = 272, (17, 64, 65, 130, 200)
    x = act(rng.standard_normal((max(rows), k)), dtype)
    for n, gate in ((24, False), (232, False), (136, True)):
        w = [rng.standard_normal((n, k)).astype(f32) for _ in range(1 + gate)]
        want = None
        if quantization is None and not gate:
            want = contract_product(x, act(w[0], dtype))
        for isa in ISAS:
            for threads in (1, 2, 16) if isa == BEST else (2,):
                rig, xin, _, out = linear_rig(provider(dtype, isa, threads, quantization), w, x_cols=k, gate=gate, tokens=max(rows))
                for size in rows:
                    rig.fill(xin, x[:size])
                    rig.run(size)
                    got = rig.read(out, size)
                    if want is None and size == rows[0]:  # otherwise the first rows of the first variant, one by one, are what all have to be
                        want = np.empty((max(rows), got.shape[1]), got.dtype)
                        for row in range(max(rows)):
                            rig.fill(xin, x[row : row + 1])
                            rig.run(1)
                            want[row] = rig.read(out, 1)[0]
                    assert same_bits(got, want[:size]), (isa, threads, n, size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_epilogues(dtype):
    rng = np.random.default_rng(1)
    k, f = 72, 40
    gate, up, down = (rng.standard_normal(s).astype(f32) for s in ((f, k), (f, k), (f, k)))
    bias = rng.standard_normal(2 * f).astype(f32)
    x = act(rng.standard_normal((19, k)), dtype)
    g = contract_product(x, act(gate, dtype)) + bias[:f]
    u = contract_product(x, act(up, dtype)) + bias[f:]
    want_gated = act(g / (f32(1) + contract_exp(-g)) * u, dtype)
    res = rng.standard_normal((19, f)).astype(f32)
    want_res = res + (contract_product(x, act(down, dtype)) + bias[:f])
    for isa in ISAS:
        for rows in (1, 5, 8, 19):
            rig, xin, _, out = linear_rig(provider(dtype, isa), [gate, up], x_cols=k, bias=[bias[:f], bias[f:]], gate=True)
            rig.fill(xin, x[:rows])
            rig.run(rows)
            assert same_bits(rig.read(out, rows), want_gated[:rows]), (isa, rows)
            rig, xin, rin, out = linear_rig(provider(dtype, isa), [down], x_cols=k, bias=[bias[:f]], residual=True)
            rig.fill(xin, x[:rows])
            rig.fill(rin, res[:rows])
            rig.run(rows)
            assert same_bits(rig.read(out, rows), want_res[:rows]), (isa, rows)


@pytest.mark.parametrize("isa", ISAS)
def test_silu_times_up_whatever_the_gate(isa):
    """Each half of a float32 as a gate, with any other half; ups of usual sizes, and any bits. A shorter way must round as the long one."""
    rng = np.random.default_rng(11)
    f = 1 << 16
    gates = (np.arange(f, dtype=np.uint32) << 16 | rng.integers(0, 1 << 16, f, np.uint32)).view(f32)
    usual = (rng.standard_normal(f) * 3).astype(f32)
    for up in (usual, rng.integers(0, 1 << 32, f, np.uint32).view(f32)):
        up = flush(up)
        x = flush(gates)
        with np.errstate(all="ignore"):
            want = act(flush(flush(x / (f32(1) + contract_exp(-x))) * up), "bfloat16")
        p = provider("bfloat16", isa, 2)
        zeros = np.zeros((f, 8), f32)
        rig, xin, _, out = linear_rig(p, [zeros, zeros], x_cols=8, bias=[x, up], gate=True)  # a gate is 0 + its bias
        rig.fill(xin, np.zeros((40, 8), f32))
        for rows in (1, 40):
            rig.run(rows)
            assert same_bits(rig.read(out, rows), np.repeat(want[None], rows, 0)), rows


@pytest.mark.parametrize("isa", ISAS)
def test_silu_s_shorter_way_where_it_matters(isa):
    """One lane of each 16 has a result beside the middle between two bfloat16; the others lie far from any, so that they do not send the
    vector the long way. A wrong coefficient, or a window narrower than the error, then rounds that lane to the other side."""
    rng = np.random.default_rng(12)
    f, p = 1 << 16, provider("bfloat16", isa, 2)
    zeros = np.zeros((f, 8), f32)
    for _ in range(4):
        gates = (rng.choice([-1, 1], f) * 2.0 ** rng.uniform(-5, np.log2(80), f)).astype(f32)
        silu = flush(gates / (f32(1) + contract_exp(-gates)))
        low = np.where(np.arange(f) % 16 == rng.integers(16), 0x8000 + rng.integers(-2, 3, f), 0x1000)
        up = ((0x3F800000 + (rng.integers(0, 128, f) << 16) + low).astype(np.uint32).view(f32) / silu).astype(f32)
        want = act(flush(silu * up), "bfloat16")
        rig, xin, _, out = linear_rig(p, [zeros, zeros], x_cols=8, bias=[gates, up], gate=True)
        rig.fill(xin, np.zeros((1, 8), f32))
        rig.run(1)
        assert same_bits(rig.read(out, 1), want[None])


def test_linear_on_odd_numbers():
    """Denormals, tiny normals, cancellation into the denormal range, -0, infinity, NaN: the same class or bits everywhere."""
    rng = np.random.default_rng(2)
    k, n, rows = 64, 48, 20
    pool = np.array([0.0, -0.0, 1e-40, -1e-41, 2.0**-60, -(2.0**-60), 2.0**-61, 2.0**-59 * 1.5, 1, -1, 1.5, 3e-19, -3e-19], f32)
    x = from_bits(to_bf16_bits(rng.choice(pool, (rows, k))))
    w = rng.choice(pool, (n, k)).astype(f32)
    # sums that cancel below 2^-126, inside a chain and between the two: few products, all near 2^-120
    near = lambda size: (2.0**-60 * (1 + rng.integers(0, 128, size) / 128) * rng.choice([-1, 1], size)).astype(f32)  # noqa: E731
    x[:8], w[:16] = 0, near((16, k))
    for row in range(8):
        x[row, rng.integers(0, 4, 3)] = near(3)
    x[8:10, ::7], x[10, 3], x[11, 5] = np.inf, np.nan, -np.inf
    w[20, 4], w[21, 9] = np.nan, np.inf
    want = contract_product(x, act(w, "bfloat16"))
    exact = x[:8].astype(float) @ act(w[:16], "bfloat16").astype(float).T
    assert np.isnan(want).any() and np.isfinite(want).any() and ((want[:8, :16] == 0) & (exact != 0)).any()
    for isa in ISAS:
        rig, xin, _, out = linear_rig(provider("bfloat16", isa), [w], x_cols=k)
        for size in (1, 4, 20):
            for first in range(0, rows, size):
                rig.fill(xin, x[first : first + size])
                rig.run(size)
                assert same_bits(rig.read(out, size), want[first : first + size]), (isa, size, first)


@pytest.mark.parametrize("isa", ISAS)
def test_packing_rounds_zeroes_and_joins(isa):
    rng = np.random.default_rng(3)
    parts = [rng.standard_normal((n, 50)).astype(f32) for n in (5, 19, 3)]
    parts[1][0, :6] = [1e-40, 2.0**-61, -(2.0**-60), np.nan, np.inf, -0.0]
    for dtype in DTYPES:
        p = provider(dtype, isa)
        for given in (parts, [to_bf16_bits(a) for a in parts], [parts[0], to_bf16_bits(parts[1]), parts[2]]):
            rig = Rig(p)
            out = rig.ops.embed(p.linear(given))
            rig.finish(out)
            rig.step["tokens"][:27] = np.arange(27)
            rig.run(27)
            want = np.concatenate([from_bits(a) if a.dtype == np.uint16 else act(a, dtype) for a in given])
            assert same_bits(rig.read(out, 27), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fused", [False, True])
def test_norm(dtype, fused):
    """Alone, and inside the linear op behind it (few rows): the same bits."""
    rng = np.random.default_rng(4)
    d, eps = 72, 1e-5
    x = (rng.standard_normal((20, d)) * 10.0 ** rng.uniform(-3, 3, (20, 1))).astype(f32)
    w = rng.standard_normal(d).astype(f32)
    m = rng.standard_normal((24, d)).astype(f32)
    inv = f32(1) / np.sqrt(contract_sum16(x * x) / f32(d) + f32(eps))
    want = act((x * inv[:, None]) * w, dtype)
    product = contract_product(want, act(m, dtype))
    for isa in ISAS:
        p = provider(dtype, isa, 3)
        rig = Rig(p)
        xin = rig.ops.input("f32", "T", d)
        normed = rig.ops.norm(xin, p.vector([w]), eps)
        out = rig.ops.linear(normed, p.linear([m]))
        rig.finish(*([out] if fused else [normed, out]))
        assert any(op.flags & 2 for op in rig.ops._forward) == fused
        for rows in (1, 3, 8, 9, 20):
            rig.fill(xin, x[:rows])
            rig.run(rows)
            assert fused or same_bits(rig.read(normed, rows), want[:rows])
            assert same_bits(rig.read(out, rows), product[:rows]), (isa, rows)


def exps(isa, x, rounded):
    out = np.empty_like(x)
    provider("bfloat16", isa).pool.exp(out.ctypes.data, x.ctypes.data, len(x), rounded)
    return out


@pytest.mark.parametrize("isa", ISAS)
def test_exp(isa):
    x = np.concatenate([np.linspace(-90, 90, 99_995, dtype=f32), np.array([0, -0.0, np.inf, -np.inf, np.nan], f32)])
    x = np.pad(x, (0, -len(x) % 16))
    out = exps(isa, x, False)
    with np.errstate(all="ignore"):
        want = np.exp(x.astype(float))
    ok = (x > -87.3) & (x < 88.7)
    assert np.abs(out[ok] / want[ok] - 1).max() < 2.0**-22
    assert (out[x < -87.34] == 0).all() and (out[x > 88.73] == np.inf).all() and np.isnan(out[np.isnan(x)]).all()
    assert (out[x == 0] == 1).all() and (x == 0).sum() >= 2
    assert same_bits(out, contract_exp(x))


@pytest.mark.parametrize("isa", ISAS)
def test_softmax_s_exp_is_exp_rounded(isa):
    """A shorter way to the same bits: one in 17 of the float32 that matter, from -2^-12 to -64; then coarsely all that there are."""
    for first, last, step in ((0xB9800000, 0xC2800000, 17), (0x80000000, 0xFF800000, 4111)):
        for start in range(first, last, step << 20):
            x = np.minimum(start + step * np.arange(1 << 20, dtype=np.uint64), last).astype(np.uint32).view(f32)
            assert same_bits(exps(isa, x, True), act(exps(isa, x, False), "bfloat16"))
    assert np.isnan(exps(isa, np.array([np.nan, -np.nan] * 8, f32), True)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["f32", "act"])
def test_take_rows_and_rows_of_zero(kind, dtype):
    p = provider(dtype=dtype)
    rig = Rig(p)
    x = rig.ops.input(kind, "T", 20)
    out = rig.ops.take_rows(x)
    rig.finish(out)
    values = act(np.random.default_rng(5).standard_normal((9, 20)).astype(f32), "bfloat16")
    rig.fill(x, values)
    rig.step["rows"][:3] = [8, 0, 5]
    rig.run(9, 0, 3)
    assert same_bits(rig.read(out, 3), values[[8, 0, 5]])
    rig.run(0)
    rig.run(9, 0, 0)


def test_rows_are_taken_once():
    ops = Rig(provider()).ops
    rows = ops.take_rows(ops.input("f32", "T", 20))
    for x in (rows, ops.input("f32", "tile", 20)):
        with pytest.raises(ConfigError, match="take_rows takes some of a step's rows"):
            ops.take_rows(x)


def test_the_callers_rounding_mode_comes_back():
    """FTZ and DAZ hold inside a run only: numpy keeps its denormals."""
    p = provider()
    rig = Rig(p)
    out = rig.ops.embed(p.table(np.ones((4, 4), f32)))
    rig.finish(out)
    rig.run(3)
    assert np.array([1e-40], f32)[0] * f32(0.5) > 0
    assert ctypes.c_float(f32(1e-40)).value > 0
