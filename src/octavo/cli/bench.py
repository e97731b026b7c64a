"""`octavo bench`: measuring, one command per question."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Measure this machine, this engine, and what each of its mechanisms is worth.")


@app.callback()
def _group() -> None:
    pass


@app.command()
def experiments(
    names: Annotated[list[str] | None, typer.Argument(help="Which ones (default: all).", metavar="[NAME]...", show_default=False)] = None,
    model: Annotated[str, typer.Option(help="A directory, a .gguf file, a Hub id, or a short name.")] = "smollm2",
    repeats: Annotated[int | None, typer.Option(help="Rounds, each with fresh prompts (default 5; quick: 1).", show_default=False)] = None,
    out: Annotated[Path, typer.Option(help="Folder for a JSON file and a picture each.")] = Path("experiments"),
    quick: Annotated[bool, typer.Option("--quick", help="Short loads: a look within minutes, no figures to quote.")] = False,
    pictures: Annotated[bool, typer.Option(help="Draw a PNG each (needs the extra bench).")] = True,
    num_threads: Annotated[int | None, typer.Option(help="Threads (default: what affinity and the container allow).", show_default=False)] = None,
    listed: Annotated[bool, typer.Option("--list", help="Say what there is, and end.")] = False,
) -> None:
    """Show what each mechanism is worth: the same load with it and without it, in one process, in turns."""
    from octavo.cli.terminal import Startup, columns

    if listed:
        from octavo.bench.runner import NAMES, claim

        typer.echo(columns([(name, claim(name)) for name in NAMES]), nl=False)
        return
    with Startup() as startup:
        from octavo.bench import runner

        runner.run(names or [], model, out, repeats=repeats or (1 if quick else 5), quick=quick, pictures=pictures, num_threads=num_threads,
                   report=startup)
