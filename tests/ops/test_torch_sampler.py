"""The sampler against a plain numpy statement of the rules, and its random numbers against published values."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from tests.harness import Sampling  # noqa: E402

from octavo.ops import torch_sampler  # noqa: E402 (needs torch)
from octavo.ops.torch_sampler import adjusted, choose, philox_uniform  # noqa: E402

F = np.float32


def slots_of(s: Sampling) -> SimpleNamespace:
    arrays = {name: np.array([getattr(s, name)], kind) for name, kind in
              (("temperature", "f4"), ("top_k", "i4"), ("top_p", "f4"), ("min_p", "f4"), ("repetition", "f4"), ("presence", "f4"),
               ("frequency", "f4"), ("seed", "u8"))}
    seen = (np.array(list(s.seen), np.int32), np.array(list(s.seen.values()), np.int32), len(s.seen)) if s.seen else None
    return SimpleNamespace(arrays=arrays, mask=[s.mask], bias=[s.bias], seen=[seen])


def kept(x: np.ndarray, s: Sampling) -> dict[int, float]:
    """Rules 4 to 7 in Python lists, with unrounded weights: id → weight of what may be drawn."""
    e = {i: float(np.exp(F((v - x.max()) / F(s.temperature)))) for i, v in enumerate(x)}
    e = {i: w for i, w in e.items() if w >= F(s.min_p) and w >= 2.0**-31}
    order = sorted(e, key=lambda i: (-x[i], i))
    if s.top_k > 0:
        order = order[: s.top_k]
    if s.top_p < 1:
        total, mass, run = sum(e[i] for i in order), 0.0, []
        for i in order:
            if run and mass >= s.top_p * total:
                break
            run.append(i)
            mass += e[i]
        order = run
    return {i: e[i] for i in sorted(order)}


def drawn(x: np.ndarray, s: Sampling, u: float) -> int:
    return choose(torch.from_numpy(x), s.temperature, s.min_p, s.top_k, s.top_p, int(u * 2**24))


@pytest.mark.parametrize(("counter", "key", "want"), [  # the published known answers of philox4x32-10 (Random123)
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], want: tuple[int, ...]) -> None:
    assert torch_sampler.philox(counter, key) == want


def test_the_uniforms_layout() -> None:
    assert philox_uniform(0, 0) == 0x6627E8D5 >> 8
    assert philox_uniform(0x299F31D0A4093822, 9) == torch_sampler.philox((9, 0, 0, 0), (0xA4093822, 0x299F31D0))[0] >> 8


def test_uniforms_are_uniform_and_depend_on_everything() -> None:
    values = np.array([philox_uniform(seed, position) for seed in (0, 1, 2**63, 2**64 - 1) for position in range(2500)]) / 2**24
    assert ((values >= 0) & (values < 1)).all()
    assert abs(values.mean() - 0.5) < 0.01 and abs(values.var() - 1 / 12) < 0.004
    assert len(set(values.tolist())) > 9980
    assert philox_uniform(7, 5) != philox_uniform(7 + (1 << 32), 5) != philox_uniform(7, 6)


def test_greedy_takes_the_lowest_of_equals() -> None:
    x = np.array([0, 3, 1, 3, 3], F)
    assert drawn(x, Sampling(), 0.99) == 1
    assert drawn(np.array([0, np.inf, 1, np.inf], F), Sampling(temperature=1.0), 0.99) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_no_numbers(temperature: float) -> None:
    """One NaN, or an infinite maximum, breaks the row: also where a mask hides it, and where a target is given."""
    mask = np.array([0, 1 << 5], np.uint32)
    for change in (lambda row: row.fill(-np.inf), lambda row: row.fill(np.nan), lambda row: row.put(9, np.nan), lambda row: row.put(9, np.inf)):
        row = np.arange(40, dtype=F).reshape(1, 40)
        change(row)
        for sampling in (Sampling(temperature=temperature), Sampling(temperature=temperature, mask=mask)):
            assert run_tile(row, sampling, row_top=[0])["out_token"][0] == -1
        assert run_tile(row, Sampling(), row_target=[4], row_top=[0])["out_token"][0] == -1
    some = np.arange(40, dtype=F).reshape(1, 40)
    some[0, 5:] = -np.inf  # a maximum is left
    assert run_tile(some, Sampling(temperature=0))["out_token"][0] == 4
    assert run_tile(some, Sampling(temperature=temperature, mask=mask))["out_token"][0] == 37  # nothing is left: the lowest allowed


@pytest.mark.parametrize("s", [
    Sampling(temperature=1.0), Sampling(temperature=0.3), Sampling(temperature=2.5), Sampling(temperature=1e-30),
    Sampling(temperature=1.0, top_k=1), Sampling(temperature=1.0, top_k=5), Sampling(temperature=1.0, top_k=1000),
    Sampling(temperature=1.0, top_p=0.5), Sampling(temperature=1.0, top_p=1e-6), Sampling(temperature=0.7, top_p=0.95),
    Sampling(temperature=1.0, min_p=0.1), Sampling(temperature=1.0, min_p=1.0), Sampling(temperature=1.3, min_p=0.02, top_k=12, top_p=0.8),
])
@pytest.mark.parametrize("coarse", [False, True])
def test_draws_are_the_inverse_of_the_kept_distribution(s: Sampling, coarse: bool) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(0, 2, 40).astype(F)
    if coarse:  # many exact ties
        x = np.round(x)
    x[[4, 17]] = -np.inf
    allowed = kept(x, s)
    total = sum(allowed.values())
    edges = np.cumsum(list(allowed.values())) / total
    for u in [0.0, 2.0**-24, 1 - 2.0**-24, *(np.floor(rng.random(200) * 2**24) / 2**24).tolist()]:
        if (np.abs(edges[:-1] - u) < 1e-6).any():
            continue  # weights are rounded: the edge itself may fall either way
        want = next((i for i, edge in zip(allowed, edges) if edge > u), max(allowed))
        assert drawn(x, s, u) == want, (u, s)


def test_the_crossing_token_stays_and_exact_mass_stops() -> None:
    x = np.array([3, 3, 3, 3], F)  # four equal weights of exactly 2^30
    reached = {p: {drawn(x, Sampling(temperature=1.0, top_p=p), u) for u in np.arange(400) / 400} for p in (0.25, 0.26, 0.5, 0.76, 1.0)}
    assert reached == {0.25: {0}, 0.26: {0, 1}, 0.5: {0, 1}, 0.76: {0, 1, 2, 3}, 1.0: {0, 1, 2, 3}}
    assert [drawn(x, Sampling(temperature=1.0), u) for u in (0, 0.25 - 2**-24, 0.25, 0.75 - 2**-24, 0.75, 1 - 2**-24)] == [0, 0, 1, 2, 3, 3]


def test_frequencies_follow_the_distribution() -> None:
    x = np.array([1.0, 0.0, 2.0, -1.0], F)
    n = 4000
    found = Counter(drawn(x, Sampling(temperature=1.0), philox_uniform(11, p) / 2**24) for p in range(n))
    p = np.exp(x) / np.exp(x).sum()
    chi2 = sum((found[i] - n * p[i]) ** 2 / (n * p[i]) for i in range(4))
    assert chi2 < 16.3  # 0.1 % for 3 degrees of freedom; the draws are fixed, so this never flickers


def test_mask_bias_and_penalties_in_order() -> None:
    v = 70  # not a multiple of 32
    x = np.linspace(-3, 3, v).astype(F)
    mask = np.full(3, 0xFFFFFFFF, np.uint32)
    mask[0] &= ~np.uint32(1 << 5)
    mask[2] &= ~np.uint32(1 << 1)  # id 65
    bias = np.zeros(v, F)
    bias[[5, 10, 69]] = 100, 2, -1
    s = Sampling(repetition=1.5, presence=0.25, frequency=0.5, mask=mask, bias=bias, seen={10: 0, 60: 2, 3: 1, 65: 4})
    got = adjusted(torch.from_numpy(x), slots_of(s), 0).numpy()
    want = x + bias
    want[[5, 65]] = -np.inf
    for i, count in s.seen.items():
        y = want[i] / F(1.5) if want[i] > 0 else want[i] * F(1.5)
        y = F(y - F(0.5) * F(count))
        want[i] = y - F(0.25) if count else y
    np.testing.assert_array_equal(got, want)
    assert got[10] != x[10] and got[5] == -np.inf  # a bias cannot lift a masked id


def run_tile(logits: np.ndarray, s: Sampling, k: int = 4, **rows: Any) -> dict[str, np.ndarray]:
    n = len(logits)
    step = {name: np.zeros(n, "i4") for name in ("row_slot", "row_pos", "out_token", "out_rank")}
    step |= {"row_target": np.full(n, -1, "i4"), "row_top": np.full(n, -1, "i4"), "out_logprob": np.full(n, 9, "f4"),
             "top_ids": np.full((n, k), -1, "i4"), "top_logprobs": np.full((n, k), 9, "f4")}
    step |= {name: np.array(values, "i4") for name, values in rows.items()}
    torch_sampler.sample_tile(torch.from_numpy(logits), step, slots_of(s), 0)
    return step


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = np.array([[1, 3, 3, 0, 2], [1, 3, 3, 0, 2], [5, 0, 0, 0, 0], [0, 0, 0, 0, 9]], F)
    s = Sampling(bias=np.array([0, -50, -50, 0, 0], F))  # greedy then takes id 4 in the first rows
    step = run_tile(logits, s, row_top=[3, -1, 0, 2], row_target=[-1, -1, 1, 0])
    raw = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert step["out_token"].tolist() == [4, 4, 1, 0]
    np.testing.assert_allclose(step["out_logprob"][[0, 2, 3]], [raw[0, 4], raw[2, 1], raw[3, 0]], rtol=1e-6)
    assert step["out_logprob"][1] == 9  # nobody asked
    assert step["out_rank"][[0, 2, 3]].tolist() == [3, 2, 2]  # ties do not raise the rank
    assert step["top_ids"][0].tolist() == [1, 2, 4, -1] and step["top_ids"][3].tolist() == [4, 0, -1, -1]
    np.testing.assert_allclose(step["top_logprobs"][0, :3], raw[0, [1, 2, 4]], rtol=1e-6)
    assert (step["top_ids"][2] == -1).all()


def test_the_draw_uses_the_slots_seed_and_the_rows_position() -> None:
    logits = np.zeros((50, 1000), F)
    first = run_tile(logits, Sampling(temperature=1.0, seed=2**64 - 3), row_pos=range(50))["out_token"]
    assert [philox_uniform(2**64 - 3, p) * 1000 >> 24 for p in range(50)] == first.tolist()
