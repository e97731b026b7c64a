"""Options that several commands share, under vLLM's names, and how they become an LLM."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from octavo.engine.llm import LLM

ENGINE, SAMPLING = "Engine", "Sampling"

Model = Annotated[str, typer.Argument(help="A directory, a .gguf file, a Hub id, or a short name such as smollm2.", show_default=False)]
Revision = Annotated[str | None, typer.Option(help="Hub revision: branch, tag or commit.", rich_help_panel=ENGINE)]
Tokenizer = Annotated[str | None, typer.Option(help="Directory or .gguf file to take the tokenizer from, if not the model.", rich_help_panel=ENGINE)]
Dtype = Annotated[str, typer.Option(help="auto (bfloat16), bfloat16 or float32.", rich_help_panel=ENGINE)]
MaxModelLen = Annotated[str | None, typer.Option(help="Context in tokens: 4096, 32k, auto.", rich_help_panel=ENGINE)]
MaxNumSeqs = Annotated[int, typer.Option(help="Requests running at once.", rich_help_panel=ENGINE)]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Tokens computed in one step (default 512).", rich_help_panel=ENGINE)]
NumKvBlocks = Annotated[int | None, typer.Option(help="Blocks of 16 tokens in the KV pool.", rich_help_panel=ENGINE)]
KvBytes = Annotated[int | None, typer.Option("--kv-cache-memory-bytes", help="Bytes of the KV pool.", rich_help_panel=ENGINE)]
NumThreads = Annotated[int | None, typer.Option(help="Threads (default: what affinity and the container allow).", rich_help_panel=ENGINE)]
EngineSeed = Annotated[int, typer.Option("--engine-seed", help="Seed that requests without their own derive theirs from.", rich_help_panel=ENGINE)]
ChatTemplate = Annotated[str | None, typer.Option(help="A chat template: text or the path of a .jinja file.", rich_help_panel=ENGINE)]

MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate (default: up to the context).", rich_help_panel=SAMPLING)]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)]
TopP = Annotated[float | None, typer.Option(help="Nucleus mass.", rich_help_panel=SAMPLING)]
TopK = Annotated[int | None, typer.Option(help="Most likely tokens kept; 0: all.", rich_help_panel=SAMPLING)]
MinP = Annotated[float | None, typer.Option(help="Least probability, relative to the best token's.", rich_help_panel=SAMPLING)]
Seed = Annotated[int | None, typer.Option(help="Seed of the request.", rich_help_panel=SAMPLING)]
Repetition = Annotated[float | None, typer.Option("--repetition-penalty", help="Above 1 discourages tokens seen before.", rich_help_panel=SAMPLING)]
Stop = Annotated[list[str] | None, typer.Option(help="Stop string; repeat for several.", rich_help_panel=SAMPLING)]


def load(model: str, **settings: Any) -> "LLM":
    """The engine, with its start-up told on the terminal's error stream."""
    from octavo.cli.terminal import Startup
    from octavo.engine.llm import LLM

    settings = {name: value for name, value in settings.items() if value is not None}
    with Startup() as startup:
        return LLM(model, report=startup, **settings)


def sampling(llm: "LLM", **given: Any) -> Any:
    """The model's own defaults, overridden by what was given on the command line."""
    import msgspec

    from octavo.core.sampling import SamplingParams

    base = msgspec.structs.asdict(llm.get_default_sampling_params())
    base.update({name: value for name, value in given.items() if value is not None})
    return SamplingParams(**base)
