"""Options that several commands share, under vLLM's names, and how they become an LLM.

Each table is name → (type, option declaration). None stands for "not given" everywhere, so that defaults live in one
place: the engine's own for settings, the model's own for sampling.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from octavo.engine.llm import LLM

ENGINE, SAMPLING = "Engine", "Sampling"
KV_DTYPES = "auto, bfloat16, float32, fp8 (= fp8_e4m3), int8 or int4"

Model = Annotated[str, typer.Argument(help="A directory, a .gguf file, a Hub id, or a short name such as smollm2.", show_default=False,
                                      metavar="MODEL")]
Revision = Annotated[str | None, typer.Option(help="Hub revision: branch, tag or commit.", rich_help_panel=ENGINE)]
Dtype = Annotated[str | None, typer.Option(help="auto (bfloat16), bfloat16 or float32.", rich_help_panel=ENGINE)]
KvDtype = Annotated[str | None, typer.Option("--kv-cache-dtype", help=f"{KV_DTYPES}.", rich_help_panel=ENGINE)]
KvBytes = Annotated[int | None, typer.Option("--kv-cache-memory-bytes", help="Bytes of the KV pool.", rich_help_panel=ENGINE)]

Table = dict[str, tuple[Any, str, tuple[str, ...]]]  # name → type, help (none: left out of it), declarations other than --its-name

ENGINE_OPTIONS: Table = {
    "dtype": (str, "auto (bfloat16), bfloat16 or float32.", ()),
    "max_model_len": (str, "Context in tokens: 4096, 32k, auto.", ()),
    "max_num_seqs": (int, "Sequences running at once (default 256).", ()),
    "max_num_batched_tokens": (int, "Tokens computed in one step (default 512).", ()),
    "num_kv_blocks": (int, "Blocks of 16 tokens in the KV pool.", ()),
    "kv_cache_memory_bytes": (int, "Bytes of the KV pool (default: at most 4 GiB and half of the free memory).", ()),
    "num_threads": (int, "Threads (default: what affinity and the container allow).", ()),
    "scheduling_policy": (str, "fcfs; priority (smallest first, a level counts as 30 s of waiting); lpm (longest cached prefix first); fair "
                               "(tokens per tenant).", ()),
    "tenant_weights": (str, "Shares under the policy fair: name=weight,… (default 1 each).", ()),
    "admission": (str, "optimistic (what fits now starts) or predicted (what fits at the expected peak: hardly any preemptions).", ()),
    "target_itl_ms": (float, "Milliseconds between tokens to keep to, by smaller prefill chunks.", ()),
    "kv_swap_bytes": (int, "Bytes of a tier that takes the KV blocks of preempted requests (default 0: they are computed again).", ()),
    "kv_swap_path": (str, "A folder, or a file to be made, for the tier (default: in memory).", ()),
    "preemption_mode": (str, "auto (what is faster), swap or recompute.", ()),
    "swap_space": (float, "", ()),  # vLLM's name for the tier's size, in GiB
    "seed": (int, "What requests without a seed derive theirs from (default 0).", ("--engine-seed",)),
    "max_logprobs": (int, "Most alternatives per token a request may ask for (default 20; -1: all).", ()),
    "chat_template": (str, "A chat template: text or the path of a .jinja file.", ()),
    "generation_config": (str, "auto: the model's own sampling defaults; vllm: neutral ones.", ()),
    "tokenizer": (str, "Directory or .gguf file to take the tokenizer from, if not the model.", ()),
    "revision": (str, "Hub revision: branch, tag or commit.", ()),
    "block_size": (int, "Tokens in a KV block: 16.", ()),
    "kv_cache_dtype": (str, f"{KV_DTYPES}; auto is the compute dtype.", ()),
    "quantization": (str, "Of weights: int8, int4, int4_g128, gguf (as stored). Default: none.", ()),
    "kv_cache_dir": (str, "Folder in which hot cached prefixes are kept from one start to the next.", ()),
    "kv_cache_dir_bytes": (int, "Most bytes to keep there (default 1 GiB).", ()),
    # Two names a line would cut the others' at 80 columns: SWITCHES tells of them.
    "enable_prefix_caching": (bool, "", ("--enable-prefix-caching/--no-enable-prefix-caching",)),
    "enable_weight_cache": (bool, "", ("--enable-weight-cache/--no-enable-weight-cache",)),
}
SWITCHES = "Prefix caching and the cache of packed weights are on, unless --no-enable-prefix-caching and --no-enable-weight-cache switch them off."

SAMPLING_OPTIONS: Table = {
    "max_tokens": (int, "Most tokens to generate.", ()),
    "temperature": (float, "0 is greedy.", ()),
    "top_p": (float, "Nucleus mass.", ()),
    "top_k": (int, "Most likely tokens kept; 0: all.", ()),
    "min_p": (float, "Least probability, relative to the best token's.", ()),
    "seed": (int, "Seed of the request.", ()),
    "repetition_penalty": (float, "Above 1 discourages tokens seen before.", ()),
    "presence_penalty": (float, "Above 0 discourages tokens that the output has.", ()),
    "frequency_penalty": (float, "Above 0 discourages them by their number.", ()),
    "stop": (list[str], "Stop string; repeat for several.", ()),
}

# vLLM's, for commands that were written for it: accepted where they ask for nothing, else refused by name (engine/compat.py). Not in the help.
NEUTRAL_OPTIONS: Table = {
    "tensor_parallel_size": (int, "", ("--tensor-parallel-size", "-tp")),
    "pipeline_parallel_size": (int, "", ("--pipeline-parallel-size", "-pp")),
    "data_parallel_size": (int, "", ("--data-parallel-size", "-dp")),
    "gpu_memory_utilization": (float, "", ()),
    "cpu_offload_gb": (float, "", ()),
    "load_format": (str, "", ()),
    "download_dir": (str, "", ()),
    "tokenizer_mode": (str, "", ()),
    "device": (str, "", ()),
    "task": (str, "", ()),
    "runner": (str, "", ()),
    "trust_remote_code": (bool, "", ("--trust-remote-code/--no-trust-remote-code",)),
    "enforce_eager": (bool, "", ("--enforce-eager/--no-enforce-eager",)),
    "enable_chunked_prefill": (bool, "", ("--enable-chunked-prefill/--no-enable-chunked-prefill",)),
    "disable_log_stats": (bool, "", ("--disable-log-stats/--no-disable-log-stats",)),
    "disable_log_requests": (bool, "", ("--disable-log-requests/--no-disable-log-requests",)),
    "enable_log_requests": (bool, "", ("--enable-log-requests/--no-enable-log-requests",)),
}

OTHERS = (  # of single commands
    "host", "port", "uds", "api_key", "url", "prompt", "prompts_file", "served_model_name", "workloads", "batch_size", "input_len", "output_len",
    "rows", "context", "save", "text", "tasks", "reference", "window", "num_prompts", "max_concurrency", "request_rate",
)

Command = Callable[..., None]


def engine_options(*, own_seed: bool = True) -> Callable[[Command], Command]:
    """Give a command the engine's options; it receives those that were given as the dictionary ``settings``.

    ``own_seed``: the engine's seed is --engine-seed, because --seed is the request's; otherwise it is --seed, as in vLLM.
    """
    table = dict(ENGINE_OPTIONS)
    if not own_seed:
        kind, text, _ = table["seed"]
        table["seed"] = (kind, text, ())
    extend = _extend(table | NEUTRAL_OPTIONS, "settings", ENGINE, prefix="engine_")

    def told(command: Command) -> Command:
        run = extend(command)
        run.__doc__ = f"{command.__doc__}\n\n{SWITCHES}"
        return run

    return told


def sampling_options(command: Command) -> Command:
    """Give a command the sampling options; it receives those that were given as the dictionary ``wanted``."""
    return _extend(SAMPLING_OPTIONS, "wanted", SAMPLING)(command)


def _extend(table: Table, gathered: str, panel: str, prefix: str = "") -> Callable[[Command], Command]:
    """Typer reads a command's options off its signature: write the table's into it, and gather them again at the call."""

    def extend(command: Command) -> Command:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            found = {name: given.pop(prefix + name) for name in table}
            command(**given, **{gathered: {name: value for name, value in found.items() if value is not None}})

        own = [each for each in inspect.signature(command).parameters.values() if each.name != gathered]
        more = [  # without metavar: a column of types would cut the options' names on a terminal of 80 columns
            inspect.Parameter(prefix + name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[
                kind | None, typer.Option(*(names or (f"--{name.replace('_', '-')}",)), help=text, hidden=not text, metavar="",
                                          rich_help_panel=panel)])
            for name, (kind, text, names) in table.items()
        ]
        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *more)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return extend


def save_option(panel: str) -> Any:
    """--save, of whatever measures: a place that cannot be written to is told before anything is done."""
    def check(path: Path | None) -> Path | None:
        if path is not None:
            from octavo.bench.result import check_place

            check_place(path)
        return path

    return typer.Option(help="Write the JSON to this file, too. Its folder must be there.", callback=check, rich_help_panel=panel)


def load(model: str, settings: dict[str, Any], wanted: dict[str, Any], *, verbose: bool = False) -> "LLM":
    """The engine, with its start-up told on the terminal's error stream. Impossible sampling parameters are told before it loads.

    Raises: ConfigError, CheckpointError, UnsupportedError, InvalidRequest.
    """
    from octavo.cli.terminal import Startup
    from octavo.core.sampling import SamplingParams

    SamplingParams(**wanted)
    with Startup(verbose) as startup:
        from octavo.engine.llm import LLM

        return LLM(model, report=startup, **settings)


def sampling(llm: "LLM", wanted: dict[str, Any]) -> Any:
    """The model's own defaults, overridden by what was given on the command line. Raises: InvalidRequest."""
    import msgspec

    from octavo.core.sampling import SamplingParams

    return SamplingParams(**(msgspec.structs.asdict(llm.get_default_sampling_params()) | wanted))


def flag(param: str) -> str | None:
    """The command-line option that sets ``param``, for error messages; None when there is none of that name."""
    known = param in ENGINE_OPTIONS or param in NEUTRAL_OPTIONS or param in SAMPLING_OPTIONS or param in OTHERS
    return f"--{param.replace('_', '-')}" if known else None
