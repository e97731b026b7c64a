"""The torch provider's ops against float64, its rounding, stale cache memory, and the costs of the table."""

import numpy as np
import pytest

from octavo.ops import table

torch = pytest.importorskip("torch")
from tests.checkpoints import make_tiny  # noqa: E402
from tests.harness import Bench, Item, Sampling, load  # noqa: E402

from octavo.errors import ConfigError  # noqa: E402 (needs torch)
from octavo.ops.torch_ops import TorchProvider, _attend, _rotate  # noqa: E402


def naive_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, window: int | None) -> np.ndarray:
    t, g, group, d = q.shape
    out = np.zeros_like(q, dtype=np.float64)
    for i in range(t):
        low = 0 if window is None else max(0, positions[i] - window + 1)
        for h in range(g):
            for j in range(group):
                s = k[low : positions[i] + 1, h].astype(np.float64) @ q[i, h, j] / np.sqrt(d)
                p = np.exp(s - s.max())
                out[i, h, j] = p / p.sum() @ v[low : positions[i] + 1, h]
    return out


@pytest.mark.parametrize("window", [None, 1, 7, 256, 300])
@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 20), (250, 270), (511, 513), (600, 601)])
def test_attention(window: int | None, start: int, length: int) -> None:
    rng = np.random.default_rng(0)
    q = rng.normal(size=(length - start, 2, 3, 24)).astype(np.float32)
    k, v = (rng.normal(size=(length, 2, 24)).astype(np.float32) for _ in range(2))
    positions = np.arange(start, length)
    got = _attend(*(torch.from_numpy(x) for x in (q, k, v, positions)), window, torch.float32).numpy()
    np.testing.assert_allclose(got, naive_attention(q, k, v, positions, window), atol=2e-6)


def test_attention_does_not_read_before_the_window() -> None:
    q, k, v = torch.randn(1, 1, 1, 8), torch.randn(600, 1, 8), torch.randn(600, 1, 8)
    want = _attend(q, k, v, torch.tensor([599]), 40, torch.float32)
    k[:560], v[:560] = torch.nan, torch.inf
    assert torch.equal(_attend(q, k, v, torch.tensor([599]), 40, torch.float32), want)


def test_rotation_turns_pairs_of_halves() -> None:
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])  # pairs (1, 0) and (0, 2)
    angle = torch.tensor([[[np.pi / 2, np.pi]]])
    got = _rotate(x, angle.cos(), angle.sin())[0, 0]
    np.testing.assert_allclose(got, [0, 0, 1, -2], atol=1e-6)


def test_matrices_take_bits_and_readonly_views() -> None:
    bits = np.array([[0x3F80, 0xC000]], np.uint16)  # 1, -2
    bits.flags.writeable = False
    held = TorchProvider("bfloat16").linear([bits, bits])
    assert held.dtype == torch.bfloat16 and held.tolist() == [[1, -2], [1, -2]]
    assert TorchProvider("float32").table(bits).tolist() == [[1, -2]]
    assert TorchProvider("bfloat16").vector([np.array([1.001], np.float32), np.array([2.0], np.float32)]).dtype == torch.float32
    with pytest.raises(ConfigError, match="float16"):
        TorchProvider("float16")


@pytest.fixture
def bench(tmp_path) -> Bench:
    provider = TorchProvider("float32")
    return Bench(provider, load(make_tiny(tmp_path, "llama", tokenizer=False), provider, "float32"), dtype="float32", alternatives=8, num_blocks=8)


def test_a_step_without_rows_and_a_dirty_cache(bench: Bench) -> None:
    assert bench.step([Item(0, 0, [5, 6, 7], [2])]) == 1
    want = int(bench.arrays["out_token"][0])
    bench.release(0)
    bench.program.kv.data.fill_(torch.nan)
    assert bench.step([Item(1, 0, [5, 6])]) == 0  # nothing to sample
    bench.step([Item(1, 2, [7], [0])])
    assert bench.arrays["out_token"][0] == want


def test_more_rows_than_a_tile(bench: Bench) -> None:
    tokens = np.random.default_rng(0).integers(0, 320, 100).tolist()
    bench.step([Item(0, 0, tokens, range(100), top=2)])
    logits = bench.program.logits()
    assert bench.arrays["out_token"][:100].tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(bench.arrays["top_logprobs"][:100, 0], torch.log_softmax(logits, -1).amax(-1), atol=1e-6)
    bench.sampling(1, Sampling(temperature=1.0, seed=3))  # another slot's state leaves this one's alone
    bench.release(0)
    bench.step([Item(0, 0, tokens[:3], [2])])
    assert bench.arrays["out_token"][0] == logits[2].argmax()


def test_bfloat16_rounds_where_the_table_says() -> None:
    """Each op's result is exactly a bfloat16 where act is promised, and more than that where float32 is."""
    from octavo.ops.torch_ops import _StepOps

    ops = object.__new__(_StepOps)
    ops.act = torch.bfloat16
    x, weight = torch.randn(5, 32), torch.randn(32, 32).bfloat16()
    normed = ops.norm(x, torch.rand(32), 1e-5)
    assert normed.dtype == torch.bfloat16 and ops.linear(normed, weight, act="silu_mul").dtype == torch.bfloat16
    out = ops.linear(normed, weight, residual=x)
    assert out.dtype == torch.float32
    exact = x.double() + normed.double() @ weight.double().T
    assert (out - exact).abs().max() < 1e-5


@pytest.mark.parametrize("window", [None, 1, 5, 12, 40])
def test_visible_pairs(window: int | None) -> None:
    for length in range(1, 30):
        for new in range(1, length + 1):
            want = sum(min(p + 1, window or length) for p in range(length - new, length))
            assert table.visible_pairs(new, length, window) == want, (new, length)


def test_costs_are_those_of_the_shapes() -> None:
    one = table.linear_cost(1, 64, 32, 2, 2)
    assert one == table.Cost(64 * 32 * 2 + 32 * 2 + 64 * 4, 2 * 64 * 32)
    many = table.linear_cost(10, 64, 32, 2, 2)
    assert many.flops == 10 * one.flops and many.bytes - one.bytes == 9 * (32 * 2 + 64 * 4)  # the matrix is read once
    assert table.linear_cost(1, 64, 32, 2, 2, act="silu_mul").bytes == 64 * 32 * 2 + 32 * 2 + 32 * 2
    assert one + one == one.times(2) and isinstance(one + one, table.Cost)
    attention = table.attention_cost(3, [(1, 100), (2, 50)], 4, 2, 16, 2, 2)
    assert attention == table.Cost(2 * 150 * 2 * 16 * 2 + 2 * 3 * 4 * 16 * 2, (100 + 49 + 50) * 4 * (4 * 16 + 4))
    assert table.attention_cost(1, [(1, 100)], 4, 2, 16, 2, 2, window=10).bytes == 2 * 10 * 2 * 16 * 2 + 2 * 4 * 16 * 2
    assert table.head_cost(65, 100, 8, 2, 2).bytes == 2 * 1600 + 65 * (16 + 400)
