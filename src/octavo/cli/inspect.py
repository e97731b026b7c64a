"""`octavo inspect`: what a model is, what it costs, what fits, and how it would run here. Loads no weights."""

import json
import sys
from typing import Annotated, Any

import typer

from octavo.cli import options as o

LENGTHS = (2048, 8192, 32768, 131072)


def inspect(
    model: o.Model, revision: o.Revision = None, dtype: o.Dtype = None,
    kv_cache_memory_bytes: o.KvBytes = None, kv_cache_dtype: o.KvDtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same facts as one JSON object.")] = False,
) -> None:
    """Tell a model's architecture, parameters, KV bytes per token, what fits this machine, and the instruction set chosen."""
    from octavo.cli.terminal import Startup
    from octavo.weights import hub

    with Startup() as startup:  # shows a download, if there is one
        path = hub.resolve(model, revision, startup.progress)
    facts = gather(path, dtype or "auto", kv_cache_memory_bytes, kv_cache_dtype or "auto")
    if as_json:
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        _print(facts)


def gather(path: Any, dtype: str, kv_bytes: int | None, kv_dtype: str = "auto") -> dict[str, Any]:
    """The facts, from the model's headers and the machine. Raises: CheckpointError, ConfigError, UnsupportedError."""
    from octavo.engine.factory import cache_dtype, compute_dtype, stored_types
    from octavo.engine.settings import make_config
    from octavo.kv.spec import DTYPE_BYTES, KvSpec
    from octavo.models import registry
    from octavo.ops.native import chosen_isa, native_info
    from octavo.ops.threads import allowed_threads
    from octavo.runner.memory import available_memory, default_num_blocks
    from octavo.weights.checkpoint import open_checkpoint

    config = make_config(str(path), dtype=dtype, kv_cache_memory_bytes=kv_bytes, kv_cache_dtype=kv_dtype)
    compute = compute_dtype(config)
    with open_checkpoint(path) as checkpoint:
        spec = registry.read_spec(checkpoint)
        stored = stored_types(checkpoint)
        stored_bytes = sum(checkpoint.nbytes(name) for name in checkpoint.names())
    kv = KvSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, cache_dtype(config))
    weights, available = spec.num_params * DTYPE_BYTES[compute], available_memory()
    left = None if available is None else max(0, available - weights)
    blocks = kv_bytes // kv.bytes_per_block if kv_bytes is not None else default_num_blocks(
        max_num_seqs=config.scheduler.max_num_seqs, max_model_len=spec.max_position, block_size=kv.block_size,
        block_bytes=kv.bytes_per_block, available=left)
    tokens = blocks * kv.block_size
    lengths = sorted({n for n in LENGTHS if n < spec.max_position} | {spec.max_position})
    return {
        "path": str(path), "architecture": spec.arch, "layers": spec.num_layers, "hidden": spec.hidden, "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "ffn": spec.ffn, "vocab": spec.vocab, "tied": spec.tied,
        "context": spec.max_position, "sliding_window": max((w for w in spec.windows if w), default=None),
        "parameters": spec.num_params, "stored": stored, "stored_bytes": stored_bytes, "dtype": compute, "weight_bytes": weights,
        "kv_cache_dtype": kv.dtype, "kv_bytes_per_token": kv.bytes_per_token, "kv_bytes_per_block": kv.bytes_per_block, "available_bytes": available,
        "fits": left is None or left > kv.bytes_per_block, "kv_pool_blocks": blocks, "kv_pool_tokens": tokens,
        "requests_at": {n: tokens // n for n in lengths}, "isa": chosen_isa(), "isas": native_info()["available"].split(","),
        "threads": allowed_threads(), "compiler": native_info()["compiler"],
    }


def _print(facts: dict[str, Any]) -> None:
    from octavo.cli.terminal import columns
    from octavo.runner.memory import size

    window = f", sliding window {facts['sliding_window']}" if facts["sliding_window"] else ""
    rows = [
        ("model", facts["path"]),
        ("architecture", f"{facts['architecture']}: {facts['layers']} layers, hidden {facts['hidden']}, {facts['heads']} query and "
                         f"{facts['kv_heads']} KV heads of {facts['head_dim']}, feed-forward {facts['ffn']}{window}"),
        ("vocabulary", f"{facts['vocab']:,} tokens, embedding and head {'tied' if facts['tied'] else 'apart'}"),
        ("context", f"{facts['context']:,} tokens"),
        ("parameters", f"{facts['parameters']:,}"),
        ("stored as", f"{', '.join(facts['stored'])} ({size(facts['stored_bytes'])})"),
        ("computed in", f"{facts['dtype']}: weights take {size(facts['weight_bytes'])}"),
        ("KV cache", f"{facts['kv_cache_dtype']}: {size(facts['kv_bytes_per_token'])} a token, {size(facts['kv_bytes_per_block'])} a block of 16"),
        ("memory", "unknown" if facts["available_bytes"] is None else f"{size(facts['available_bytes'])} available"
                   + ("" if facts["fits"] else ": the weights do NOT fit")),
        ("KV pool", f"{facts['kv_pool_blocks']:,} blocks = {facts['kv_pool_tokens']:,} tokens by default: "
                    + ", ".join(f"{count} × {n:,}" for n, count in facts["requests_at"].items()) + " tokens at once"),
        ("instruction set", f"{facts['isa']} (available: {', '.join(facts['isas'])}), {facts['threads']} threads"),
        ("native library", f"compiled by {facts['compiler']}"),
    ]
    sys.stdout.write(columns(rows))
