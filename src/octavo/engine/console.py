"""What offline use shows on the terminal's error stream: log lines and a progress bar."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.engine.outputs import Answer

LOGGER = logging.getLogger("octavo")
LEVELS = ("debug", "info", "warning", "error", "critical")


def show_log() -> None:
    """Let the logger "octavo" write to stderr from INFO on, or from OCTAVO_LOG's level on.

    An application that set up logging itself (a handler on "octavo" or on the root) keeps its own arrangement.

    Raises: ConfigError for an unknown OCTAVO_LOG.
    """
    level = os.environ.get("OCTAVO_LOG", "info").lower()
    if level not in LEVELS:
        raise ConfigError(f"OCTAVO_LOG must be {', '.join(LEVELS[:-1])} or {LEVELS[-1]}, not {level!r}", "OCTAVO_LOG")
    if LOGGER.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s octavo: %(message)s", "%H:%M:%S"))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(level.upper())
    LOGGER.propagate = False


@contextmanager
def progress_bar(answers: "Sequence[Answer]", wanted: bool) -> Iterator[Callable[[], None]]:
    """Yields what to call after each step. Draws only on a terminal; counts prompts done and tokens per second."""
    if not wanted or not answers or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    began, shown = time.monotonic(), 0.0
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=len(answers), rate="")

        def show() -> None:
            tokens = sum(len(sample.tokens) for answer in answers for sample in answer.samples)
            rate = tokens / max(time.monotonic() - began, 1e-9)
            progress.update(task, completed=sum(answer.finished for answer in answers), rate=f"{rate:.1f} tokens/s")

        def tick() -> None:
            nonlocal shown
            now = time.monotonic()
            if now - shown > 0.1:  # counting costs more than some steps
                shown = now
                show()

        yield tick
        show()
