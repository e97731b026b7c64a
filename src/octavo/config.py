"""The engine's settings: one frozen section per component, vLLM's names. Each component is given its own section only."""

from dataclasses import dataclass

BLOCK_SIZE = 16  # tokens in a KV block: the width of one kernel tile
NO_BLOCK = -1  # in a block table: what a sliding window has left behind
KV_BITS = {"bfloat16": 16, "float32": 32, "fp8_e4m3": 8, "int8": 8, "int4": 4}  # of one value in the KV cache, by its dtype
KEPT_BYTES = 2**30  # of cached blocks, from one start to the next


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and in which precision. ``model`` is a directory, a .gguf file, a Hub id or a short name."""

    model: str
    revision: str | None = None
    tokenizer: str | None = None
    dtype: str = "auto"  # auto | bfloat16 | float32
    quantization: str | None = None  # of weights: int8 | int4 | int4_g128 | gguf; None: matrices in the compute dtype
    max_model_len: int | None = None  # tokens; None: what the model was made for
    generation_config: bool = True  # take the model's sampling defaults
    chat_template: str | None = None
    enable_weight_cache: bool = True  # packed weights are kept on disk and mapped at the next start


@dataclass(frozen=True, slots=True)
class KvConfig:
    """The pool of KV blocks. At most one of ``num_kv_blocks`` and ``kv_cache_memory_bytes`` is given."""

    block_size: int = BLOCK_SIZE
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"  # auto (the compute dtype), or one of KV_BITS
    enable_prefix_caching: bool = True
    kv_cache_dir: str | None = None  # where cached blocks are kept from one start to the next; None: nowhere
    kv_cache_dir_bytes: int = KEPT_BYTES  # that may lie there
    kv_swap_bytes: int = 0  # of the tier that preempted requests' blocks may go to; 0: none
    kv_swap_path: str | None = None  # a folder, or a file to be made, where the tier is kept; None: in memory


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and the order of requests."""

    max_num_seqs: int = 256  # requests running at once
    max_num_batched_tokens: int = 512  # tokens computed in one step; smaller than max_num_seqs is legal
    max_model_len: int = 8192  # resolved
    policy: str = "fcfs"  # fcfs | priority | lpm | fair
    tenant_weights: tuple[tuple[str, float], ...] = ()  # fair: shares of tenants; 1 for those not named
    admission: str = "optimistic"  # optimistic: what fits now; predicted: what fits at the expected peak
    target_itl_ms: float | None = None  # milliseconds that a step may take while somebody decodes
    preemption_mode: str = "auto"  # auto: what is faster; swap; recompute


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """How steps are executed."""

    backend: str = "native"  # native | torch (the oracle: extra "test")
    num_threads: int | None = None  # None: what affinity and the container's quota allow
    max_logprobs: int = 20  # the most alternatives a request may ask for; -1: the whole vocabulary
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Config:
    """All sections. resolve() in engine/factory.py gives the final one, which is logged whole at start."""

    model: ModelConfig
    kv: KvConfig
    scheduler: SchedulerConfig
    runner: RunnerConfig
