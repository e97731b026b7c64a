"""Wires an engine: source → spec → provider → weights → KV pool → runner → scheduler → EngineCore. The only file that does.

``build`` makes everything in this process; ``build_core`` the half that computes, without a word of text, for an engine
process of its own. Start-up is told to a Report as it happens; nothing is printed here.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.config import Config
from octavo.engine.console import LOGGER
from octavo.engine.core import EngineCore
from octavo.engine.keeper import check_folder, open_keeper
from octavo.engine.report import Report, phase
from octavo.errors import ConfigError, UnsupportedError
from octavo.kv.manager import KvManager
from octavo.kv.spec import DTYPE_BYTES, KvSpec
from octavo.kv.tier import SwapTier
from octavo.models import registry
from octavo.models.spec import ModelSpec
from octavo.observe.events import Event, TierFailed
from octavo.ops.table import KvStore
from octavo.runner.memory import Ledger, available_memory, default_num_blocks, size
from octavo.runner.runner import Runner
from octavo.runner.tier import FileTier, MemoryTier, TierMemory
from octavo.scheduler.scheduler import Scheduler
from octavo.weights import hub
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.weights.identity import checkpoint_hash
from octavo.weights.packed import LEAST, PackedStore

if TYPE_CHECKING:
    from octavo.engine.textside import TextSide

LOGPROBS_USUAL = 1024  # alternatives per token; with more, they are what is large about a step
HEAD_TILE = 64  # rows of logits at once


@dataclass(frozen=True, slots=True)
class CoreSide:
    """A wired engine, all but the text."""

    core: EngineCore
    scheduler: Scheduler  # the core's, for its counts
    config: Config  # final
    spec: ModelSpec
    ledger: Ledger
    isa: str  # the instruction-set variant of the native kernels, or the other backend's name


@dataclass(frozen=True, slots=True)
class Engine(CoreSide):
    """A wired engine with its text side, in one process."""

    text: "TextSide"


def build(config: Config, report: Report) -> Engine:
    """Make an engine. Raises: ConfigError, CheckpointError, UnsupportedError."""
    from octavo.engine.textside import load_text  # the engine's own process never needs it

    with phase(report, "finding the model"):
        path = hub.resolve(config.model.model, config.model.revision, report.progress)
    with open_checkpoint(path) as checkpoint:
        spec = registry.read_spec(checkpoint)
        cache_dtype(config), context_asked(config, spec)  # an impossible setting is told before anything is read
        with phase(report, "reading the tokenizer"):
            text = load_text(config, path, checkpoint, spec)
        side = build_core(config, checkpoint, spec, report)
    for line in text.notes(spec.vocab):
        report.note(line)
    return Engine(side.core, side.scheduler, side.config, spec, side.ledger, side.isa, text)


def build_core(config: Config, checkpoint: Checkpoint, spec: ModelSpec, report: Report) -> CoreSide:
    """Make the half of an engine that computes. Raises: ConfigError, CheckpointError, UnsupportedError."""
    dtype, stored = compute_dtype(config), stored_types(checkpoint)
    cache_dtype(config), context_asked(config, spec)  # an impossible setting is told before the weights are read
    if config.kv.kv_cache_dir is not None:
        check_folder(config.kv.kv_cache_dir)
    if config.model.quantization == "gguf" and checkpoint.layout != "gguf":
        raise ConfigError('quantization="gguf" keeps the types of a GGUF file; this checkpoint is none: int8 and int4 work for it', "quantization")
    with phase(report, f"loading {spec.num_params / 1e6:.0f} M weights as {config.model.quantization or dtype}"):
        provider = make_provider(config, dtype)
        store = _weight_store(config, checkpoint, provider)
        model = registry.load(checkpoint, provider, dtype, spec=spec, progress=partial(report.progress, "weights"), store=store)
    if store is not None and store.hit:
        report.note("packed weights mapped, as an earlier start made them (--no-enable-weight-cache makes them anew)")
    with phase(report, "preparing the KV pool and the program"):
        kv_spec = KvSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, cache_dtype(config), config.kv.block_size)
        available = available_memory()
        final = resolve(config, spec, dtype=dtype, block_bytes=kv_spec.bytes_per_block, available=available)
        blocks = _make_blocks(final, provider, kv_spec)
        runner = _make_runner(final, provider, model, kv_spec, blocks)
        block_seconds = _time_moves(final, runner)
    kv = KvManager(_blocks(final), final.kv.block_size, prefix_caching=final.kv.enable_prefix_caching, window=spec.reach)
    slots = _tier_slots(final, kv_spec)
    scheduler = Scheduler(final.scheduler, kv, tier=SwapTier(slots) if slots else None, block_seconds=block_seconds)
    core = EngineCore(scheduler, runner)
    core.observers.append(_warn_of_tier)
    core.keeper = open_keeper(final, spec, checkpoint, kv, blocks, report)
    ledger = Ledger(
        weights=getattr(provider, "weight_bytes", spec.num_params * DTYPE_BYTES[dtype]), kv=_blocks(final) * kv_spec.bytes_per_block,
        activations=(runner.program_bytes or activation_bytes(spec, final)) + runner.batch.num_bytes, available=available,
        swap=slots * kv_spec.bytes_per_block if final.kv.kv_swap_path is None else 0,
    )
    if hasattr(provider, "summary"):
        report.note(f"weights {provider.summary()}")
    more = "; dtype=float32 keeps more of it" if dtype == "bfloat16" and stored[0] in ("F16", "F32") else ""
    report.note(f"computing in {dtype}; the checkpoint holds {', '.join(stored)}{more}")
    for line in (*_summary(final, spec, kv_spec, provider), *_tier_line(final, slots, block_seconds), ledger.line()):
        report.note(line)
    return CoreSide(core, scheduler, final, spec, ledger, getattr(provider, "isa", config.runner.backend))


def compute_dtype(config: Config) -> str:
    """The compute dtype: auto is bfloat16."""
    return "bfloat16" if config.model.dtype == "auto" else config.model.dtype


def cache_dtype(config: Config) -> str:
    """What the KV cache holds: auto is the compute dtype. Raises: UnsupportedError for float32 below a narrower compute dtype."""
    dtype, kv = compute_dtype(config), config.kv.kv_cache_dtype
    if kv == "float32" and dtype != "float32":
        raise UnsupportedError(f"kv_cache_dtype='float32' with dtype {dtype} is not served: K and V are rounded to {dtype} (auto)", "kv_cache_dtype")
    return dtype if kv == "auto" else kv


def stored_types(checkpoint: Any) -> list[str]:
    """The types that the checkpoint's tensors are stored in, the one with the most bytes first."""
    sizes: Counter[str] = Counter()
    for name in checkpoint.names():
        sizes[checkpoint.dtype(name)] += checkpoint.nbytes(name)
    return [kind for kind, _ in sizes.most_common()]


def context_asked(config: Config, spec: ModelSpec) -> int:
    """Tokens of context before the pool is looked at. Raises: ConfigError beyond what the model was made for."""
    asked = config.model.max_model_len
    if asked is not None and asked > spec.max_position:
        raise ConfigError(f"max_model_len is {asked}; the model was made for {spec.max_position} tokens at most", "max_model_len")
    return spec.max_position if asked is None else asked


def resolve(config: Config, spec: ModelSpec, *, dtype: str, block_bytes: int, available: int | None) -> Config:
    """The final settings, given the model and the memory: dtype, pool and context are numbers now.

    The effective context is at most what the pool holds; an explicit ``max_model_len`` that does not fit is an error.

    Raises: ConfigError naming the setting and the numbers.
    """
    context, block = context_asked(config, spec), config.kv.block_size
    seqs = config.scheduler.max_num_seqs
    blocks, given = config.kv.num_kv_blocks, "num_kv_blocks"
    if config.kv.kv_cache_memory_bytes is not None:
        blocks, given = config.kv.kv_cache_memory_bytes // block_bytes, "kv_cache_memory_bytes"
        if blocks < 1:
            raise ConfigError(f"kv_cache_memory_bytes is {config.kv.kv_cache_memory_bytes}; one block of {block} tokens takes {block_bytes}", given)
    if blocks is None:
        blocks = default_num_blocks(max_num_seqs=seqs, max_model_len=context, block_size=block, block_bytes=block_bytes, available=available)
    elif available is not None and blocks * block_bytes > available:
        raise ConfigError(
            f"a KV pool of {blocks} blocks takes {size(blocks * block_bytes)}, and {size(available)} are available: "
            f"at most {available // block_bytes} blocks fit", given,
        )
    if config.model.max_model_len is not None and context > blocks * block:
        raise ConfigError(
            f"max_model_len is {context}, and the KV pool of {blocks} blocks holds {blocks * block} tokens: lower max_model_len to "
            f"{blocks * block}, or give num_kv_blocks={math.ceil(context / block)} or more ({size(math.ceil(context / block) * block_bytes)})",
            "max_model_len",
        )
    if config.kv.kv_cache_dir is not None and config.kv.kv_cache_dir_bytes < block_bytes:
        most = config.kv.kv_cache_dir_bytes
        raise ConfigError(f"kv_cache_dir_bytes is {most}; one block of {block} tokens takes {block_bytes}", "kv_cache_dir_bytes")
    _check_tier(config, blocks * block_bytes, block_bytes, available)
    context = min(context, blocks * block)
    return replace(
        config, model=replace(config.model, dtype=dtype, max_model_len=context),
        kv=replace(config.kv, num_kv_blocks=blocks, kv_cache_memory_bytes=None, kv_cache_dtype=cache_dtype(config)),
        scheduler=replace(config.scheduler, max_model_len=context),
    )


def _check_tier(config: Config, pool_bytes: int, block_bytes: int, available: int | None) -> None:
    """Raises: ConfigError for a swap tier without room for a block, or in more memory than there is."""
    swap = config.kv.kv_swap_bytes
    if 0 < swap < block_bytes:
        raise ConfigError(f"kv_swap_bytes is {swap}; one block of {config.kv.block_size} tokens takes {block_bytes}", "kv_swap_bytes")
    if swap and config.kv.kv_swap_path is None and available is not None and pool_bytes + swap > available:
        raise ConfigError(
            f"a swap tier of {size(swap)} (kv_swap_bytes) beside a KV pool of {size(pool_bytes)} does not fit the {size(available)} that are "
            "available: give fewer bytes, or kv_swap_path to keep it in a file", "kv_swap_bytes",
        )


def _tier_slots(config: Config, kv_spec: KvSpec) -> int:
    return config.kv.kv_swap_bytes // kv_spec.bytes_per_block


def _make_tier(config: Config, slots: int, block_bytes: int) -> TierMemory | None:
    """The swap tier's memory, if there is to be one. Raises: ConfigError."""
    if not slots:
        return None
    path = config.kv.kv_swap_path
    return MemoryTier(slots, block_bytes) if path is None else FileTier(path, slots, block_bytes)


def _time_moves(config: Config, runner: Runner) -> float:
    """Seconds that moving a block to the tier or back takes; 0 without a tier. Raises: ConfigError where it cannot be written."""
    if not config.kv.kv_swap_bytes:
        return 0.0
    try:
        return runner.seconds_per_move()
    except OSError as error:
        raise ConfigError(f"the swap tier at {config.kv.kv_swap_path} cannot be used: {error}", "kv_swap_path") from error


def _tier_line(config: Config, slots: int, block_seconds: float) -> Iterator[str]:
    if slots:
        where = "in memory" if config.kv.kv_swap_path is None else f"in a file at {config.kv.kv_swap_path}"
        yield f"swap tier of {slots} blocks {where}, {1e6 * block_seconds:.0f} µs to move one"


def _warn_of_tier(event: Event, _now: float) -> None:
    if isinstance(event, TierFailed):
        LOGGER.warning("the swap tier is given up, preempted requests are computed again: %s", event.message)


def make_provider(config: Config, dtype: str) -> Any:
    """The provider of the backend. Raises: UnsupportedError when its package is not here."""
    if config.runner.backend == "torch":
        try:
            from octavo.ops.torch_ops import TorchProvider
        except ModuleNotFoundError as error:
            raise UnsupportedError(f"the torch backend needs {error.name}: pip install 'octavo[test]'", "backend") from error
        if config.runner.num_threads is not None:
            import torch

            torch.set_num_threads(config.runner.num_threads)
        return TorchProvider(dtype, quantization=config.model.quantization)
    try:
        from octavo.ops.native import NativeProvider
    except ImportError as error:
        raise UnsupportedError(f"the native library is not built ({error}): pip install . builds it", "backend") from error
    return NativeProvider(dtype, num_threads=config.runner.num_threads, quantization=config.model.quantization)


def _weight_store(config: Config, checkpoint: Checkpoint, provider: Any) -> PackedStore | None:
    """Where packed weights are kept; None where that is switched off, the provider packs nothing, or the model is too small to bother."""
    if not config.model.enable_weight_cache or not hasattr(provider, "packing"):
        return None
    if sum(checkpoint.nbytes(name) for name in checkpoint.names()) < LEAST:
        return None
    cache = hub.cache_dir()
    with suppress(OSError):  # then nothing is remembered, and saving tells why
        cache.mkdir(parents=True, exist_ok=True)
    packing = f"{provider.packing}, quantization {config.model.quantization}"
    return PackedStore(cache / "packed", checkpoint_hash(checkpoint.files, cache), packing, LOGGER.warning)


def activation_bytes(spec: ModelSpec, config: Config) -> int:
    """An estimate of the forward pass's buffers at the largest step: one layer's, the residual stream, one tile of logits."""
    act = DTYPE_BYTES[config.model.dtype]
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    row = spec.hidden * (2 * 4 + act) + heads * 4 + spec.num_heads * spec.head_dim * 2 * act + spec.ffn * (2 * 4 + act)
    rows = config.scheduler.max_num_batched_tokens
    return rows * row + min(rows, HEAD_TILE) * spec.vocab * 4


def _make_blocks(config: Config, provider: Any, kv_spec: KvSpec) -> KvStore:
    try:
        store: KvStore = provider.kv_store(kv_spec, _blocks(config))
    except MemoryError as error:
        raise ConfigError(f"the memory for {_blocks(config)} KV blocks cannot be had: {error}", "num_kv_blocks") from error
    return store


def _make_runner(config: Config, provider: Any, model: registry.LoadedModel, kv_spec: KvSpec, store: KvStore) -> Runner:
    tier = _make_tier(config, _tier_slots(config, kv_spec), store.block_bytes)
    try:
        return Runner(
            lambda batch, slots: provider.compile(model.fn, model.weights, model.spec, step=batch.arrays, slots=slots, kv=store),
            kv=store, max_num_seqs=config.scheduler.max_num_seqs, max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=config.scheduler.max_model_len, max_logprobs=config.runner.max_logprobs, vocab=model.spec.vocab,
            block_size=config.kv.block_size, tier=tier,
        )
    except MemoryError as error:
        raise _too_large(config, model.spec.vocab, error) from error


def _too_large(config: Config, vocab: int, error: MemoryError) -> ConfigError:
    """The step's arrays cannot be had: blame the setting that makes them so large."""
    tokens, seqs, context = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs, config.scheduler.max_model_len
    most = config.runner.max_logprobs
    columns = vocab if most < 0 else min(most, vocab)  # of the alternatives' ids and log-probabilities, 8 bytes for each of a step's tokens
    tables = seqs * math.ceil(context / config.kv.block_size) * 4
    if tables > tokens * columns * 8:
        return ConfigError(
            f"the memory for the block tables of {seqs} sequences of {context} tokens ({size(tables)}) cannot be had ({error}): "
            "lower max_num_seqs or max_model_len", "max_num_seqs",
        )
    blamed = "max_logprobs" if columns > LOGPROBS_USUAL else "max_num_batched_tokens"
    return ConfigError(
        f"the memory for a step of {tokens} tokens with {columns} alternatives each ({size(tokens * columns * 8)}) cannot be had ({error}): "
        f"lower {blamed}", blamed,
    )


def _blocks(config: Config) -> int:
    assert config.kv.num_kv_blocks is not None
    return config.kv.num_kv_blocks


def _summary(config: Config, spec: ModelSpec, kv_spec: KvSpec, provider: Any) -> Iterator[str]:
    """The facts of a start, one line each."""
    tokens, context = _blocks(config) * config.kv.block_size, config.scheduler.max_model_len
    native = f": instruction set {provider.isa}, threads {provider.num_threads}" if hasattr(provider, "isa") else ""
    yield f"backend {config.runner.backend}{native}"
    sections = {name: " ".join(f"{key}={value}" for key, value in given.items() if value is not None) for name, given in asdict(config).items()}
    yield f"settings {'; '.join(f'{name}: {values}' for name, values in sections.items())}"
    yield (f"KV pool of {_blocks(config)} blocks: {tokens} tokens in {kv_spec.dtype} at {size(kv_spec.bytes_per_token)} each, "
           f"{tokens / context:.1f} requests of full length at once")
    cut = f", cut from {spec.max_position} to what the KV pool holds" if context == tokens < spec.max_position else f" of {spec.max_position}"
    yield f"context {context} tokens{cut if context < spec.max_position else ''}"
