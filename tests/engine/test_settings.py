from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.engine.compat import without_effect
from octavo.engine.settings import context_length, make_config
from octavo.errors import ConfigError, UnsupportedError


def test_defaults() -> None:
    config = make_config("m")
    assert (config.model.model, config.model.dtype, config.model.max_model_len, config.model.generation_config) == ("m", "auto", None, True)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens, config.scheduler.policy) == (256, 512, "fcfs")
    assert (config.scheduler.tenant_weights, config.scheduler.admission, config.scheduler.target_itl_ms) == ((), "optimistic", None)
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
    ("chat_template", {}), ("enable_prefix_caching", "yes"), ("enable_prefix_caching", 2), ("enable_prefix_caching", np.array([1, 2])),
    *[(name, np.array([1, 2])) for name in ("model", "dtype", "max_model_len", "scheduling_policy", "backend", "num_threads", "seed", "tokenizer")],
    *[("max_model_len", bad) for bad in ("9" * 400, "9" * 5000 + "k", "0." + "1" * 400, 10**400, "1e9", np.int64(7))],
    ("num_threads", 1025), ("kv_cache_memory_bytes", 10**400),
    *[("target_itl_ms", bad) for bad in (0, -1, True, "50", float("nan"), float("inf"))], ("admission", "hopeful"), ("admission", None),
    *[("tenant_weights", bad) for bad in (5, "", "a", "a=", "=2", "a=b", "a=0", "a=-1", "a=nan", "a=inf", "a=1,a=2", "a=1,", {"a": "x"},
                                          {"a": True}, {1: 2}, {"": 1}, ["a"], {"a": 1})],  # the last for want of the policy
])
def test_impossible_values_are_named(name: str, value: Any) -> None:
    settings = {"model": "m", name: value}
    with pytest.raises(ConfigError, match=name) as caught:
        make_config(**settings)
    assert caught.value.param == name


@pytest.mark.parametrize("given", ["team-a=2,b c=0.5,x=y=3", {"team-a": 2, "b c": 0.5, "x=y": "3"}])
def test_tenant_weights(given: Any) -> None:
    config = make_config("m", scheduling_policy="fair", tenant_weights=given)
    assert config.scheduler.tenant_weights == (("team-a", 2.0), ("b c", 0.5), ("x=y", 3.0))
    assert make_config("m", scheduling_policy="fair", tenant_weights={}).scheduler.tenant_weights == ()


@pytest.mark.parametrize("bad", ["a", "a=0", "a=1,a=2", {"a": True}, {1: 2}])
def test_impossible_tenant_weights_under_their_policy(bad: Any) -> None:
    with pytest.raises(ConfigError, match="tenant_weights") as caught:
        make_config("m", scheduling_policy="fair", tenant_weights=bad)
    assert "shares under" not in caught.value.message


@pytest.mark.parametrize(("name", "value"), [
    ("quantization", "awq"), ("block_size", 32), ("dtype", "float16"), ("kv_cache_dtype", "fp8_e5m2"),
])
def test_known_things_that_are_not_served(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=name) as caught:
        make_config("m", **{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(("given", "kept"), [
    ("auto", "auto"), ("fp8", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3"), ("int8", "int8"), ("int4", "int4"), ("bfloat16", "bfloat16"),
    ("float", "float32"),
])
def test_kv_cache_dtypes(given: str, kept: str) -> None:
    assert make_config("m", kv_cache_dtype=given).kv.kv_cache_dtype == kept


def test_the_help_lists_the_kv_cache_dtypes_that_the_error_does() -> None:
    from octavo.cli.options import KV_DTYPES

    with pytest.raises(ConfigError) as caught:
        make_config("m", kv_cache_dtype="fp9")
    assert caught.value.message == f"kv_cache_dtype must be {KV_DTYPES}, not 'fp9'"
    with pytest.raises(UnsupportedError, match=r"fp8 \(= fp8_e4m3\), int8 and int4 are$"):
        make_config("m", kv_cache_dtype="fp8_e5m2")
    with pytest.raises(ConfigError, match=r"^dtype must be auto, bfloat16 or float32, not 'fp8'$"):
        make_config("m", dtype="fp8")


def test_torchs_names_of_types() -> None:
    import torch

    assert make_config("m", dtype=torch.bfloat16).model.dtype == "bfloat16"
    with pytest.raises(UnsupportedError, match="dtype='float16' is not served"):
        make_config("m", dtype=torch.float16)


VLLM: dict[str, Any] = {
    "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "gpu_memory_utilization": 0.9, "trust_remote_code": True, "enforce_eager": True,
    "tokenizer_mode": "auto", "skip_tokenizer_init": False, "disable_log_stats": True, "device": "cpu", "load_format": "auto",
    "enable_chunked_prefill": True, "enable_lora": False, "hf_overrides": {}, "compilation_config": {"level": 3},
    "distributed_executor_backend": None,
    "cpu_offload_gb": 0, "limit_mm_per_prompt": {}, "max_seq_len_to_capture": 8192, "served_model_name": ["a"], "task": "generate",
}


def test_vllms_other_settings_with_values_that_ask_for_nothing() -> None:
    assert make_config("m", **VLLM) == make_config("m")
    assert without_effect(VLLM)[0].startswith("accepted, without effect here: compilation_config, cpu_offload_gb, device,") and not without_effect([])


@pytest.mark.parametrize(("name", "value", "works"), [
    ("tensor_parallel_size", 2, "1 is: Octavo runs on CPUs"), ("tensor_parallel_size", True, "1 is"), ("pipeline_parallel_size", 4, "1 is"),
    ("gpu_memory_utilization", 0, "a number above 0"), ("gpu_memory_utilization", 1.5, "kv_cache_memory_bytes"),
    ("gpu_memory_utilization", "all", "a number"), ("gpu_memory_utilization", float("nan"), "a number"), ("device", "cuda", "'cpu'"),
    ("enable_chunked_prefill", False, "max_num_batched_tokens"), ("load_format", "pt", "'auto' is"), ("skip_tokenizer_init", True, "False is"),
    ("num_gpu_blocks_override", 9, "num_kv_blocks"), ("enable_lora", True, "merge"), ("hf_overrides", {"a": 1}, "config.json"),
    ("trust_remote_code", "yes", "True and False"), ("download_dir", "/x", "HF_HOME"),
])
def test_vllms_other_settings_that_ask_for_something(name: str, value: Any, works: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{name}=.* is not served: .*{works}") as caught:
        make_config("m", **{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(("name", "near"), [
    ("max_num_seq", "max_num_seqs"), ("tensor_parallel", "tensor_parallel_size"), ("d_type", "dtype"), ("xyzzy", None),
])
def test_an_unknown_setting_is_named_with_the_nearest_known_one(name: str, near: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config("m", **{name: 1})
    assert caught.value.param == name and caught.value.message == f"there is no setting {name}{f': did you mean {near}?' if near else ''}"


def test_the_swap_tier() -> None:
    assert make_config("m").kv.kv_swap_bytes == make_config("m", swap_space=0).kv.kv_swap_bytes == 0
    assert make_config("m", swap_space=0.5).kv.kv_swap_bytes == 2**29
    config = make_config("m", kv_swap_bytes=4096, kv_swap_path=Path("a") / "b", preemption_mode="swap")
    assert (config.kv.kv_swap_bytes, config.kv.kv_swap_path, config.scheduler.preemption_mode) == (4096, "a/b", "swap")
    assert make_config("m").scheduler.preemption_mode == "auto"


@pytest.mark.parametrize(("settings", "name", "words"), [
    ({"kv_swap_bytes": -1}, "kv_swap_bytes", "between 0 and"), ({"kv_swap_bytes": "2G"}, "kv_swap_bytes", "'2G'"),
    ({"swap_space": -1}, "swap_space", "a number of GiB"), ({"swap_space": float("nan")}, "swap_space", "nan"),
    ({"kv_swap_bytes": 5, "swap_space": 2}, "kv_swap_bytes", r"\(5\) and swap_space \(2 GiB\)"),
    ({"kv_swap_path": "/x"}, "kv_swap_path", "kv_swap_bytes is 0"), ({"kv_swap_path": "", "kv_swap_bytes": 5}, "kv_swap_path", "not ''"),
    ({"preemption_mode": "swap"}, "preemption_mode", "kv_swap_bytes is 0"),
    ({"preemption_mode": "both"}, "preemption_mode", "auto or swap or recompute"),
])
def test_impossible_swap_tiers(settings: dict[str, Any], name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make_config("m", **settings)
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


ODD: list[Any] = [
    np.array([1, 2]), 10**400, -(10**400), 10**5000, float("nan"), float("inf"), 1e39, "9" * 400, "a=" + "9" * 400, "\ud800", "x\0", {}, [],
    object(), True, {"a": 10**400}, {"a": np.array([1, 2])}, {5: 1}, {"a": None}, b"x", print, -1, 2.5, np.float32(3),
]


@pytest.mark.parametrize("name", [*(make_config.__kwdefaults__ or {}), "model", "tensor_parallel_size", "gpu_memory_utilization", "hf_overrides"])
@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_no_value_whatever_is_answered_by_anything_but_our_own_errors(name: str, policy: str) -> None:
    for value in ODD:
        try:
            make_config(**({"model": "m", "scheduling_policy": policy} | {name: value}))
        except (ConfigError, UnsupportedError) as error:
            assert error.param == name and len(error.message) < 400
