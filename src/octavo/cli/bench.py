"""`octavo bench`: measuring, one command per question.

Throughput, latency, kernels, startup and serve tell their progress on standard error, and end with a line of JSON: commit, build, machine,
settings, samples.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli import options as o

app = typer.Typer(no_args_is_help=True, help="Measure this machine, this engine, and what each of its mechanisms is worth.")

BENCH = "Benchmark"
Repeat = Annotated[int, typer.Option(help="Rounds that count.", min=1, rich_help_panel=BENCH)]
Warmup = Annotated[int, typer.Option(help="Rounds before, for nothing.", min=0, rich_help_panel=BENCH)]
Save = Annotated[Path | None, o.save_option(BENCH)]


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
    from octavo.bench.workloads import named, parse_names

    parse_names(workloads)  # an unknown name is told before the model is looked for
    _measure(model, settings, lambda limits: named(workloads, limits.context), lambda rig: bench.run(rig, workloads, repeat, warmup), save)


@app.command()
@o.engine_options(own_seed=False)
def latency(
    model: o.Model,
    batch_size: Annotated[list[int] | None, typer.Option(help="Sequences of one batch; repeat for several (default 1 and 64).", min=1,
                                                         rich_help_panel=BENCH)] = None,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.", min=2, rich_help_panel=BENCH)] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens generated after each.", min=3, rich_help_panel=BENCH)] = 128,
    repeat: Repeat = 5, warmup: Warmup = 1, save: Save = None,
    *, settings: dict[str, Any],
) -> None:
    """One batch of equal requests: first token, time between tokens, what is outside the kernels, and a step by op."""
    from octavo.bench import latency as bench

    load = batch_size or [1, 64], input_len, output_len
    _measure(model, settings, lambda limits: bench.check(limits, *load), lambda rig: bench.run(rig, *load, repeat, warmup), save)


@app.command()
@o.engine_options(own_seed=False)
def kernels(
    model: o.Model,
    rows: Annotated[list[int] | None, typer.Option(help="Rows of a step; repeat for several (default 1, 8, 32, 64, 512).", min=1,
                                                   rich_help_panel=BENCH)] = None,
    context: Annotated[int, typer.Option(help="Tokens before a row that decodes.", min=2, rich_help_panel=BENCH)] = 128,
    repeat: Repeat = 5, save: Save = None,
    *, settings: dict[str, Any],
) -> None:
    """Every op of the model's program against the machine's ceilings."""
    from octavo.bench import kernels as bench

    load = rows or [1, 8, 32, 64, 512], context
    _measure(model, settings, lambda limits: bench.check(limits, *load), lambda rig: bench.run(rig, *load, repeat), save)


@app.command()
@o.engine_options(own_seed=False)
def startup(model: o.Model, repeat: Repeat = 5, save: Save = None, *, settings: dict[str, Any]) -> None:
    """From the start of a process to its first token, offline and served, with and without kept packed weights; and its memory."""
    from octavo.bench import result
    from octavo.bench import startup as bench

    result.hand_out(*bench.run(model, settings, repeat), save)


@app.command()
def experiments(
    names: Annotated[list[str] | None, typer.Argument(help="Which ones (default: all).", metavar="[NAME]...", show_default=False)] = None,
    model: Annotated[str, typer.Option(help="A directory, a .gguf file, a Hub id, or a short name.")] = "smollm2",
    repeats: Annotated[int | None, typer.Option(help="Rounds, each with fresh prompts (default 5; quick: 1).", min=1, show_default=False)] = None,
    out: Annotated[Path, typer.Option(help="Folder for a JSON file and a picture each.")] = Path("experiments"),
    quick: Annotated[bool, typer.Option("--quick", help="Short loads: a look within minutes, no figures to quote.")] = False,
    pictures: Annotated[bool, typer.Option(help="Draw a PNG each (needs the extra bench).")] = True,
    page: Annotated[Path | None, typer.Option(help="A Markdown page into which to write all results that are in --out.", show_default=False)] = None,
    redraw: Annotated[bool, typer.Option("--redraw", help="Run nothing: draw and write again from the JSON files in --out.")] = False,
    num_threads: Annotated[int | None, typer.Option(help="Threads (default: what affinity and the container allow).", show_default=False)] = None,
    listed: Annotated[bool, typer.Option("--list", help="Say what there is, and end.")] = False,
) -> None:
    """Show what each mechanism is worth: the same load with it and without it, in one process, in turns."""
    from octavo.bench import runner
    from octavo.bench.page import rewrite
    from octavo.cli.terminal import Startup, columns

    if listed:
        typer.echo(columns([(name, runner.claim(name)) for name in runner.NAMES]), nl=False)
        return
    if redraw:
        if pictures:
            runner.redraw(out, names or [])
    else:
        rounds = (1 if quick else 5) if repeats is None else repeats
        with Startup() as startup:
            runner.run(names or [], model, out, repeats=rounds, quick=quick, pictures=pictures, num_threads=num_threads, report=startup)
    if page is not None:
        rewrite(page, out, runner.NAMES)


@app.command()
def serve(
    url: Annotated[str, typer.Argument(help="An OpenAI-compatible server, such as http://127.0.0.1:8000.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="The served model's name (default: the server's first).")] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests.", min=1)] = 64,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens generated after each.", min=2)] = 128,
    max_concurrency: Annotated[int | None, typer.Option(help="Requests open at once (default: no limit).", show_default=False)] = None,
    request_rate: Annotated[float | None, typer.Option(help="Requests a second, at random times (Poisson); default: all at once.",
                                                       show_default=False)] = None,
    vocab_size: Annotated[int, typer.Option(help="Prompts' token ids are below this.", min=2)] = 40_000,
    seed: Annotated[int, typer.Option(help="Of prompts and times: another one for each run, or a prefix cache answers.")] = 0,
    api_key: Annotated[str | None, typer.Option(help="The server's key.", envvar="OCTAVO_API_KEY", show_envvar=True)] = None,
    save: Save = None,
) -> None:
    """Load on a server, closed loop (--max-concurrency) or open loop (--request-rate): TTFT, TPOT, ITL, percentiles."""
    from octavo.bench import result
    from octavo.bench import serve as bench

    text, found = bench.measure(url, model, num_prompts=num_prompts, tokens_in=input_len, tokens_out=output_len, concurrency=max_concurrency,
                                rate=request_rate, vocab=vocab_size, seed=seed, api_key=api_key)
    result.hand_out(text, found, save)


def _measure(model: str, settings: dict[str, Any], check: Any, run: Any, save: Path | None) -> None:
    """Measure on a loaded model; what cannot fit it is told before its weights are read."""
    from octavo.cli.terminal import Startup

    with Startup() as startup:
        from octavo.bench import result
        from octavo.bench.rig import Rig, limits

        check(limits(model, settings, startup))
        rig = Rig(model, settings, startup)
    with rig:
        text, found = run(rig)
    result.hand_out(text, found, save)
