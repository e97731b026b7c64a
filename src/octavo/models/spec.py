"""ModelSpec: a model's shape, read from config.json or GGUF metadata. Plain data, no tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding over head_dim (halves convention). ``inv_freq`` has head_dim / 2 float32 values, scaling applied."""

    inv_freq: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder-only transformer."""

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
    stored_dtype: str = "bfloat16"  # what the checkpoint holds, for dtype="auto"
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
