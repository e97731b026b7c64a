"""Models with quantized weights: both providers give a format the same meaning, and it stays near the unquantized model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoints import make_tiny, random_weights, tiny_config
from tests.harness import Bench, load
from tests.models.test_parity import tokens_of
from tests.models.test_smollm2 import CHUNKS, PROMPT
from tests.weights.test_loader import write_gguf

from octavo.ops.native import NativeProvider
from octavo.ops.torch_ops import TorchProvider

MAKERS: dict[str, Any] = {
    "native": lambda dtype, q: NativeProvider(dtype, 2, quantization=q), "torch": lambda dtype, q: TorchProvider(dtype, quantization=q),
}
QUANTIZATIONS = ["int8", "int4", "int4_g128"]


def logprobs(path: Any, provider: str, dtype: str, quantization: str | None, tokens: list[int], chunks: list[int]) -> np.ndarray:
    made = MAKERS[provider](dtype, quantization)
    model = load(path, made, dtype)
    return Bench(made, model, dtype=dtype, alternatives=model.spec.vocab).logprobs(1, tokens, chunks)


def divergence(want: np.ndarray, got: np.ndarray) -> float:
    return float((np.exp(want, dtype=np.float64) * (want.astype(np.float64) - got)).sum(-1).mean())


def agree(path: Any, quantization: str) -> None:
    """Providers differ by roundings, which may put a value on the next code; the format differs from float32 by much more."""
    tokens, chunks = tokens_of(320, 60), [1, 17, 30, 12]
    native, torch, plain = (logprobs(path, p, "float32", q, tokens, chunks) for p, q in
                            (("native", quantization), ("torch", quantization), ("native", None)))
    between, lost = divergence(torch, native), divergence(plain, native)
    assert between < lost / 10 and 1e-7 < lost < 0.3, (between, lost)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_providers_agree(tmp_path: Path, arch: str, quantization: str) -> None:
    agree(make_tiny(tmp_path / "m", arch, tokenizer=False, tie_word_embeddings=arch == "qwen2", attention_bias=arch == "llama"), quantization)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_providers_agree_on_a_stored_mixture(tmp_path: Path, arch: str) -> None:
    """Every part in another type, gate and up in one; q and k of Llama with their rows pairwise in the file."""
    config = tiny_config(arch)
    types = {"attn_q": "Q5_0", "attn_k": "Q4_0", "attn_v": "Q8_0", "attn_output": "Q4_1", "ffn_gate": "Q5_1", "ffn_up": "Q5_1", "ffn_down": "Q8_0",
             "token_embd": "Q5_0"}
    write_gguf(tmp_path / "model.gguf", config, random_weights(config, 0, 0.1), arch, types=types)
    tokens, chunks = tokens_of(320, 60), [1, 17, 30, 12]
    native, torch, plain = (logprobs(tmp_path / "model.gguf", p, "float32", q, tokens, chunks) for p, q in
                            (("native", "gguf"), ("torch", "gguf"), ("native", None)))
    between, lost = divergence(torch, native), divergence(plain, native)
    assert between < lost / 4 and 1e-8 < lost < 1e-2, (between, lost)  # what is lost is the activations' 8 bits alone


@pytest.mark.model
@pytest.mark.parametrize(("quantization", "most"), [("int8", 2e-2), ("gguf", 1e-2), ("int4", 3e-2)])
def test_smollm2_stays_near(smollm2: str, quantization: str, most: float) -> None:
    """Mean divergence from the dequantized weights in float32, over a text of 87 tokens."""
    want = logprobs(smollm2, "native", "float32", None, PROMPT, CHUNKS)
    lost = divergence(want, logprobs(smollm2, "native", "bfloat16", quantization, PROMPT, CHUNKS))
    assert 1e-4 < lost < most, lost
