"""From what a caller writes to a checked Config: types and ranges here, what depends on the model in factory.resolve()."""

import math
import os
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from octavo.config import BLOCK_SIZE, KEPT_BYTES, Config, KvConfig, ModelConfig, RunnerConfig, SchedulerConfig
from octavo.engine.compat import check_others
from octavo.errors import ConfigError, UnsupportedError, shown

DTYPES = {"auto": "auto", "bfloat16": "bfloat16", "float32": "float32", "float": "float32"}
KNOWN_DTYPES = ("float16", "half")
KV_DTYPES = {**DTYPES, "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "int8": "int8", "int4": "int4"}
KNOWN_KV_DTYPES = (*KNOWN_DTYPES, "fp8_e5m2", "fp8_inc", "nvfp4")
QUANTIZATIONS = ("int8", "int4", "int4_g128", "gguf")
KNOWN_QUANTIZATIONS = ("awq", "awq_marlin", "gptq", "gptq_marlin", "marlin", "fp8", "fbgemm_fp8", "bitsandbytes", "compressed-tensors",
                       "modelopt", "torchao", "hqq", "aqlm", "deepspeedfp", "experts_int8", "ipex", "quark", "moe_wna16", "auto-round", "mxfp4")
POLICIES = ("fcfs", "priority", "lpm", "fair")
ADMISSIONS = ("optimistic", "predicted")
MODES = ("auto", "swap", "recompute")
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e6
LONGEST_MS = 1e9  # of a target; more is a mistake
MOST_THREADS = 1024  # the native pool's limit
MOST = 2**20  # sequences or tokens of one step; more is a mistake
DEFAULT_BATCHED_TOKENS = 512
MOST_DIGITS = 32  # of a length written as text; a longer one is too large, whatever its unit
UNITS = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}  # vLLM's


def make_config(
    model: Any, *, dtype: Any = "auto", quantization: Any = None, max_model_len: Any = None, max_num_seqs: Any = 256,
    max_num_batched_tokens: Any = None, block_size: Any = BLOCK_SIZE, num_kv_blocks: Any = None, kv_cache_memory_bytes: Any = None,
    enable_prefix_caching: Any = None, kv_cache_dtype: Any = "auto", num_threads: Any = None, seed: Any = 0, tokenizer: Any = None,
    revision: Any = None, scheduling_policy: Any = "fcfs", tenant_weights: Any = None, admission: Any = "optimistic", target_itl_ms: Any = None,
    kv_cache_dir: Any = None, kv_cache_dir_bytes: Any = None,
    kv_swap_bytes: Any = None, kv_swap_path: Any = None, swap_space: Any = None, preemption_mode: Any = "auto",
    max_logprobs: Any = 20, generation_config: Any = "auto", chat_template: Any = None, backend: Any = "native", enable_weight_cache: Any = None,
    **others: Any,
) -> Config:
    """Check every setting by itself and sort it into its section; names are vLLM's. ``others``: see engine/compat.py.

    Raises: ConfigError for an impossible value, UnsupportedError for a known one that is not served; both name the setting.
    """
    check_others(others, (make_config.__kwdefaults__ or {}).keys())
    if not isinstance(model, str) or not model:
        model = _path(model, "model", "a directory, a .gguf file, a Hub id or a short name")
    for name, value in (("revision", revision), ("tokenizer", tokenizer), ("chat_template", chat_template)):
        if value is not None and (not isinstance(value, str) or not value):
            raise ConfigError(f"{name} must be a non-empty string or None, not {shown(value)}", name)
    if quantization is not None and (not isinstance(quantization, str) or quantization not in QUANTIZATIONS):
        works = "int8, int4 and int4_g128 quantize any checkpoint at load, gguf keeps a GGUF file's types, None computes in dtype"
        known = isinstance(quantization, str) and quantization in KNOWN_QUANTIZATIONS
        error = UnsupportedError if known else ConfigError
        raise error(f"quantization={shown(quantization)} is not served: {works}", "quantization")
    for name, value in (("enable_prefix_caching", enable_prefix_caching), ("enable_weight_cache", enable_weight_cache)):
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{name} must be true, false or None, not {shown(value)}", name)
    if _whole(block_size, "block_size", 1) != BLOCK_SIZE:
        raise UnsupportedError(f"block_size must be {BLOCK_SIZE}, the width of a kernel tile, not {shown(block_size)}", "block_size")
    if num_kv_blocks is not None and kv_cache_memory_bytes is not None:
        raise ConfigError(
            f"num_kv_blocks ({shown(num_kv_blocks)}) and kv_cache_memory_bytes ({shown(kv_cache_memory_bytes)}) both set the pool's size: "
            "give one of them",
            "num_kv_blocks",
        )
    kv = KvConfig(
        num_kv_blocks=_maybe(num_kv_blocks, "num_kv_blocks", 1, 2**31 // BLOCK_SIZE - 1),
        kv_cache_memory_bytes=_maybe(kv_cache_memory_bytes, "kv_cache_memory_bytes", 1, 2**63 - 1),
        kv_cache_dtype=_dtype(kv_cache_dtype, "kv_cache_dtype", KV_DTYPES, KNOWN_KV_DTYPES),
        enable_prefix_caching=enable_prefix_caching is not False, kv_cache_dir=_cache_dir(kv_cache_dir, enable_prefix_caching),
        kv_cache_dir_bytes=_cache_dir_bytes(kv_cache_dir_bytes, kv_cache_dir),
        kv_swap_bytes=(swap := _swap_bytes(kv_swap_bytes, swap_space)),
        kv_swap_path=_swap_path(kv_swap_path, swap),
    )
    tokens = _maybe(max_num_batched_tokens, "max_num_batched_tokens", 1, MOST)
    scheduler = SchedulerConfig(
        max_num_seqs=_whole(max_num_seqs, "max_num_seqs", 1, MOST),
        max_num_batched_tokens=DEFAULT_BATCHED_TOKENS if tokens is None else tokens,
        policy=_choice(scheduling_policy, "scheduling_policy", POLICIES), tenant_weights=_weights(tenant_weights, scheduling_policy),
        admission=_choice(admission, "admission", ADMISSIONS), target_itl_ms=_milliseconds(target_itl_ms, "target_itl_ms"),
        preemption_mode=_choice(preemption_mode, "preemption_mode", MODES),
    )
    if preemption_mode == "swap" and not swap:
        raise ConfigError("preemption_mode is 'swap', and kv_swap_bytes is 0: give the bytes of the swap tier", "preemption_mode")
    runner = RunnerConfig(
        backend=_choice(backend, "backend", ("native", "torch")),
        num_threads=_maybe(num_threads, "num_threads", 1, MOST_THREADS),
        max_logprobs=_whole(max_logprobs, "max_logprobs", -1),
        seed=_whole(seed, "seed", -(2**63), 2**64 - 1),
    )
    section = ModelConfig(
        model=model, revision=revision, tokenizer=tokenizer, dtype=_dtype(dtype, "dtype"), quantization=quantization,
        max_model_len=context_length(max_model_len),
        generation_config=_choice(generation_config, "generation_config", ("auto", "vllm")) == "auto", chat_template=chat_template,
        enable_weight_cache=enable_weight_cache is not False,
    )
    return Config(model=section, kv=kv, scheduler=scheduler, runner=runner)


def _weights(given: Any, policy: Any) -> tuple[tuple[str, float], ...]:
    """Shares of tenants: {"a": 2, "b": 1}, or the text "a=2,b=1". Raises: ConfigError."""
    name = "tenant_weights"
    if given is None:
        return ()
    if isinstance(given, str):
        pairs = [tuple(part.rsplit("=", 1)) if "=" in part else (part, "") for part in given.split(",")]
    elif isinstance(given, Mapping):
        pairs = list(given.items())
    else:
        raise ConfigError(f'{name} must be a mapping of names to weights, or text such as "a=2,b=1", not {shown(given)}', name)
    found: dict[str, float] = {}
    for tenant, weight in pairs:
        tenant = tenant.strip() if isinstance(tenant, str) else tenant
        if not isinstance(tenant, str) or not tenant:
            raise ConfigError(f"{name} holds {shown(tenant)}={shown(weight)}: a tenant's name and its weight, as in a=2, are needed", name)
        if tenant in found:
            raise ConfigError(f"{name} names {shown(tenant)} twice", name)
        try:
            share = math.nan if isinstance(weight, bool) else float(weight)
        except (TypeError, ValueError, OverflowError):
            share = math.nan
        if not LEAST_WEIGHT <= share <= MOST_WEIGHT:
            limits = f"{LEAST_WEIGHT:g} to {MOST_WEIGHT:g}"
            raise ConfigError(f"{name}: the weight of {shown(tenant)} must be a number from {limits}, not {shown(weight)}", name)
        found[tenant] = share
    if found and policy != "fair":
        raise ConfigError(f'{name} are shares under scheduling_policy "fair"; it is {policy!r}: choose fair, or leave them out', name)
    return tuple(found.items())


def _cache_dir(given: Any, caching: bool | None) -> str | None:
    if given is None:
        return None
    path = _path(given, "kv_cache_dir", "a folder's name")
    if caching is False:
        raise ConfigError(f"kv_cache_dir is {shown(path)}, and enable_prefix_caching is false: there is nothing to keep", "kv_cache_dir")
    return path


def _cache_dir_bytes(given: Any, folder: Any) -> int:
    if given is None:
        return KEPT_BYTES
    most = _whole(given, "kv_cache_dir_bytes", 1, 2**63 - 1)
    if folder is None:
        raise ConfigError(f"kv_cache_dir_bytes is {most}, and kv_cache_dir is not set: name the folder", "kv_cache_dir_bytes")
    return most


def _swap_bytes(given: Any, gib: Any) -> int:
    """``kv_swap_bytes``, or vLLM's ``swap_space`` in GiB. Raises: ConfigError."""
    if gib is not None:
        if isinstance(gib, bool) or not isinstance(gib, int | float) or not 0 <= gib < 2**33:
            raise ConfigError(f"swap_space must be a number of GiB from 0, not {shown(gib)}", "swap_space")
        if given is not None:
            both = f"kv_swap_bytes ({shown(given)}) and swap_space ({shown(gib)} GiB)"
            raise ConfigError(f"{both} both set the swap tier's size: give one of them", "kv_swap_bytes")
        return int(gib * 2**30)
    return 0 if given is None else _whole(given, "kv_swap_bytes", 0, 2**63 - 1)


def _swap_path(given: Any, swap: int) -> str | None:
    if given is None:
        return None
    path = _path(given, "kv_swap_path", "a folder or the name of a new file")
    if not swap:
        raise ConfigError(f"kv_swap_path is {shown(path)}, and kv_swap_bytes is 0: give the bytes of the swap tier", "kv_swap_path")
    return path


def _milliseconds(value: Any, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LONGEST_MS:
        most = f" and up to {LONGEST_MS:g}" if isinstance(value, int | float) and value > LONGEST_MS else ""
        raise ConfigError(f"{name} must be a number of milliseconds above 0{most}, or None for no target, not {shown(value)}", name)
    return float(value)


def context_length(value: Any) -> int | None:
    """``max_model_len`` as tokens: a number, "4096", "32k" (32,000), "32K" (32,768), or None, "auto", -1 for the model's own.

    Raises: ConfigError.
    """
    if value is None or (isinstance(value, str) and value == "auto") or (type(value) is int and value == -1):
        return None
    if isinstance(value, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", value.strip(), re.ASCII)
        if not found:
            raise ConfigError(f'max_model_len must be a number of tokens such as 4096, "32k" or "auto", not {shown(value)}', "max_model_len")
        exact = Fraction(found[1]) * UNITS[found[2]] if len(value) <= MOST_DIGITS else Fraction(2**31)
        value = int(exact) if exact.denominator == 1 else float(exact)
    return _whole(value, "max_model_len", 2, 2**31 - 1)


def _path(given: Any, name: str, kinds: str) -> str:
    """A path as text. ``kinds``: what it may be, for the error. Raises: ConfigError."""
    try:
        path = os.fspath(given)
    except TypeError:
        path = None
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{name} must be {kinds}, not {shown(given)}", name)
    return path


def _dtype(value: Any, name: str, served: Mapping[str, str] = DTYPES, known: tuple[str, ...] = KNOWN_DTYPES) -> str:
    if type(value).__module__ == "torch":  # torch.bfloat16 is a name here
        value = str(value).removeprefix("torch.")
    if isinstance(value, str) and value in served:
        return served[value]
    first: dict[str, str] = {}  # of the names for one thing
    for given, meant in served.items():
        first.setdefault(meant, given if given == meant else f"{given} (= {meant})")
    names = list(first.values())
    if isinstance(value, str) and value in known:
        raise UnsupportedError(f"{name}={shown(value)} is not served: {', '.join(names[:-1])} and {names[-1]} are", name)
    raise ConfigError(f"{name} must be {', '.join(names[:-1])} or {names[-1]}, not {shown(value)}", name)


def _choice(value: Any, name: str, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} must be {' or '.join(choices)}, not {shown(value)}", name)
    return value


def _whole(value: Any, name: str, low: int, high: int | None = None) -> int:
    span = f"at least {low}" if high is None else f"between {low} and {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number {span}, not {shown(value)}", name)
    if value < low or (high is not None and value > high):
        raise ConfigError(f"{name} must be {span}, not {shown(value)}", name)
    return value


def _maybe(value: Any, name: str, low: int, high: int | None = None) -> int | None:
    return None if value is None else _whole(value, name, low, high)
