"""The `octavo` command: one module per subcommand; what is heavy is imported inside them (help and errors stay fast)."""

import sys

import typer

from octavo.cli import bench, options
from octavo.cli.chat import chat
from octavo.cli.evaluate import evaluate
from octavo.cli.generate import generate
from octavo.cli.inspect import inspect
from octavo.cli.pull import pull
from octavo.cli.serve import serve

app = typer.Typer(
    name="octavo", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="LLM inference and serving on the machine you have: fast on a CPU, the same tokens always.",
)
for command in (serve, chat, generate, inspect, pull):
    app.command()(command)
app.command("eval")(evaluate)
app.add_typer(bench.app, name="bench")


def _version(asked: bool) -> None:
    if asked:
        import octavo

        typer.echo(f"octavo {octavo.__version__}")
        raise typer.Exit


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version.")) -> None:
    pass


def run() -> None:
    """Run the command line (the command itself begins in entry.py).

    Errors made on purpose end with one line and status 2; 1 when a part of the engine died or a server failed.
    """
    from octavo.errors import OctavoError, RemoteError, WorkerDied

    try:
        app(prog_name="octavo")  # which also sees to Ctrl-C (status 130) and to a reader that left (status 1)
    except OctavoError as error:
        flag = options.flag(error.param) if error.param else None
        sys.stderr.write(f"octavo: {error.message}{f' ({flag})' if flag and flag not in error.message else ''}\n")
        sys.exit(1 if isinstance(error, WorkerDied | RemoteError) else 2)

