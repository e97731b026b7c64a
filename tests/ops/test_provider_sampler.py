"""The sampler of every provider through a whole program, against the torch provider's: same seeds, same tokens."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
from tests.checkpoints import make_tiny
from tests.harness import PROVIDERS, Bench, Item, Sampling, load

V, N = 330, 90  # a vocabulary that is no multiple of 32; rows: more than one tile
MASK = np.random.default_rng(1).integers(0, 2**32, -(-V // 32), np.uint32)
BIAS = np.random.default_rng(2).normal(0, 2, V).astype(np.float32)
SEEN = {int(i): int(i) % 4 for i in np.random.default_rng(3).permutation(V)[:200]}
SETTINGS = {
    "greedy": Sampling(),
    "greedy-penalties": Sampling(repetition=1.7, presence=-0.5, frequency=0.4, seen=SEEN),
    "greedy-mask-bias": Sampling(mask=MASK, bias=BIAS),
    "plain": Sampling(temperature=1.0, seed=2**64 - 1),
    "cold": Sampling(temperature=0.2, seed=2**40),
    "top-k": Sampling(temperature=1.5, top_k=7, seed=1),
    "top-k-all": Sampling(temperature=1.5, top_k=V, seed=1),
    "top-p": Sampling(temperature=1.0, top_p=0.6, seed=2),
    "top-p-one": Sampling(temperature=1.0, top_p=1e-9, seed=2),
    "min-p": Sampling(temperature=1.0, min_p=0.2, seed=3),
    "everything": Sampling(temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, repetition=0.8, presence=0.3, frequency=-0.2, seed=4, mask=MASK,
                           bias=BIAS, seen=SEEN),
}


def rows_of(provider: str, path: Path) -> dict[str, tuple[np.ndarray, ...]]:
    """Every setting's tokens, log-probabilities, ranks and alternatives over the same N rows; and a scored run."""
    made = PROVIDERS[provider]("float32")
    bench = Bench(made, load(path, made, "float32"), dtype="float32", alternatives=6)
    tokens = np.random.default_rng(0).integers(3, V, N).tolist()
    found = {}
    for name, setting in SETTINGS.items():
        bench.sampling(0, setting)
        bench.step([Item(0, 0, tokens, range(N), top=6)])
        found[name] = tuple(bench.arrays[k][:N].copy() for k in ("out_token", "out_logprob", "out_rank", "top_ids", "top_logprobs"))
    bench.step([Item(0, 0, tokens, range(N), target=5, top=0)])
    found["scored"] = tuple(bench.arrays[k][:N].copy() for k in ("out_token", "out_logprob", "out_rank"))
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "llama", tokenizer=False, vocab_size=V, num_hidden_layers=1)


@pytest.mark.parametrize("provider", [name for name in PROVIDERS if name != "torch"])
def test_same_draws_as_torch(checkpoint: Path, provider: str) -> None:
    got, want = rows_of(provider, checkpoint), rows_of("torch", checkpoint)
    for name, columns in want.items():
        assert (got[name][0] == columns[0]).mean() >= (1 if "greedy" in name else 0.98), name  # logits differ in the last bits: an edge may move
        same = got[name][0] == columns[0]
        np.testing.assert_allclose(got[name][1][same], columns[1][same], atol=2e-5, err_msg=name)
        for a, b in zip(got[name][2:], columns[2:]):
            np.testing.assert_allclose(a[same], b[same], atol=2e-5, err_msg=name)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_settings_are_obeyed(checkpoint: Path, provider: str) -> None:
    found = rows_of(provider, checkpoint)
    allowed = np.unpackbits(MASK.view(np.uint8), bitorder="little")[:V].astype(bool)
    assert allowed[found["everything"][0]].all() and allowed[found["greedy-mask-bias"][0]].all()
    assert (found["greedy"][2] == 1).all() and (found["top-p-one"][0] == found["greedy"][0]).all()
    assert found["top-k"][2].max() <= 7 < found["top-k-all"][2].max()
    assert len(set(found["plain"][0].tolist())) > 40 > len(set(found["greedy"][0].tolist()) - set(found["cold"][0].tolist()))
    assert (found["scored"][0] == 5).all()
    assert (found["greedy-penalties"][0] != found["greedy"][0]).mean() > 0.2
