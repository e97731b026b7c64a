"""How a start-up looks on a terminal: a line per phase with its time, a bar for what takes long. Written to standard error."""

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


class Startup:
    """A Report (engine/report.py) for people. A context manager: leaving it takes the bar away."""

    def __init__(self, verbose: bool = False) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._verbose = verbose
        self._bar = Progress(
            TextColumn("  {task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
            console=self.console, transient=True,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> "Startup":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
        self.console.print(f"  {phase} [dim]{seconds:.2f} s[/dim]")

    def note(self, text: str) -> None:
        """A fact. The resolved settings are long: they go without markup, dimmed."""
        self.console.print(f"  {text}", style="dim", markup=False)
