"""vLLM's settings that Octavo has none for: values that ask for nothing are accepted, so that a program need not be rewritten.

A value that would have to change something is an UnsupportedError that says what works; an unknown name is a ConfigError.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from octavo.errors import ConfigError, UnsupportedError, shown

Accepts = Callable[[Any], bool]


def _only(*harmless: Any) -> Accepts:
    return lambda value: any(type(value) is type(each) and value == each for each in harmless)


def _number(low: float, high: float) -> Accepts:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _anything(value: Any) -> bool:
    return True


def _switch(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _whole(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


_ONE = _only(None, 1)
_EMPTY = _only(None, {}, "")
_OFF = _only(None, False)
_CPU = "Octavo runs on CPUs, in one process of many threads"
_NONE = "leave it out"

# name → (what is accepted, what the message says about anything else)
NEUTRAL: dict[str, tuple[Accepts, str]] = {
    # where it runs
    "tensor_parallel_size": (_ONE, f"1 is: {_CPU} (num_threads)"),
    "pipeline_parallel_size": (_ONE, f"1 is: {_CPU} (num_threads)"),
    "data_parallel_size": (_ONE, f"1 is: {_CPU} (num_threads)"),
    "enable_expert_parallel": (_OFF, "False is"),
    "distributed_executor_backend": (_only(None, "uni", "mp"), "None, 'uni' and 'mp' are"),
    "device": (_only(None, "auto", "cpu"), "'auto' and 'cpu' are"),
    "worker_cls": (_only(None, "auto"), _NONE),
    "disable_custom_all_reduce": (_switch, "True and False are, without effect"),
    "enforce_eager": (_switch, "True and False are, without effect: there are no CUDA graphs"),
    "compilation_config": (_anything, ""),
    "max_seq_len_to_capture": (_whole, "a whole number is, without effect: there are no CUDA graphs"),
    "disable_cascade_attn": (_switch, "True and False are, without effect"),
    "async_scheduling": (_switch, "True and False are, without effect"),
    "disable_async_output_proc": (_switch, "True and False are, without effect"),
    # memory
    "gpu_memory_utilization": (_number(math.ulp(0.0), 1.0), "a number above 0 up to 1 is, without effect: kv_cache_memory_bytes sizes the pool"),
    "cpu_offload_gb": (_number(0.0, math.inf), "a number of GB is, without effect: the weights are in the CPU's memory"),
    "num_gpu_blocks_override": (_only(None), "num_kv_blocks sets the pool's blocks"),
    "calculate_kv_scales": (_OFF, "False is"),
    # scheduling
    "enable_chunked_prefill": (_only(None, True), "True is: prompts always go in chunks of max_num_batched_tokens"),
    "num_scheduler_steps": (_ONE, "1 is"),
    "scheduler_delay_factor": (_only(None, 0.0, 0), "0 is"),
    "speculative_config": (_EMPTY, _NONE),
    "speculative_model": (_only(None), _NONE),
    # the model
    "trust_remote_code": (_switch, "True and False are: code from a checkpoint is never run"),
    "load_format": (_only(None, "auto"), "'auto' is: safetensors and GGUF are told apart by themselves"),
    "config_format": (_only(None, "auto"), "'auto' is"),
    "model_impl": (_only(None, "auto"), "'auto' is"),
    "runner": (_only(None, "auto", "generate"), "'auto' and 'generate' are"),
    "task": (_only(None, "auto", "generate"), "'auto' and 'generate' are"),
    "convert": (_only(None, "auto", "none"), "'auto' and 'none' are"),
    "hf_overrides": (_EMPTY, "change the model's config.json"),
    "hf_config_path": (_only(None), _NONE),
    "hf_token": (_switch, "set HF_TOKEN, or log in with `hf auth login`"),
    "download_dir": (_only(None), "HF_HOME says where models are kept"),
    "code_revision": (_anything, ""),
    "rope_scaling": (_EMPTY, "change the model's config.json"),
    "rope_theta": (_only(None), "change the model's config.json"),
    "disable_sliding_window": (_OFF, "False is"),
    "override_generation_config": (_EMPTY, "give the sampling parameters with the request"),
    "enable_lora": (_OFF, "merge the adapter into the model"),
    "enable_sleep_mode": (_OFF, "False is"),
    "logits_processors": (_only(None, []), _NONE),
    "guided_decoding_backend": (_only(None, "auto"), _NONE),
    "structured_outputs_config": (_EMPTY, _NONE),
    "kv_transfer_config": (_EMPTY, _NONE),
    "pooler_config": (_EMPTY, _NONE),
    "limit_mm_per_prompt": (_EMPTY, "models of text are served"),
    "mm_processor_kwargs": (_EMPTY, "models of text are served"),
    "allowed_local_media_path": (_EMPTY, "models of text are served"),
    # text
    "tokenizer_mode": (_only(None, "auto", "hf"), "'auto' is"),
    "skip_tokenizer_init": (_OFF, "False is: a model without a tokenizer takes token ids by itself"),
    "tokenizer_revision": (_only(None), "the setting revision holds for the tokenizer, too"),
    # what is told
    "served_model_name": (_anything, ""),
    "disable_log_stats": (_switch, "True and False are, without effect"),
    "disable_log_requests": (_switch, "True and False are, without effect"),
    "enable_log_requests": (_switch, "True and False are, without effect"),
}


def check_others(given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Accept vLLM's settings where they ask for nothing. ``known``: Octavo's own.

    Raises: UnsupportedError for another value, ConfigError for an unknown name; both name the setting.
    """
    for name, value in given.items():
        if name not in NEUTRAL:
            close = difflib.get_close_matches(name, [*known, *NEUTRAL], 1)
            raise ConfigError(f"there is no setting {name}{f': did you mean {close[0]}?' if close else ''}", name)
        accepts, works = NEUTRAL[name]
        if not accepts(value):
            raise UnsupportedError(f"{name}={shown(value)} is not served: {works}", name)


def without_effect(names: Iterable[str]) -> list[str]:
    """A line for the start-up's report about settings that check_others accepted."""
    listed = ", ".join(sorted(names))
    return [f"accepted, without effect here: {listed}"] if listed else []


def refuse_adapter(lora_request: Any) -> None:
    """vLLM's argument of generate and chat. Raises: UnsupportedError for an adapter."""
    if lora_request is not None:
        raise UnsupportedError("lora_request is not served by this version: leave it None", "lora_request")
