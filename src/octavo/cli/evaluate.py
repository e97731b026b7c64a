"""`octavo eval`: what a precision costs, in perplexity, KL divergence, agreement, and one's own tasks."""

from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli import options as o

EVAL = "Evaluation"


@o.engine_options(own_seed=False)
def evaluate(
    model: o.Model,
    text: Annotated[Path | None, typer.Option(help="A text file (default: a short story that comes with Octavo, written for this).",
                                              rich_help_panel=EVAL)] = None,
    tasks: Annotated[Path | None, typer.Option(help='JSON lines: {"prompt", "choices", "answer"} by log-probability, {"prompt", "target"} by exact '
                                                    "match. Without --text they are all that is measured.", rich_help_panel=EVAL)] = None,
    reference: Annotated[list[str] | None, typer.Option(help="A setting of the reference, NAME=VALUE; repeat for several (default dtype=float32).",
                                                        rich_help_panel=EVAL)] = None,
    window: Annotated[int, typer.Option(help="Tokens of the text that are seen together.", rich_help_panel=EVAL)] = 512,
    save: Annotated[Path | None, o.save_option(EVAL)] = None,
    *, settings: dict[str, Any],
) -> None:
    """Compare a model under the settings given with a reference, side by side. The last line is JSON."""
    from octavo.cli.terminal import Startup

    with Startup() as startup:
        from octavo.bench import quality, result
        from octavo.bench.tasks import read_tasks

        given = read_tasks(tasks) if tasks is not None else []
        prose, source = quality.read_text(text) if text is not None or not given else (None, "")
        pair = quality.Pair(model, settings, quality.settings_of(reference or ["dtype=float32"], o.ENGINE_OPTIONS), startup)
    with pair:
        shown, found = quality.run(pair, prose, source, given, window)
    result.hand_out(shown, found, save)
