"""The `octavo` command: one module per subcommand, imported when it is asked for (help and errors stay fast)."""

import sys

import typer

from octavo.cli.chat import chat
from octavo.cli.generate import generate
from octavo.cli.inspect import inspect
from octavo.cli.pull import pull

app = typer.Typer(
    name="octavo", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="LLM inference on the machine you have: fast on a CPU, the same tokens always.",
)
app.command()(generate)
app.command()(chat)
app.command()(inspect)
app.command()(pull)


def _version(asked: bool) -> None:
    if asked:
        import octavo

        typer.echo(f"octavo {octavo.__version__}")
        raise typer.Exit


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version.")) -> None:
    pass


def main() -> None:
    """Run the command line; errors made on purpose end with one line and status 2 (1 when a part of the engine died)."""
    from octavo.errors import OctavoError, WorkerDied

    try:
        app()
    except OctavoError as error:
        field = f" [{error.param}]" if error.param else ""
        sys.stderr.write(f"octavo: {type(error).__name__}{field}: {error.message}\n")
        sys.exit(1 if isinstance(error, WorkerDied) else 2)
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away: nothing more to say
        sys.exit(141)


if __name__ == "__main__":
    main()
