"""`octavo bench`: what the engine does here, and how far that is from what the machine could do.

Every benchmark tells its progress on standard error, and ends with one line of JSON: commit, build, machine, settings, every sample.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli import options as o

app = typer.Typer(no_args_is_help=True, help="Measure: throughput, latency, kernels.")

BENCH = "Benchmark"
Repeat = Annotated[int, typer.Option(help="Rounds that count.", min=1, rich_help_panel=BENCH)]
Warmup = Annotated[int, typer.Option(help="Rounds before, for nothing.", min=0, rich_help_panel=BENCH)]
Save = Annotated[Path | None, typer.Option(help="Write the JSON to this file, too.", rich_help_panel=BENCH)]


@app.command()
@o.engine_options(own_seed=False)
def throughput(
    model: o.Model,
    workloads: Annotated[str, typer.Option(help="By commas: single, prefill, batch8, batch32, batch64, mixed, prefix, long (a context of 4,160).",
                                           rich_help_panel=BENCH)] = "single,prefill,batch8,batch32,batch64,mixed,prefix",
    repeat: Repeat = 5, warmup: Warmup = 1, save: Save = None,
    *, settings: dict[str, Any],
) -> None:
    """Whole workloads, taking turns: tokens per second, and the share of the roofline measured in the same process."""
    from octavo.bench import throughput as bench

    _measure(model, settings, lambda rig: bench.run(rig, workloads, repeat, warmup), save)


@app.command()
@o.engine_options(own_seed=False)
def latency(
    model: o.Model,
    batch_size: Annotated[list[int] | None, typer.Option(help="Sequences of one batch; repeat for several (default 1 and 64).",
                                                         rich_help_panel=BENCH)] = None,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.", rich_help_panel=BENCH)] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens generated after each.", rich_help_panel=BENCH)] = 128,
    repeat: Repeat = 5, warmup: Warmup = 1, save: Save = None,
    *, settings: dict[str, Any],
) -> None:
    """One batch of equal requests: first token, time between tokens, what is outside the kernels, and a step by op."""
    from octavo.bench import latency as bench

    _measure(model, settings, lambda rig: bench.run(rig, batch_size or [1, 64], input_len, output_len, repeat, warmup), save)


@app.command()
@o.engine_options(own_seed=False)
def kernels(
    model: o.Model,
    rows: Annotated[list[int] | None, typer.Option(help="Rows of a step; repeat for several (default 1, 8, 32, 64, 512).",
                                                   rich_help_panel=BENCH)] = None,
    context: Annotated[int, typer.Option(help="Tokens before a row that decodes.", rich_help_panel=BENCH)] = 128,
    repeat: Repeat = 5, save: Save = None,
    *, settings: dict[str, Any],
) -> None:
    """Every op of the model's program against the machine's ceilings."""
    from octavo.bench import kernels as bench

    _measure(model, settings, lambda rig: bench.run(rig, rows or [1, 8, 32, 64, 512], context, repeat), save)


def _measure(model: str, settings: dict[str, Any], run: Any, save: Path | None) -> None:
    from octavo.cli.terminal import Startup

    with Startup() as startup:
        from octavo.bench.rig import Rig

        rig = Rig(model, settings, startup)
    with rig:
        text, found = run(rig)
    if save is not None:
        from octavo.bench import result

        result.write(save, found)
    sys.stdout.write(f"{text}\n{json.dumps(found)}\n")
