"""Applies weight rules to a checkpoint: strict about names and shapes, one weight in memory at a time."""

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from octavo.errors import CheckpointError
from octavo.ops.table import Provider, Stored
from octavo.quant import bf16, ggml
from octavo.weights.packed import PackedStore
from octavo.weights.rules import Ignored, Part, WeightRule

if TYPE_CHECKING:
    import numpy as np

PIECE = 1 << 17  # numbers looked at together: they stay in the cache
SHOWN = 8  # names in one message
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


def load_weights(
    checkpoint: Any, rules: Iterable[WeightRule], provider: Provider, dtype: str, *, layout: str, ignored: Ignored | None = None,
    pairwise_rotary: bool = False, progress: Callable[[int, int], None] | None = None, store: PackedStore | None = None,
) -> SimpleNamespace:
    """Read every weight that the rules name and give it to the provider.

    ``layout`` ("hf" | "gguf") chooses the names. ``dtype``: matrices and tables are handed over as bfloat16 bits (uint16)
    or float32, norms and biases always as float32; to a provider that quantizes, matrices go as they are read, or as they
    are stored, if it keeps that. ``pairwise_rotary``: rows of rotary heads are put back to halves. ``progress(done, total)``
    counts bytes handed over. ``store``: where packed weights may be found, and are kept. Returns an object with the rules'
    targets as attributes (``w.layers[3].qkv``); a rule without parts is None; without a rule for it the head is the embedding.

    Raises: CheckpointError naming missing, unexpected and misshapen tensors, before anything is read, and then the first
    tensor that holds a NaN or an infinity (also one that only the compute dtype makes of a number).
    """
    rules = list(rules)
    check_tensors(checkpoint, rules, layout, ignored or Ignored())
    recipe = [layout, pairwise_rotary, *rules]
    handles = store.load(recipe, provider) if store is not None else None
    if handles is None:
        handles = _read_all(checkpoint, rules, provider, dtype, layout, pairwise_rotary, progress)
        if store is not None:
            store.save(recipe, provider, handles)
    weights = SimpleNamespace(layers=[])
    for rule in rules:
        _place(weights, rule.target, handles[rule.target])
    if not hasattr(weights, "head"):
        weights.head = weights.embed
    return weights


def _read_all(
    checkpoint: Any, rules: Sequence[WeightRule], provider: Provider, dtype: str, layout: str, pairwise_rotary: bool,
    progress: Callable[[int, int], None] | None,
) -> dict[str, Any]:
    """Every rule's handle, by its target."""
    sizes = [sum(_count(part) for part in rule.parts) * (4 if rule.kind == "vector" else DTYPE_BYTES[dtype]) for rule in rules]
    total, done = sum(sizes), 0
    handles = {}
    for rule, size in zip(rules, sizes):
        handles[rule.target] = _make(checkpoint, rule, provider, dtype, layout, pairwise_rotary) if rule.parts else None
        done += size
        if progress is not None and size:
            progress(done, total)
    return handles


def check_tensors(checkpoint: Any, rules: Sequence[WeightRule], layout: str, ignored: Ignored) -> None:
    """Compare the checkpoint's names and shapes with the rules'. Raises: CheckpointError."""
    wanted = {getattr(part, layout): part.shape for rule in rules for part in rule.parts}
    present = set(checkpoint.names())
    if missing := [name for name in wanted if name not in present]:
        raise CheckpointError(f"the checkpoint lacks {len(missing)} of {len(wanted)} tensors: {_some(missing)}", missing[0])
    patterns = getattr(ignored, layout)
    extra = sorted(name for name in present - wanted.keys() if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
    if extra:
        raise CheckpointError(f"the checkpoint holds {len(extra)} tensors that the model has no place for: {_some(extra)}", extra[0])
    for name, shape in wanted.items():
        if tuple(checkpoint.shape(name)) != shape:
            raise CheckpointError(f"{name} has the shape {list(checkpoint.shape(name))}; the configuration asks for {list(shape)}", name)


def _some(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _count(part: Part) -> int:
    count = 1
    for length in part.shape:
        count *= length
    return count


def _make(checkpoint: Any, rule: WeightRule, provider: Provider, dtype: str, layout: str, pairwise_rotary: bool) -> Any:
    if rule.kind != "vector":
        names = [getattr(part, layout) for part in rule.parts]
        if provider.keeps([checkpoint.dtype(name) for name in names], [part.shape for part in rule.parts], rule.interleave):
            return _give(provider, rule, [_stored(checkpoint, name, part, pairwise_rotary) for name, part in zip(names, rule.parts)])
    quantizes = rule.kind != "vector" and provider.quantization not in (None, "gguf")
    kept = None if quantizes else "float32" if rule.kind == "vector" else dtype  # None: as it is read, to be rounded once
    tensors = []
    for part in rule.parts:
        name = getattr(part, layout)
        tensor = checkpoint.read(name)
        tensor = tensor if kept is None else convert(tensor, kept)
        if (where := first_not_finite(tensor)) is not None:
            precision = kept or checkpoint.dtype(name)
            raise CheckpointError(
                f"{name} holds a number that is not finite in {precision}, at {list(where)}: damaged, or its training diverged", name
            )
        tensors.append(to_halves(tensor, part.rotary_heads) if pairwise_rotary and part.rotary_heads else tensor)
    return _give(provider, rule, tensors)


def _give(provider: Provider, rule: WeightRule, tensors: list[Any]) -> Any:
    if rule.kind == "linear":
        return provider.linear(tensors, interleave=rule.interleave)
    return provider.table(tensors[0]) if rule.kind == "table" else provider.vector(tensors)


def _stored(checkpoint: Any, name: str, part: Part, pairwise_rotary: bool) -> Stored:
    kind, raw = checkpoint.dtype(name), checkpoint.read_stored(name)
    if not ggml.scales_finite(raw, kind):
        raise CheckpointError(f"{name} holds a scale that is not finite: damaged, or its training diverged", name)
    if pairwise_rotary and part.rotary_heads:
        raw = to_halves(raw, part.rotary_heads)
    return Stored(kind, raw, part.shape, lambda: ggml.dequantize(raw, kind, name).reshape(part.shape))


def convert(tensor: "np.ndarray", dtype: str) -> "np.ndarray":
    """float32, or uint16 holding bfloat16 bits, to ``dtype`` in the same convention; rounds to nearest even."""
    held = "bfloat16" if tensor.dtype == "uint16" else "float32"
    if held == dtype:
        return tensor
    return bf16.to_bits(tensor) if dtype == "bfloat16" else bf16.from_bits(tensor)


def first_not_finite(tensor: "np.ndarray") -> tuple[int, ...] | None:
    """Where a float32 or bfloat16 (uint16) tensor first holds a NaN or an infinity; None if nowhere. 0.04 s for 134 M bfloat16."""
    import numpy as np

    bits, exponent = (tensor, np.uint16(0x7F80)) if tensor.dtype == np.uint16 else (tensor.view(np.uint32), np.uint32(0x7F800000))
    flat = bits.reshape(-1)
    room = np.empty(min(PIECE, flat.size), bits.dtype)
    for start in range(0, flat.size, PIECE):
        piece = flat[start : start + PIECE]
        found = np.bitwise_and(piece, exponent, out=room[: piece.size])
        if found.max() == exponent:
            return tuple(int(i) for i in np.unravel_index(start + int(found.argmax()), tensor.shape))
    return None


def to_halves(tensor: "np.ndarray", heads: int) -> "np.ndarray":
    """Rows of each head from pairwise order (0, D/2, 1, D/2 + 1, …) to halves (0, 1, …). Shapes: [heads·D, …] → the same."""
    rest = tensor.shape[1:]
    return tensor.reshape(heads, -1, 2, *rest).swapaxes(1, 2).reshape(tensor.shape)


def _place(weights: SimpleNamespace, target: str, value: Any) -> None:
    if not target.startswith("layers."):
        setattr(weights, target, value)
        return
    _, index, name = target.split(".")
    while len(weights.layers) <= int(index):
        weights.layers.append(SimpleNamespace())
    setattr(weights.layers[int(index)], name, value)
