"""Tiny random checkpoints in Hugging Face layout, made without transformers: config, weights, tokenizer, chat template.

Use it from any test: ``make_tiny(tmp_path / "m", arch="qwen2", num_attention_heads=6)``.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
VOCAB = 320
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ["The quick brown fox jumps over the lazy dog.", "An octavo is a sheet folded into sixteen pages;", "a block holds sixteen tokens.",
          "def add(a, b):\n    return a + b\n", "0 1 2 3 10 100 1000", "the there then them they"]


def make_tiny(
    path: str | Path, arch: str = "llama", *, seed: int = 0, shards: int = 1, dtype: str = "float32", scale: float = 0.1, tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a checkpoint to ``path`` and return it. ``overrides`` are keys of config.json (None stays null).

    ``scale``: standard deviation of the matrices; norms lie around 1. ``dtype``: float32 | bfloat16 | float16 of the file.
    ``shards`` > 1 writes an index. The same arguments give the same bytes.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = tiny_config(arch, dtype, **overrides)
    _write(path / "config.json", config)
    _write(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2, 0]})
    save_weights(path, random_weights(config, seed, scale), shards, dtype)
    if tokenizer:
        write_tokenizer(path, config["vocab_size"])
    return path


def tiny_config(arch: str = "llama", dtype: str = "float32", **overrides: Any) -> dict[str, Any]:
    """A config.json of a few thousand weights: 3 layers of 4 heads over 2, head size 16."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]], "model_type": arch, "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": dtype, "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if arch == "mistral":
        config["sliding_window"] = None
    return config | overrides


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what transformers would save for this config."""
    d, f = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or d // heads
    q, kv = heads * size, (config.get("num_key_value_heads") or heads) * size
    qwen = config["model_type"] == "qwen2"
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], d)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (d,), "post_attention_layernorm": (d,), "self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d), "self_attn.o_proj": (d, q), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f),
        }
        for name, shape in layer.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
            attention = config.get("attention_bias", False) or (qwen and "o_proj" not in name)
            if ("self_attn" in name and attention) or ("mlp" in name and config.get("mlp_bias", False)):
                shapes[f"model.layers.{i}.{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (d,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    return shapes


def random_weights(config: dict[str, Any], seed: int, scale: float) -> dict[str, np.ndarray]:
    """Float32 tensors: norms around 1, everything else around 0."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in tensor_shapes(config).items():
        values = rng.standard_normal(shape, np.float32)
        weights[name] = 1 + values * np.float32(0.1) if "norm" in name else values * np.float32(scale)
    return weights


def save_weights(path: Path, weights: dict[str, np.ndarray], shards: int = 1, dtype: str = "float32") -> None:
    """model.safetensors, or several files and their index."""
    import torch
    from safetensors.torch import save_file

    tensors = {name: torch.from_numpy(value).to(getattr(torch, dtype)) for name, value in weights.items()}
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    where = {}
    for i in range(shards):
        names = list(tensors)[i::shards]
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in names}, path / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    _write(path / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where})


def write_tokenizer(path: Path, vocab: int, corpus: Sequence[str] = CORPUS) -> None:
    """A byte-level BPE of at most ``vocab`` entries (256 bytes, SPECIAL, merges from the corpus) with its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=special, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
                                  show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    assert tokenizer.get_vocab_size() <= vocab, (tokenizer.get_vocab_size(), vocab)
    tokenizer.save(str(path / "tokenizer.json"))
    _write(path / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[2],
        "add_bos_token": False, "clean_up_tokenization_spaces": False, "model_max_length": 2048, "chat_template": CHAT_TEMPLATE,
        "added_tokens_decoder": {str(i): {"content": text, "special": True, "normalized": False, "lstrip": False, "rstrip": False,
                                          "single_word": False} for i, text in enumerate(SPECIAL)},
    })


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))
