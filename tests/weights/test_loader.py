"""The loader over tiny checkpoints: strict names and shapes, dtypes, both layouts, progress."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoints import make_tiny, random_weights, save_weights, tiny_config

from octavo.errors import CheckpointError, UnsupportedError
from octavo.models import registry
from octavo.ops.table import Stored
from octavo.quant import bf16
from octavo.weights import loader
from octavo.weights.checkpoint import open_checkpoint


class Recorder:
    """A provider that keeps the host tensors it is given, and those of ``types`` as they are stored."""

    def __init__(self, quantization: str | None = None, types: Sequence[str] = ()) -> None:
        self.quantization, self.types = quantization, types

    def keeps(self, types: Sequence[str], shapes: Sequence[tuple[int, ...]], interleave: bool) -> bool:
        return all(kind in self.types for kind in types)

    def linear(self, parts: Sequence[Any], *, interleave: bool = False) -> Any:
        return ("linear", list(parts), interleave)

    def table(self, table: Any) -> Any:
        return ("table", [table], False)

    def vector(self, parts: Sequence[Any]) -> Any:
        return ("vector", list(parts), False)


def load(path: Path, dtype: str = "float32", **more: Any) -> Any:
    with open_checkpoint(path) as checkpoint:
        return registry.load(checkpoint, Recorder(), dtype, **more)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_weight_arrives(tmp_path: Path, stored: str, dtype: str) -> None:
    path = make_tiny(tmp_path, "llama", tokenizer=False, dtype=stored, attention_bias=True, mlp_bias=True)
    torch = pytest.importorskip("torch")
    values = random_weights(tiny_config(attention_bias=True, mlp_bias=True), 0, 0.1)
    want = {k: torch.from_numpy(v).to(getattr(torch, stored)).float() for k, v in values.items()}
    matrix = {k: v.to(getattr(torch, dtype)).float().numpy() for k, v in want.items()}
    w = load(path, dtype).weights

    def same(handle: Any, kind: str, names: Sequence[str], values: dict[str, Any], interleave: bool = False) -> None:
        assert (handle[0], handle[2]) == (kind, interleave)
        for got, name in zip(handle[1], names, strict=True):
            assert got.dtype == (np.uint16 if kind != "vector" and dtype == "bfloat16" else np.float32)
            np.testing.assert_array_equal(bf16.from_bits(got) if got.dtype == np.uint16 else got, np.asarray(values[name]))

    same(w.embed, "table", ["model.embed_tokens.weight"], matrix)
    same(w.head, "table", ["lm_head.weight"], matrix)
    same(w.norm, "vector", ["model.norm.weight"], want)
    assert len(w.layers) == 3
    for i, layer in enumerate(w.layers):
        names = {
            "n1": ["input_layernorm.weight"], "n2": ["post_attention_layernorm.weight"],
            "qkv": [f"self_attn.{x}_proj.weight" for x in "qkv"], "qkv_b": [f"self_attn.{x}_proj.bias" for x in "qkv"],
            "o": ["self_attn.o_proj.weight"], "o_b": ["self_attn.o_proj.bias"],
            "gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"], "gate_up_b": ["mlp.gate_proj.bias", "mlp.up_proj.bias"],
            "down": ["mlp.down_proj.weight"], "down_b": ["mlp.down_proj.bias"],
        }
        for target, parts in names.items():
            vector = target.startswith("n") or target.endswith("_b")
            full = [f"model.layers.{i}.{part}" for part in parts]
            same(getattr(layer, target), "vector" if vector else "linear", full, want if vector else matrix, target == "gate_up")


def test_absent_biases_are_none_and_a_tied_head_is_the_table(tmp_path: Path) -> None:
    w = load(make_tiny(tmp_path, "llama", tokenizer=False, tie_word_embeddings=True)).weights
    assert w.head is w.embed
    assert all(getattr(layer, name) is None for layer in w.layers for name in ("qkv_b", "o_b", "gate_up_b", "down_b"))


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, "llama", tokenizer=False)
    seen: list[tuple[int, int]] = []
    spec = load(path, "bfloat16", progress=lambda done, total: seen.append((done, total))).spec
    vectors = (2 * spec.num_layers + 1) * spec.hidden
    total = (spec.num_params - vectors) * 2 + vectors * 4
    assert seen[-1] == (total, total) and len({t for _, t in seen}) == 1
    assert [d for d, _ in seen] == sorted({d for d, _ in seen})  # rises at every call


def rewrite(path: Path, change: Any) -> Path:
    """The tiny checkpoint at ``path`` with its tensors changed."""
    make_tiny(path, "llama", tokenizer=False)
    weights = random_weights(tiny_config(), 0, 0.1)
    change(weights)
    save_weights(path, weights)
    return path


def test_missing_tensors_are_named_and_counted(tmp_path: Path) -> None:
    def drop(weights: dict[str, Any]) -> None:
        for name in [n for n in weights if "layers.1." in n or n == "lm_head.weight"]:
            del weights[name]

    with pytest.raises(CheckpointError, match=r"lacks 10 of 30 tensors: model\.layers\.1\.input_layernorm\.weight, .* and 2 more$") as caught:
        load(rewrite(tmp_path, drop))
    assert caught.value.param == "model.layers.1.input_layernorm.weight"


def test_unexpected_tensors_are_named(tmp_path: Path) -> None:
    extra = {"model.layers.3.input_layernorm.weight": np.ones(64, np.float32), "model.layers.0.self_attn.q_norm.weight": np.ones(16, np.float32)}
    with pytest.raises(CheckpointError, match=r"holds 2 tensors .*layers\.0\.self_attn\.q_norm\.weight, model\.layers\.3"):
        load(rewrite(tmp_path, lambda weights: weights.update(extra)))


def test_an_untied_model_with_biases_it_does_not_declare_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"o_proj\.bias"):
        load(rewrite(tmp_path, lambda weights: weights.update({"model.layers.0.self_attn.o_proj.bias": np.ones(64, np.float32)})))


def test_known_harmless_tensors_are_passed_over(tmp_path: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    assert load(rewrite(tmp_path / "a", lambda weights: weights.update(buffer))).weights.norm
    make_tiny(tmp_path / "b", "llama", tokenizer=False, tie_word_embeddings=True)
    save_weights(tmp_path / "b", random_weights(tiny_config(), 0, 0.1))  # with an lm_head.weight
    w = load(tmp_path / "b").weights
    assert w.head is w.embed


def test_a_wrong_shape_tells_both(tmp_path: Path) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.down_proj\.weight has the shape \[96, 64\].*asks for \[64, 96\]") as caught:
        load(rewrite(tmp_path, lambda weights: weights.update({name: weights[name].T.copy()})))
    assert caught.value.param == name


def test_nothing_is_read_before_all_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rewrite(tmp_path, lambda weights: weights.pop("model.norm.weight"))
    with open_checkpoint(path) as checkpoint:
        monkeypatch.setattr(checkpoint, "read", lambda name: pytest.fail(f"read {name}"))
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
            registry.load(checkpoint, Recorder(), "float32")


def write_gguf(
    path: Path, config: dict[str, Any], weights: dict[str, Any], arch: str, factors: Any = None, types: dict[str, str] | None = None
) -> None:
    """As converters write it: Llama's q and k rows pairwise, tensors under GGUF's names. ``types``: of matrices, by the last part of their names."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("gguf.quants")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
             "model.layers.": "blk."}
    for name, value in weights.items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
        if arch == "llama" and heads:
            value = np.ascontiguousarray(value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape))
        for old, new in names.items():
            name = name.replace(old, new)
        kind = (types or {}).get(name.split(".")[-2]) if value.ndim == 2 else None
        if kind is None:
            writer.add_tensor(name, value)
        else:
            stored = getattr(gguf.GGMLQuantizationType, kind)
            writer.add_tensor(name, gguf.quants.quantize(value, stored), raw_dtype=stored)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("arch", "overrides"), [("llama", {"attention_bias": True}), ("llama", {"tie_word_embeddings": True}), ("qwen2", {})])
def test_gguf_gives_what_safetensors_give(tmp_path: Path, arch: str, overrides: dict[str, Any]) -> None:
    config = tiny_config(arch, **overrides)
    weights = random_weights(config, 0, 0.1)
    path = tmp_path / "model.gguf"
    write_gguf(path, config, weights, arch, factors=np.full(8, 2, np.float32) if arch == "llama" else None)
    got = load(path)
    want = load(make_tiny(tmp_path / "hf", arch, tokenizer=False, **overrides))
    pairs = [(want.weights, got.weights), *zip(want.weights.layers, got.weights.layers, strict=True)]
    for a, b in pairs:
        assert vars(a).keys() == vars(b).keys()
        for name in vars(a).keys() - {"layers"}:
            x, y = getattr(a, name), getattr(b, name)
            assert (x is None) == (y is None), name
            if x is not None:
                assert (x[0], x[2]) == (y[0], y[2])
                for u, v in zip(x[1], y[1], strict=True):
                    np.testing.assert_array_equal(u, v, err_msg=name)
    assert got.spec.tied == want.spec.tied
    scale = 2 if arch == "llama" else 1
    assert got.spec.rope.inv_freq == tuple(x / scale for x in want.spec.rope.inv_freq)


def test_gguf_with_two_sets_of_rope_factors_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(config, 0, 0.1) | {"rope_factors_long.weight": np.ones(8, np.float32)}
    write_gguf(tmp_path / "m.gguf", config, weights, "llama")
    with pytest.raises(UnsupportedError, match="longrope"):
        load(tmp_path / "m.gguf")


def test_unknown_gguf_architecture_lists_what_is_served(tmp_path: Path) -> None:
    config = tiny_config()
    write_gguf(tmp_path / "m.gguf", config, {}, "rwkv6")
    with pytest.raises(UnsupportedError, match=r"'rwkv6' is not served; these are: llama, qwen2"):
        load(tmp_path / "m.gguf")


def test_to_halves_undoes_the_pairwise_order() -> None:
    heads, size = 3, 8
    halves = np.arange(heads * size * 2, dtype=np.float32).reshape(heads * size, 2)
    order = [h * size + i // 2 + (size // 2 if i % 2 else 0) for h in range(heads) for i in range(size)]
    np.testing.assert_array_equal(loader.to_halves(halves[order], heads), halves)
    np.testing.assert_array_equal(loader.to_halves(halves[order, 0], heads), halves[:, 0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("stored", "name", "place"), [
    ("float32", "model.layers.1.mlp.down_proj.weight", (5, 7)), ("bfloat16", "model.embed_tokens.weight", (319, 63)),
    ("float16", "model.layers.2.input_layernorm.weight", (0,)),
])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_weight_that_is_no_number_is_named(tmp_path: Path, value: float, stored: str, name: str, place: tuple[int, ...], dtype: str) -> None:
    path = make_tiny(tmp_path, tokenizer=False)
    weights = random_weights(tiny_config(), 0, 0.1)
    weights[name][place] = value
    save_weights(path, weights, dtype=stored)
    with pytest.raises(CheckpointError) as caught:
        load(path, dtype)
    kept = "float32" if "norm" in name else dtype
    assert caught.value.param == name and caught.value.message.startswith(f"{name} holds a number that is not finite in {kept}, at {list(place)}")


def test_a_number_that_only_bfloat16_cannot_hold(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, tokenizer=False)
    weights = random_weights(tiny_config(), 0, 0.1)
    weights["lm_head.weight"][3, 2] = np.float32(3.4e38)
    save_weights(path, weights)
    load(path, "float32")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight holds a number that is not finite in bfloat16, at \[3, 2\]"):
        load(path, "bfloat16")


def test_the_place_is_right_beyond_the_first_piece() -> None:
    tensor = np.ones((3, loader.PIECE), np.float32)
    assert loader.first_not_finite(tensor) is None
    tensor[2, 1] = np.inf
    assert loader.first_not_finite(tensor) == (2, 1)
    assert loader.first_not_finite(np.zeros((0, 4), np.float32)) is None


def test_what_a_provider_keeps_comes_as_it_is_stored(tmp_path: Path) -> None:
    """Matrices whose parts the provider all keeps: bytes, rows of rotary heads in halves. All others as numbers."""
    config = tiny_config("llama")
    path = tmp_path / "model.gguf"
    types = {"attn_q": "Q5_0", "attn_k": "Q5_0", "attn_v": "Q8_0", "attn_output": "Q4_1", "token_embd": "Q8_0"}
    write_gguf(path, config, random_weights(config, 0, 0.1), "llama", types=types)
    with open_checkpoint(path) as checkpoint:
        w = registry.load(checkpoint, Recorder("gguf", ("Q5_0", "Q8_0")), "bfloat16").weights
        plain = registry.load(checkpoint, Recorder(), "float32").weights
        assert isinstance(w.embed[1][0], Stored) and w.embed[1][0].type == "Q8_0"
        np.testing.assert_array_equal(w.embed[1][0].raw, checkpoint.read_stored("token_embd.weight"))
        q, k, v = w.layers[1].qkv[1]
        assert [(part.type, part.shape) for part in (q, k, v)] == [("Q5_0", (64, 64)), ("Q5_0", (32, 64)), ("Q8_0", (32, 64))]
        for part, numbers in zip((q, k, v), plain.layers[1].qkv[1], strict=True):
            np.testing.assert_array_equal(part.numbers(), numbers)
        assert w.layers[1].o[1][0].dtype == np.uint16  # Q4_1: not kept
        # Providers that quantize round once: they are given what is read.
        assert registry.load(checkpoint, Recorder("int8"), "bfloat16").weights.layers[0].o[1][0].dtype == np.float32


def test_a_stored_scale_that_is_no_number_is_told(tmp_path: Path) -> None:
    config = tiny_config("llama")
    path = tmp_path / "model.gguf"
    write_gguf(path, config, random_weights(config, 0, 0.1), "llama", types={"ffn_down": "Q8_0"})
    with open_checkpoint(path) as checkpoint:
        raw = checkpoint.read_stored("blk.2.ffn_down.weight")
        at = path.read_bytes().index(raw.tobytes())
    data = bytearray(path.read_bytes())
    data[at + 34 * 5 : at + 34 * 5 + 2] = np.array([np.inf], np.float16).tobytes()
    path.write_bytes(data)
    with open_checkpoint(path) as checkpoint, pytest.raises(CheckpointError, match=r"blk\.2\.ffn_down\.weight holds a scale that is not finite"):
        registry.load(checkpoint, Recorder("gguf", ("Q8_0",)), "bfloat16")
