"""Every architecture variant against transformers: tiny random checkpoints, float32, within 1e-4.

Compared are the raw log-probabilities of the whole vocabulary at every position, for uneven prefill chunks over
scattered blocks and for token-by-token decode.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoints import make_tiny
from tests.harness import PROVIDERS, Bench, Item, load

torch = pytest.importorskip("torch")
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-untied": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "llama3-rope-new-style": ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}, "rope_theta": None}),
    "linear-rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "group-1": ("llama", {"num_key_value_heads": 4}),
    "group-3": ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}),
    "group-4": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128}),
    "kv-heads-null": ("llama", {"num_key_value_heads": None}),
    "head-24": ("llama", {"hidden_size": 96}),
    "head-80": ("llama", {"head_dim": 80}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("mistral", {"sliding_window": 19, "head_dim": 32}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-upper-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1}),
    "qwen2-layer-types": ("qwen2", {"use_sliding_window": True, "sliding_window": 9,
                                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
}
LENGTH = 75
CHUNKS = [1, 17, 30, 3, 24]


def tokens_of(vocab: int, length: int = LENGTH, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab, length).tolist()


def oracle(path: Path, tokens: list[int]) -> np.ndarray:
    """transformers' log-probabilities, [n, V]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1).numpy()


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    arch, overrides = VARIANTS[request.param]
    path = make_tiny(tmp_path_factory.mktemp("tiny"), arch, tokenizer=False, **overrides)
    return path, oracle(path, tokens_of(320))


def bench_of(path: Path, provider: str, dtype: str = "float32") -> Bench:
    made = PROVIDERS[provider](dtype)
    return Bench(made, load(path, made, dtype), dtype=dtype, alternatives=320)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_variant(variant: tuple[Path, np.ndarray], provider: str) -> None:
    path, want = variant
    bench, tokens = bench_of(path, provider), tokens_of(320)
    assert np.ptp(want) > 3  # a flat distribution would agree with anything
    np.testing.assert_allclose(bench.logprobs(1, tokens, CHUNKS), want, atol=1e-4)
    decoded = bench.logprobs(3, tokens, [30] + [1] * (LENGTH - 30))
    np.testing.assert_allclose(decoded, want, atol=1e-4)
    bench.release(1)  # a reused block holds another sequence's K and V
    np.testing.assert_allclose(bench.logprobs(2, tokens[:40], [40]), want[:40], atol=1e-4)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_ragged_batch(tmp_path: Path, provider: str) -> None:
    """Prefill with history, a fresh prefill and a decode in one step; and a softmax over more than one partition."""
    path = make_tiny(tmp_path / "m", "llama", tokenizer=False, max_position_embeddings=1024)
    sequences = {slot: tokens_of(320, length, seed=slot) for slot, length in ((0, 330), (1, 50), (2, 21))}
    want = {slot: oracle(path, tokens) for slot, tokens in sequences.items()}
    bench = bench_of(path, provider)
    bench.logprobs(0, sequences[0][:300], [100, 100, 100])
    bench.logprobs(2, sequences[2][:20], [20])
    rows = bench.step([
        Item(0, 300, sequences[0][300:], [0, 29], target=0, top=320), Item(2, 20, sequences[2][20:], [0], target=0, top=320),
        Item(1, 0, sequences[1], [49], target=0, top=320),
    ])
    got = bench.table(rows)
    np.testing.assert_allclose(got, np.stack([want[0][300], want[0][329], want[2][20], want[1][49]]), atol=1e-4)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_bfloat16_is_near_float32(tmp_path: Path, provider: str) -> None:
    """Rounding where the table says costs little: mean KL to the float32 run of the same weights."""
    path = make_tiny(tmp_path / "m", "llama", tokenizer=False, dtype="bfloat16")
    tokens = tokens_of(320)
    want = bench_of(path, "torch").logprobs(0, tokens, [LENGTH])
    got = bench_of(path, provider, "bfloat16").logprobs(0, tokens, CHUNKS)
    kl = (np.exp(want) * (want - got)).sum(-1).mean()
    assert 1e-9 < kl < 2e-4, kl


@pytest.mark.parametrize("kv", ["bfloat16", "fp8_e4m3", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant_name", ["group-1", "group-3", "head-24", "head-80", "mistral-window", "qwen2-upper-window"])
def test_kv_types(tmp_path: Path, variant_name: str, dtype: str, kv: str) -> None:
    """Both providers give a cache type the same meaning: alike to each other, and much nearer than the type is to float32."""
    arch, overrides = VARIANTS[variant_name]
    path = make_tiny(tmp_path / "m", arch, tokenizer=False, **overrides)
    tokens, got = tokens_of(320, 60), {}
    for provider in PROVIDERS:
        made = PROVIDERS[provider](dtype)
        bench = Bench(made, load(path, made, dtype), dtype=dtype, alternatives=320, kv=kv)
        got[provider] = bench.logprobs(1, tokens, [1, 17, 30, 12])
        bench.release(1)  # dirty blocks, one token at a time at the end: what a row reads is what the cache holds
        again = bench.logprobs(2, tokens, [40] + [1] * 20)
        if provider == "native":
            assert np.array_equal(again, got[provider])
        else:  # torch sums in another order for other shapes, and a value near the middle of two codes takes the other
            assert np.abs(again - got[provider]).mean() < (0.002 if dtype == "float32" else 0.02)
    oracle32 = bench_of(path, "torch").logprobs(0, tokens, [60])
    off = np.abs(got["native"] - got["torch"]).mean()
    distance = np.abs(got["torch"] - oracle32).mean()
    assert off < (0.1 * distance if dtype == "float32" else 0.03), (off, distance)
    assert distance < (1 if kv == "int4" else 0.2), distance


@pytest.mark.parametrize("layout", ["shards", "bfloat16"])
def test_stored_layouts(tmp_path: Path, layout: str) -> None:
    path = make_tiny(tmp_path / "m", "llama", tokenizer=False, **({"shards": 3} if layout == "shards" else {"dtype": "bfloat16"}))
    tokens = tokens_of(320)
    np.testing.assert_allclose(bench_of(path, "torch").logprobs(0, tokens, CHUNKS), oracle(path, tokens), atol=1e-4)
