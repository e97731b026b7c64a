from pathlib import Path
from typing import Any

import pytest

from octavo.engine.settings import context_length, make_config
from octavo.errors import ConfigError, UnsupportedError


def test_defaults() -> None:
    config = make_config("m")
    assert (config.model.model, config.model.dtype, config.model.max_model_len, config.model.generation_config) == ("m", "auto", None, True)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens, config.scheduler.policy) == (256, 512, "fcfs")
    kv = config.kv
    assert (kv.block_size, kv.num_kv_blocks, kv.kv_cache_memory_bytes, kv.enable_prefix_caching) == (16, None, None, True)
    assert (config.runner.backend, config.runner.num_threads, config.runner.max_logprobs, config.runner.seed) == ("native", None, 20, 0)
    assert make_config(Path("a") / "b").model.model == "a/b"


@pytest.mark.parametrize(("name", "value"), [
    ("model", 5), ("model", ""), ("model", None),
    *[(name, bad) for name in ("max_num_seqs", "max_num_batched_tokens", "num_kv_blocks", "kv_cache_memory_bytes", "num_threads", "block_size")
      for bad in (0, -1, True, "7", 1.5, float("nan"))],
    ("max_num_seqs", None), ("max_num_seqs", 10**9), ("max_num_batched_tokens", 10**9),
    *[("max_model_len", bad) for bad in (0, 1, -2, True, False, "x", "", "-5", "1.5", "32kk", 2.0, 2**40)],
    ("max_logprobs", -2), ("max_logprobs", True), ("seed", "a"), ("seed", 2**64), ("seed", None), ("seed", True),
    ("scheduling_policy", "lifo"), ("scheduling_policy", None), ("scheduling_policy", ["fcfs"]), ("generation_config", 7), ("backend", "cuda"),
    ("dtype", "int3"), ("dtype", None), ("dtype", ["auto"]), ("kv_cache_dtype", 8), ("tokenizer", 3), ("tokenizer", ""), ("revision", 1),
    ("chat_template", {}), ("enable_prefix_caching", "yes"), ("enable_prefix_caching", 2),
])
def test_impossible_values_are_named(name: str, value: Any) -> None:
    settings = {"model": "m", name: value}
    with pytest.raises(ConfigError, match=name) as caught:
        make_config(**settings)
    assert caught.value.param == name


@pytest.mark.parametrize(("name", "value"), [
    ("quantization", "awq"), ("block_size", 32), ("dtype", "float16"), ("kv_cache_dtype", "fp8"),
])
def test_known_things_that_are_not_served(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=name) as caught:
        make_config("m", **{name: value})
    assert caught.value.param == name


def test_only_one_pool_size() -> None:
    with pytest.raises(ConfigError, match=r"num_kv_blocks \(4\) and kv_cache_memory_bytes \(5\)"):
        make_config("m", num_kv_blocks=4, kv_cache_memory_bytes=5)


@pytest.mark.parametrize(("given", "want"), [
    (None, None), ("auto", None), (-1, None), (4096, 4096), ("4096", 4096), ("32k", 32_000), ("32K", 32_768), ("1.5k", 1500), (" 2K ", 2048),
    ("1M", 2**20),
])
def test_context_length(given: Any, want: int | None) -> None:
    assert context_length(given) == want
