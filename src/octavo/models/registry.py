"""What is served: one Family per architecture, found by its name in config.json or in GGUF metadata."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from octavo.errors import CheckpointError, UnsupportedError
from octavo.models import llama, qwen
from octavo.models.spec import Fields, ModelSpec, from_config, from_gguf
from octavo.ops.table import Provider
from octavo.weights.packed import PackedStore
from octavo.weights.rules import Ignored, WeightRule


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture is read and run."""

    arch: str
    hf: tuple[str, ...]  # config.json's architectures
    model: Callable[..., Any]
    rules: Callable[[ModelSpec], Iterator[WeightRule]]
    ignored: Callable[[ModelSpec], Ignored]
    traits: Callable[[Fields, int], dict[str, Any]]
    gguf: str | None = None  # general.architecture
    pairwise_rotary: bool = False  # GGUF only: q and k rows are stored pairwise
    kv_heads: int | None = None  # what an absent num_key_value_heads means; None: as many as heads


FAMILIES = {
    family.arch: family
    for family in (
        Family("llama", ("LlamaForCausalLM",), llama.llama, llama.rules, llama.ignored, llama.llama_traits, gguf="llama", pairwise_rotary=True),
        Family("mistral", ("MistralForCausalLM",), llama.llama, llama.rules, llama.ignored, llama.mistral_traits, kv_heads=8),
        Family("qwen2", ("Qwen2ForCausalLM",), qwen.qwen2, llama.rules, llama.ignored, qwen.qwen2_traits, gguf="qwen2", kv_heads=32),
    )
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for ``Provider.compile(model.fn, model.weights, model.spec, …)``."""

    spec: ModelSpec
    fn: Callable[..., Any]
    weights: Any


def find(config: dict[str, Any] | None = None, metadata: Any = None) -> Family:
    """The family of a config.json or of GGUF metadata. Raises: UnsupportedError listing what is served."""
    if metadata is not None:
        name = Fields(metadata, "GGUF metadata").need("general.architecture")
        found = next((f for f in FAMILIES.values() if f.gguf == name), None)
        served = sorted(f.gguf for f in FAMILIES.values() if f.gguf)
    else:
        names = Fields(config or {}, "config.json").need("architectures")
        if not isinstance(names, list) or not names:
            raise CheckpointError(f"config.json: architectures must be a list of names, not {names!r:.80}", "architectures")
        name = names[0]
        found = next((f for f in FAMILIES.values() if name in f.hf), None)
        served = sorted(name for f in FAMILIES.values() for name in f.hf)
    if found is None:
        raise UnsupportedError(f"architecture {name!r:.80} is not served; these are: {', '.join(served)}", "architectures")
    return found


def read_spec(checkpoint: Any) -> ModelSpec:
    """The shape of a checkpoint's model. Raises: CheckpointError, UnsupportedError, naming the field."""
    if checkpoint.layout == "hf":
        family = find(config=checkpoint.config)
        return from_config(family.arch, checkpoint.config, checkpoint.generation_config, family.traits, family.kv_heads)
    metadata, names = checkpoint.metadata, set(checkpoint.names())
    family = find(metadata=metadata)
    if unserved := [name for name in ("rope_factors_long.weight", "rope_factors_short.weight") if name in names]:
        raise UnsupportedError(f"{unserved[0]}: longrope scaling is not served", unserved[0])
    factors = checkpoint.read("rope_freqs.weight").tolist() if "rope_freqs.weight" in names else None
    return from_gguf(family.arch, metadata, {name: checkpoint.shape(name) for name in names}, factors)


def load(
    checkpoint: Any, provider: Provider, dtype: str, *, spec: ModelSpec | None = None, progress: Callable[[int, int], None] | None = None,
    store: PackedStore | None = None,
) -> LoadedModel:
    """Read the spec (unless given) and all weights. ``dtype``: bfloat16 | float32. See weights.loader.load_weights."""
    from octavo.weights.loader import load_weights  # numpy with it, which a process that only reads the spec, the server's, does without

    spec = spec or read_spec(checkpoint)
    family = FAMILIES[spec.arch]
    weights = load_weights(
        checkpoint, family.rules(spec), provider, dtype, layout=checkpoint.layout, ignored=family.ignored(spec),
        pairwise_rotary=checkpoint.layout == "gguf" and family.pairwise_rotary, progress=progress, store=store,
    )
    return LoadedModel(spec, family.model, weights)
