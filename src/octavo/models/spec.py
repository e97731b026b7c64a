"""ModelSpec: a model's shape, read from config.json or GGUF metadata. Plain data, no tensors, stdlib only."""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import CheckpointError, UnsupportedError
from octavo.models import rope as rotary

HUGE = 1 << 24  # no count in a configuration is larger
MAX_LAYERS, MAX_HEAD = 4096, 8192
SMALLEST, LARGEST = 1e-30, 1e30  # no other number lies outside
GGUF_END_TOKENS = frozenset((  # texts of control tokens that end a turn or a text, whatever the file calls its eos
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|endofturn|>", "<end_of_turn>",
    "<EOT>", "<|EOT|>", "</s>", "<|return|>", "<|call|>", "<｜end▁of▁sentence｜>",
))
GGUF_SPECIAL = (3, 4)  # tokenizer.ggml.token_type: control, user defined


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding over head_dim (halves convention). ``inv_freq`` has head_dim / 2 float32 values, scaling applied."""

    inv_freq: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder-only transformer.

    Raises: CheckpointError, naming the field, when the values contradict each other.
    """

    arch: str  # the registry's key: "llama", "qwen2", …
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    rope: RopeSpec
    max_position: int  # tokens the model was made for
    windows: tuple[int | None, ...]  # sliding window of each layer, in tokens; None: full attention
    tied: bool  # embedding and head are one matrix
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    stored_dtype: str = "bfloat16"  # what the checkpoint holds, for dtype="auto": bfloat16 | float16 | float32
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(f"num_heads ({self.num_heads}) is no multiple of num_kv_heads ({self.num_kv_heads})", "num_kv_heads")
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim must be even for rotary embedding, not {self.head_dim}", "head_dim")
        if len(self.rope.inv_freq) * 2 != self.head_dim:
            raise CheckpointError(f"rope has {len(self.rope.inv_freq)} frequencies for head_dim {self.head_dim}", "rope")
        if not all(math.isfinite(x) and x > 0 for x in self.rope.inv_freq):
            raise CheckpointError("the rotary settings give frequencies that are not finite or not above 0", "rope")
        if len(self.windows) != self.num_layers:
            raise CheckpointError(f"{len(self.windows)} attention windows for {self.num_layers} layers", "layer_types")
        for name, ids in (("eos_token_id", self.eos_ids), ("bos_token_id", () if self.bos_id is None else (self.bos_id,))):
            for token in ids:
                if not 0 <= token < self.vocab:
                    raise CheckpointError(f"{name} {token} is outside the vocabulary of {self.vocab}", name)

    @property
    def reach(self) -> int | None:
        """Tokens back from its own, which counts, that a row of any layer sees; None: all, as one layer at least has full attention."""
        return None if None in self.windows else max(window for window in self.windows if window is not None)

    @property
    def num_params(self) -> int:
        """Weights of the model; a tied head counts once."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden * (2 * q + 2 * kv + 3 * self.ffn + 2)
        layer += self.qkv_bias * (q + 2 * kv) + self.o_bias * self.hidden + self.mlp_bias * (2 * self.ffn + self.hidden)
        return self.num_layers * layer + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)


class Fields:
    """Typed, checked access to a configuration. Raises CheckpointError naming the key and its value."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values = values
        self.source = source  # "config.json", "GGUF metadata": for messages
        self.prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value; absent and null are the default."""
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """The raw value, which must be there."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.source} lacks {self.prefix + key}", self.prefix + key)
        return value

    def whole(self, key: str, default: int | None = None, low: int = 1, high: int = HUGE) -> int:
        """A whole number in low … high; without a default it must be there."""
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
            raise self.bad(key, value, f"a whole number from {low} to {high}")
        return int(value)

    def number(self, key: str, default: float | None = None, *, zero: bool = False) -> float:
        """A number above 0 (``zero``: or 0) of a sane size."""
        value = self.need(key) if default is None else self.get(key, default)
        real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not real or not (SMALLEST <= value <= LARGEST or (zero and value == 0)):
            raise self.bad(key, value, f"a finite number {'from' if zero else 'above'} 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, value, "true or false")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; none when absent."""
        value = self.get(key, [])
        values = value if isinstance(value, list | tuple) else [value]
        for token in values:
            if isinstance(token, bool) or not isinstance(token, numbers.Integral) or not -HUGE <= int(token) <= HUGE:
                raise self.bad(key, token, "a token id or a list of them")
        return tuple(int(token) for token in values)

    def bad(self, key: str, value: object, wanted: str) -> CheckpointError:
        """The error for a value that cannot be."""
        return CheckpointError(f"{self.source}: {self.prefix + key} must be {wanted}, not {value!r:.80}", self.prefix + key)


def from_config(
    arch: str, config: Mapping[str, Any], generation: Mapping[str, Any] | None, traits: Callable[[Fields, int], dict[str, Any]],
    kv_heads: int | None = None,
) -> ModelSpec:
    """Read config.json. ``generation`` is generation_config.json, if there is one.

    ``traits(fields, num_layers)`` gives what differs by family: windows and biases. ``kv_heads``: where the family's
    configuration class has a number for an absent num_key_value_heads (an explicit null always means: as many as heads).
    """
    c = Fields(config, "config.json")
    if c.get("quantization_config"):
        method = c.get("quantization_config").get("quant_method", "unknown") if isinstance(c.get("quantization_config"), dict) else "unknown"
        raise UnsupportedError(f"config.json: weights quantized by {method!r:.80} are not served yet; use a bfloat16 checkpoint or a GGUF file",
                               "quantization_config")
    act = c.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise UnsupportedError(f"config.json: hidden_act {act!r:.80} is not served; silu is", "hidden_act")
    hidden, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    if c.get("head_dim") is None and hidden % heads:
        raise CheckpointError(f"config.json: hidden_size ({hidden}) is no multiple of num_attention_heads ({heads}), and there is no head_dim",
                              "hidden_size")
    head_dim = c.whole("head_dim", hidden // heads, high=MAX_HEAD)
    layers = c.whole("num_hidden_layers", high=MAX_LAYERS)
    default_kv = heads if kv_heads is None or "num_key_value_heads" in config else kv_heads
    eos = c.ids("eos_token_id") + Fields(generation or {}, "generation_config.json").ids("eos_token_id")
    bos = c.ids("bos_token_id")
    return ModelSpec(
        arch=arch, num_layers=layers, hidden=hidden, num_heads=heads, num_kv_heads=c.whole("num_key_value_heads", default_kv),
        head_dim=head_dim, ffn=c.whole("intermediate_size"), vocab=c.whole("vocab_size"), eps=c.number("rms_norm_eps", 1e-6, zero=True),
        rope=_config_rope(c, head_dim), max_position=c.whole("max_position_embeddings", high=1 << 31),
        tied=c.flag("tie_word_embeddings", False), stored_dtype=_stored(c), eos_ids=tuple(dict.fromkeys(eos)),
        bos_id=bos[0] if bos else None, **traits(c, layers),
    )


def _stored(c: Fields) -> str:
    name = str(c.get("dtype", c.get("torch_dtype", "bfloat16"))).removeprefix("torch.")
    if name not in ("bfloat16", "float16", "float32"):
        raise UnsupportedError(f"config.json: weights in {name!r:.80} are not served; bfloat16, float16 and float32 are", "dtype")
    return name


def _config_rope(c: Fields, head_dim: int) -> RopeSpec:
    """``rope_parameters`` (one dictionary), or ``rope_scaling`` with ``rope_theta`` beside it: both spellings are in use."""
    scaling = c.get("rope_scaling") or c.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise c.bad("rope_parameters", scaling, "a dictionary")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise UnsupportedError("config.json: rope_parameters that differ by layer type are not served", "rope_parameters")
    r = Fields(scaling, "config.json, rope_parameters")
    kind = r.get("rope_type", r.get("type", "default"))
    theta = r.number("rope_theta", c.number("rope_theta", 10_000.0))
    for fields in (r, c):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedError("config.json: rotary embedding over a part of the head is not served", "partial_rotary_factor")
    inv_freq = rotary.base_frequencies(theta, head_dim)
    if kind == "linear":
        inv_freq = rotary.linear_scaling(inv_freq, r.number("factor"))
    elif kind == "llama3":
        original = c.get("original_max_position_embeddings") or r.get("original_max_position_embeddings") or c.need("max_position_embeddings")
        low, high = r.number("low_freq_factor"), r.number("high_freq_factor")
        if low >= high:
            raise CheckpointError(f"config.json: low_freq_factor ({low:g}) must be below high_freq_factor ({high:g})", "low_freq_factor")
        context = Fields({"original_max_position_embeddings": original}, r.source).number("original_max_position_embeddings")
        inv_freq = rotary.llama3_scaling(inv_freq, r.number("factor"), low, high, context)
    elif kind != "default":
        raise UnsupportedError(f"config.json: rope type {kind!r:.80} is not served; default, linear and llama3 are", "rope_type")
    return RopeSpec(tuple(inv_freq))


def from_gguf(
    arch: str, metadata: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], rope_factors: Sequence[float] | None = None
) -> ModelSpec:
    """Read a GGUF file's metadata. ``shapes``: of every tensor by name. ``rope_factors``: rope_freqs.weight, where it exists."""
    g = Fields(metadata, "GGUF metadata", f"{arch}.")
    for key, neutral in (("expert_count", 0), ("attention.scale", 0), ("logit_scale", 1), ("residual_scale", 1), ("embedding_scale", 1)):
        if g.get(key, neutral) not in (0, neutral):
            raise UnsupportedError(f"GGUF metadata: {arch}.{key} = {g.get(key)!r:.80} is not served", f"{arch}.{key}")
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(g.get(key), list | tuple):
            raise UnsupportedError(f"GGUF metadata: {arch}.{key} that differs by layer is not served", f"{arch}.{key}")
    hidden, heads = g.whole("embedding_length"), g.whole("attention.head_count")
    if g.get("attention.key_length") is None and hidden % heads:
        raise CheckpointError(f"GGUF metadata: {arch}.embedding_length ({hidden}) is no multiple of {arch}.attention.head_count ({heads})",
                              f"{arch}.embedding_length")
    head_dim = g.whole("attention.key_length", hidden // heads, high=MAX_HEAD)
    if (values := g.whole("attention.value_length", head_dim)) != head_dim:
        raise UnsupportedError(f"GGUF metadata: keys of {head_dim} with values of {values} are not served", g.prefix + "attention.value_length")
    if (turned := g.whole("rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedError(f"GGUF metadata: rotary embedding over {turned} of {head_dim} is not served", f"{arch}.rope.dimension_count")
    layers = g.whole("block_count", high=MAX_LAYERS)
    tokens = _list(Fields(metadata, "GGUF metadata"), "tokenizer.ggml.tokens")
    table = shapes.get("token_embd.weight")
    vocab = g.whole("vocab_size", len(tokens) if tokens else int(table[0]) if table else None)
    bos = Fields(metadata, "GGUF metadata").ids("tokenizer.ggml.bos_token_id")
    return ModelSpec(
        arch=arch, num_layers=layers, hidden=hidden, num_heads=heads, num_kv_heads=g.whole("attention.head_count_kv", heads),
        head_dim=head_dim, ffn=g.whole("feed_forward_length"), vocab=vocab, eps=g.number("attention.layer_norm_rms_epsilon", zero=True),
        rope=_gguf_rope(g, head_dim, rope_factors), max_position=g.whole("context_length", high=1 << 31),
        windows=_gguf_windows(g, layers), tied="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes, o_bias="blk.0.attn_output.bias" in shapes, mlp_bias="blk.0.ffn_down.bias" in shapes,
        stored_dtype="float32" if metadata.get("general.file_type") == 0 else "bfloat16",
        eos_ids=gguf_eos_ids(metadata), bos_id=bos[0] if bos else None,
    )


def _gguf_rope(g: Fields, head_dim: int, factors: Sequence[float] | None) -> RopeSpec:
    inv_freq = rotary.base_frequencies(g.number("rope.freq_base", 10_000.0), head_dim)
    factor = g.number("rope.scaling.factor", g.number("rope.scale_linear", 1.0))
    kind = g.get("rope.scaling.type", "linear")
    if kind == "linear":
        inv_freq = rotary.linear_scaling(inv_freq, factor)
    elif kind != "none":
        raise UnsupportedError(f"GGUF metadata: rope scaling {kind!r:.80} is not served; none, linear and rope_freqs.weight are",
                               g.prefix + "rope.scaling.type")
    return RopeSpec(tuple(inv_freq if factors is None else rotary.divided(inv_freq, factors)))


def _gguf_windows(g: Fields, layers: int) -> tuple[int | None, ...]:
    if isinstance(g.get("attention.sliding_window_pattern"), list | tuple | int):
        raise UnsupportedError("GGUF metadata: sliding windows that differ by layer are not served", g.prefix + "attention.sliding_window_pattern")
    return (g.whole("attention.sliding_window", 0, low=0, high=1 << 31) or None,) * layers


def gguf_eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text: the file's eos, eot and eom, and control tokens known by their text."""
    fields = Fields(metadata, "GGUF metadata", "tokenizer.ggml.")
    found = [token for key in ("eos_token_id", "eot_token_id", "eom_token_id") for token in fields.ids(key)]
    tokens, types = _list(fields, "tokens"), _list(fields, "token_type")
    if types and len(types) != len(tokens):
        raise CheckpointError(f"GGUF metadata: {len(types)} tokenizer.ggml.token_type for {len(tokens)} tokens", "tokenizer.ggml.token_type")
    for token, text in enumerate(tokens):
        if isinstance(text, str) and text in GGUF_END_TOKENS and (not types or types[token] in GGUF_SPECIAL):
            found.append(token)
    return tuple(dict.fromkeys(found))


def _list(fields: Fields, key: str) -> Sequence[Any]:
    values = fields.get(key, ())
    if not isinstance(values, list | tuple):
        raise fields.bad(key, values, "a list")
    return values
