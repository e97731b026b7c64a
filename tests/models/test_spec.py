import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoints import make_tiny, tiny_config

from octavo.errors import CheckpointError, UnsupportedError
from octavo.models import registry
from octavo.models.cost import step_cost
from octavo.models.spec import Fields, ModelSpec, from_gguf, gguf_eos_ids
from octavo.weights.checkpoint import open_checkpoint

GGUF = {
    "general.architecture": "llama", "llama.block_count": 2, "llama.embedding_length": 64, "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2, "llama.feed_forward_length": 96, "llama.context_length": 512,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.tokens": ["a", "b", "<|im_end|>", "<|eot_id|>"],
    "tokenizer.ggml.token_type": [1, 1, 3, 1], "tokenizer.ggml.eos_token_id": 1,
}


class Config:
    """A checkpoint of which only the configuration is looked at."""

    layout = "hf"

    def __init__(self, config: dict[str, Any], generation: dict[str, Any] | None = None) -> None:
        self.config, self.generation_config = config, generation or {}


def spec_of(arch: str = "llama", generation: dict[str, Any] | None = None, **overrides: Any) -> ModelSpec:
    config = {k: v for k, v in tiny_config(arch, **overrides).items() if v is not Config}  # Config: leave the key out
    return registry.read_spec(Config(config, generation))


def gguf_of(shapes: dict[str, tuple[int, ...]] | None = None, factors: list[float] | None = None, **overrides: Any) -> ModelSpec:
    return from_gguf("llama", {k: v for k, v in (GGUF | overrides).items() if v is not Config}, shapes or {}, factors)


def test_plain_llama() -> None:
    s = spec_of()
    assert (s.arch, s.num_layers, s.hidden, s.num_heads, s.num_kv_heads, s.head_dim, s.ffn, s.vocab) == ("llama", 3, 64, 4, 2, 16, 96, 320)
    assert (s.windows, s.tied, s.qkv_bias, s.o_bias, s.mlp_bias, s.stored_dtype) == ((None,) * 3, False, False, False, False, "float32")
    assert len(s.rope.inv_freq) == 8 and s.rope.inv_freq[0] == 1.0


def test_parameters_are_counted_as_the_file_holds_them(tmp_path: Path) -> None:
    biases = {"attention_bias": True, "mlp_bias": True}
    for i, (arch, more) in enumerate([("llama", {}), ("qwen2", {"tie_word_embeddings": True}), ("llama", biases)]):
        checkpoint = open_checkpoint(make_tiny(tmp_path / str(i), arch, tokenizer=False, **more))
        total = sum(int(np.prod(checkpoint.shape(name))) for name in checkpoint.names())
        assert registry.read_spec(checkpoint).num_params == total


def test_end_tokens_are_the_union() -> None:
    assert spec_of(generation={"eos_token_id": [2, 0]}).eos_ids == (2, 0)
    assert spec_of(eos_token_id=[5, 6], generation={"eos_token_id": 7}).eos_ids == (5, 6, 7)
    assert spec_of(eos_token_id=None).eos_ids == ()


@pytest.mark.parametrize(("arch", "overrides", "windows"), [
    ("llama", {"sliding_window": 5}, (None, None, None)),  # not a key of Llama's
    ("mistral", {}, (None, None, None)),
    ("mistral", {"sliding_window": 7}, (7, 7, 7)),
    ("mistral", {"sliding_window": Config}, (4096, 4096, 4096)),
    ("qwen2", {"sliding_window": 7}, (None, None, None)),
    ("qwen2", {"sliding_window": 7, "use_sliding_window": True}, (None, None, None)),  # max_window_layers is 28
    ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 2}, (None, None, 7)),
    ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}, (7, 7, 7)),
    ("qwen2", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, (None, None, None)),
    ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0, "layer_types": ["full_attention"] * 3}, (None,) * 3),
])
def test_windows(arch: str, overrides: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert spec_of(arch, **overrides).windows == windows


@pytest.mark.parametrize(("arch", "heads"), [("llama", 8), ("mistral", 8), ("qwen2", 32)])
def test_absent_kv_heads_mean_what_the_configuration_class_says(arch: str, heads: int) -> None:
    size = {"num_attention_heads": 32, "hidden_size": 512} if arch != "llama" else {"num_attention_heads": 8}
    assert spec_of(arch, num_key_value_heads=Config, **size).num_kv_heads == heads
    assert spec_of(arch, num_key_value_heads=None, **size).num_kv_heads == size["num_attention_heads"]


@pytest.mark.parametrize("rope", [
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 1024}},
    {"rope_parameters": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0,
                         "original_max_position_embeddings": 1024}},
    {"rope_scaling": {"type": "linear", "factor": 3.0}},
    {"rope_scaling": {"rope_type": "default"}, "rope_theta": 1000000.0},
    {"rope_theta": 100000},
    {"rope_parameters": None, "rope_theta": Config},
])
@pytest.mark.parametrize("head_dim", [24, 64, 128])
def test_frequencies_are_transformers(tmp_path: Path, rope: dict[str, Any], head_dim: int) -> None:
    pytest.importorskip("torch")
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = {k: v for k, v in tiny_config(head_dim=head_dim, **rope).items() if v is not Config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    want = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path)).inv_freq.numpy()
    got = np.array(spec_of(head_dim=head_dim, **rope).rope.inv_freq, np.float32)
    np.testing.assert_allclose(got, want, rtol=2e-7)  # torch's float32 power is off by a bit now and then


@pytest.mark.parametrize(("overrides", "field"), [
    ({"num_attention_heads": 0}, "num_attention_heads"), ({"hidden_size": -64}, "hidden_size"), ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers"), ({"vocab_size": "many"}, "vocab_size"), ({"vocab_size": True}, "vocab_size"),
    ({"hidden_size": 66}, "hidden_size"), ({"intermediate_size": Config}, "intermediate_size"), ({"intermediate_size": 9.5}, "intermediate_size"),
    ({"num_key_value_heads": 3}, "num_kv_heads"), ({"head_dim": 15}, "head_dim"), ({"head_dim": 0}, "head_dim"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"), ({"rms_norm_eps": -1.0}, "rms_norm_eps"), ({"rope_theta": 0}, "rope_theta"),
    ({"rope_theta": float("inf")}, "rope_theta"), ({"max_position_embeddings": None}, "max_position_embeddings"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"), ({"rope_scaling": {"type": "linear"}}, "factor"),
    ({"rope_scaling": [1]}, "rope_parameters"), ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0,
                                                                   "high_freq_factor": 4.0}}, "low_freq_factor"),
    ({"eos_token_id": 320}, "eos_token_id"), ({"eos_token_id": "</s>"}, "eos_token_id"), ({"bos_token_id": -1}, "bos_token_id"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"), ({"architectures": None}, "architectures"), ({"architectures": []}, "architectures"),
    ({"attention_bias": 1}, "attention_bias"),
])
def test_nonsense_names_the_field(overrides: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        spec_of(**overrides)
    assert caught.value.param == field and field in caught.value.message


@pytest.mark.parametrize(("overrides", "field"), [
    ({"layer_types": ["full_attention"]}, "layer_types"), ({"layer_types": ["full_attention", "chunked", "full_attention"]}, "layer_types"),
    ({"layer_types": ["sliding_attention"] * 3}, "layer_types"), ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
    ({"use_sliding_window": 1}, "use_sliding_window"),
])
def test_nonsense_windows(overrides: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        spec_of("qwen2", **overrides)
    assert caught.value.param == field


@pytest.mark.parametrize(("overrides", "words"), [
    ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM.*MistralForCausalLM.*Qwen2ForCausalLM"),
    *(({"rope_scaling": {"rope_type": kind, "factor": 2.0}}, kind) for kind in ("yarn", "longrope", "dynamic", "su", "mrope")),
    ({"hidden_act": "gelu"}, "gelu"), ({"quantization_config": {"quant_method": "gptq"}}, "gptq"), ({"torch_dtype": "float8_e4m3fn"}, "float8"),
    ({"partial_rotary_factor": 0.5}, "part of the head"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer type"),
])
def test_known_but_not_served(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        spec_of(**overrides)


def test_gguf() -> None:
    s = gguf_of({"token_embd.weight": (4, 64), "output.weight": (4, 64), "blk.0.attn_q.bias": (64,)})
    assert (s.num_layers, s.hidden, s.num_heads, s.num_kv_heads, s.head_dim, s.ffn, s.vocab, s.max_position) == (2, 64, 4, 2, 16, 96, 4, 512)
    assert not s.tied and s.qkv_bias and not s.o_bias and s.eos_ids == (1, 2)
    assert gguf_of().tied
    assert gguf_of(**{"llama.attention.key_length": 32, "llama.attention.value_length": 32}).head_dim == 32
    assert gguf_of(**{"llama.attention.head_count_kv": Config}).num_kv_heads == 4
    plain, linear = gguf_of().rope.inv_freq, gguf_of(**{"llama.rope.scaling.factor": 2.0}).rope.inv_freq
    assert linear == tuple(x / 2 for x in plain)
    assert gguf_of(**{"llama.rope.scaling.factor": 2.0, "llama.rope.scaling.type": "none"}).rope.inv_freq == plain
    assert gguf_of(factors=[1.0, 2.0] * 4).rope.inv_freq == tuple(x / (1 + i % 2) for i, x in enumerate(plain))


@pytest.mark.parametrize("key", [
    "llama.block_count", "llama.embedding_length", "llama.attention.head_count", "llama.feed_forward_length", "llama.context_length",
    "llama.attention.layer_norm_rms_epsilon",
])
def test_missing_gguf_metadata_names_the_key(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"lacks {key}") as caught:
        gguf_of(**{key: Config})
    assert caught.value.param == key


@pytest.mark.parametrize(("overrides", "error"), [
    ({"llama.expert_count": 8}, UnsupportedError), ({"llama.rope.scaling.type": "yarn"}, UnsupportedError),
    ({"llama.attention.head_count": [4, 4]}, UnsupportedError), ({"llama.attention.value_length": 8}, UnsupportedError),
    ({"llama.rope.dimension_count": 8}, UnsupportedError), ({"llama.block_count": 0}, CheckpointError),
    ({"llama.embedding_length": 65}, CheckpointError), ({"llama.context_length": "long"}, CheckpointError),
    ({"tokenizer.ggml.eos_token_id": 9}, CheckpointError),
])
def test_gguf_metadata_that_cannot_be(overrides: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        gguf_of(**overrides)
    assert caught.value.param is not None


@pytest.mark.parametrize("factors", [[1.0], [0.0] * 8, [float("nan")] * 8])
def test_gguf_rope_factors_are_checked(factors: list[float]) -> None:
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        gguf_of(factors=factors)


def test_gguf_end_tokens() -> None:
    ids = gguf_eos_ids({"tokenizer.ggml.eos_token_id": 4, "tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 4,
                        "tokenizer.ggml.tokens": ["x", "<|endoftext|>", "<|im_end|>", "</s>", "e"], "tokenizer.ggml.token_type": [1, 3, 1, 3, 3]})
    assert ids == (4, 3, 1)  # an ordinary token that only looks like an end is none
    assert gguf_eos_ids({"tokenizer.ggml.tokens": ["x", "<|im_end|>"]}) == (1,)


def test_fields_read_numpy_numbers() -> None:
    assert Fields({"a": np.int32(3), "b": np.float32(0.5)}, "x").whole("a") == 3
    assert Fields({"b": np.float32(0.5)}, "x").number("b") == 0.5


anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers() | st.text(max_size=3), max_size=3)
anything |= st.sampled_from([0, 1, -1, 3, 64, 10**400, 1e308, 1e-320, [[]], {"rope_type": "llama3"}, {"factor": 1e-29, "rope_type": "linear"}])
CONFIG_KEYS = [*tiny_config(), "head_dim", "rope_scaling", "rope_parameters", "sliding_window", "layer_types", "use_sliding_window",
               "max_window_layers", "attention_bias", "quantization_config", "original_max_position_embeddings", "partial_rotary_factor"]
GGUF_KEYS = [*GGUF, "llama.rope.freq_base", "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.attention.key_length",
             "llama.rope.dimension_count", "llama.vocab_size", "llama.attention.sliding_window", "tokenizer.ggml.bos_token_id", "llama.expert_count"]


@settings(max_examples=300, deadline=None)
@given(arch=st.sampled_from(["llama", "mistral", "qwen2"]), changes=st.dictionaries(st.sampled_from(CONFIG_KEYS), anything, max_size=3))
def test_any_config_gives_a_spec_or_a_typed_error(arch: str, changes: dict[str, Any]) -> None:
    try:
        spec_of(arch, generation=changes, **changes)
    except (CheckpointError, UnsupportedError) as error:
        assert error.message and error.param and len(error.message) < 400


@settings(max_examples=300, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(GGUF_KEYS), anything, max_size=3))
def test_any_gguf_metadata_gives_a_spec_or_a_typed_error(changes: dict[str, Any]) -> None:
    try:
        registry.find(metadata=GGUF | changes)
        gguf_of(**changes)
    except (CheckpointError, UnsupportedError) as error:
        assert error.message and error.param and len(error.message) < 400


def test_a_decode_step_costs_the_weights_once_and_two_flops_a_weight() -> None:
    s = spec_of(hidden_size=512, num_attention_heads=8, num_key_value_heads=8, intermediate_size=2048, num_hidden_layers=6, vocab_size=32000)
    one, many = step_cost(s, [(1, 1)], 1), step_cost(s, [(1, 1)] * 64, 64)
    matrices = s.num_params - s.vocab * s.hidden  # of the embedding one row is read
    assert one.bytes == pytest.approx(2 * matrices, rel=0.02) and one.flops == pytest.approx(2 * matrices, rel=0.02)
    assert many.flops == pytest.approx(64 * one.flops) and many.bytes < 1.5 * one.bytes
    long = step_cost(s, [(1, 1001)], 1)
    assert long.bytes - one.bytes == 1000 * 2 * 6 * 512 * 2  # K and V of a thousand more tokens
    none, last, all_of_them = (step_cost(s, [(100, 100)], rows).flops for rows in (0, 1, 100))
    per_row = 2 * s.hidden * (s.num_heads * s.head_dim + 3 * s.ffn + s.vocab)  # of the last layer and the head
    assert 0.9 * per_row < last - none < 1.1 * per_row and 0.9 * 100 * per_row < all_of_them - none < 1.1 * 100 * per_row
    windowed = spec_of("mistral", sliding_window=10)
    assert step_cost(windowed, [(1, 500)], 1) == step_cost(windowed, [(1, 10)], 1)
