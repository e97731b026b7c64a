"""How a start-up looks: a line per phase with its time, a bar for what takes long, the facts below. Written to standard error."""

import shutil
import sys
import textwrap
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.text import Text

INDENT = 2
TOLD = 0.01  # seconds: a phase that took less is told only when asked for everything


def columns(rows: Sequence[tuple[str, str]]) -> str:
    """Names and facts side by side. On a terminal long facts go on below themselves; into a file or a pipe each row is one line."""
    width = max(len(name) for name, _ in rows) + 2
    room = shutil.get_terminal_size().columns - INDENT - width - 1 if sys.stdout.isatty() else sys.maxsize
    lines = []
    for name, fact in rows:
        first, *more = textwrap.wrap(fact, max(room, 20)) or [""]
        lines.append(f"{'':{INDENT}}{name:{width}}{first}")
        lines.extend(f"{'':{INDENT + width}}{line}" for line in more)
    return "\n".join(lines) + "\n"


class Startup:
    """A Report (engine/report.py) for people. A context manager: leaving it takes the bar away.

    ``verbose`` shows the resolved settings too, which are long. Into a file or a pipe each line goes whole and without colours.
    """

    def __init__(self, verbose: bool = False) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._verbose = verbose
        self._bar = Progress(
            TextColumn("  {task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
            console=self.console, transient=True, disable=not self.console.is_terminal,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> "Startup":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away. May be called twice."""
        self._bar.stop()

    def begin(self, phase: str) -> None:
        """A phase begins: shown once it is over, or by its bar."""

    def progress(self, what: str, done: int, total: int | None) -> None:
        """Bytes of a download or of the weights."""
        task = self._tasks.get(what)
        if task is None:
            task = self._tasks[what] = self._bar.add_task(what, total=total)
        self._bar.update(task, completed=done, total=total)

    def end(self, phase: str, seconds: float) -> None:
        """The phase and its time."""
        for task in self._tasks.values():
            self._bar.remove_task(task)
        self._tasks.clear()
        if seconds >= TOLD or self._verbose:
            self._line(Text.assemble(phase, (f"  {seconds:.2f} s", "dim")))

    def note(self, text: str) -> None:
        """A fact."""
        if self._verbose or not text.startswith("settings "):
            self._line(Text(text, style="dim"))

    def _line(self, text: Text) -> None:
        """One line; on a terminal what is too long goes on below, further in."""
        if not self.console.is_terminal:
            self.console.print(" " * INDENT + text.plain, markup=False, soft_wrap=True)
            return
        first, *rest = text.wrap(self.console, self.console.width - 2 * INDENT)
        self.console.print(Padding(first, (0, 0, 0, INDENT)))
        for more in rest:
            self.console.print(Padding(more, (0, 0, 0, 2 * INDENT)))
