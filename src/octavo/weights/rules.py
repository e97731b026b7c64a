"""Weight rules: which tensors of a checkpoint make which weight of a model. Data only; loader.py applies them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a checkpoint, by its name in either layout."""

    hf: str
    gguf: str
    shape: tuple[int, ...]
    rotary_heads: int = 0  # heads whose rows GGUF's "llama" stores pairwise (0, D/2, 1, D/2 + 1, …): put back to halves


@dataclass(frozen=True, slots=True)
class WeightRule:
    """``target`` ("layers.3.qkv") is made by the provider's method ``kind`` from the parts, stacked. No parts: None."""

    target: str
    kind: str  # linear | table | vector
    parts: tuple[Part, ...]
    interleave: bool = False  # gate and up, for act="silu_mul"


@dataclass(frozen=True, slots=True)
class Ignored:
    """Tensors that may be there and are not needed: shell patterns by layout, each with its reason in the model's file."""

    hf: tuple[str, ...] = ()
    gguf: tuple[str, ...] = ()
