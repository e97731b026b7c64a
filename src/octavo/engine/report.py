"""How a start-up is told: to a Report, by default the log."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Report(Protocol):
    """Hears what start-up does, in order."""

    def begin(self, phase: str) -> None:
        """A phase begins."""

    def progress(self, what: str, done: int, total: int | None) -> None:
        """Bytes of a download or of the weights. May come from another thread."""

    def end(self, phase: str, seconds: float) -> None:
        """The phase is over."""

    def note(self, text: str) -> None:
        """A fact for people: the final settings, the ledger, the effective context."""


class LogReport:
    """Start-up as INFO lines of a logger: one per phase and per fact."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def begin(self, phase: str) -> None:
        """Told at its end, with its time."""

    def progress(self, what: str, done: int, total: int | None) -> None:
        """Not told: a log is no progress bar."""

    def end(self, phase: str, seconds: float) -> None:
        """One line."""
        self._logger.info("%s: %.2f s", phase, seconds)

    def note(self, text: str) -> None:
        """One line."""
        self._logger.info("%s", text)


@contextmanager
def phase(report: Report, name: str) -> Iterator[None]:
    """Tell the beginning of a phase and, when it went well, its end with its time."""
    began = time.perf_counter()
    report.begin(name)
    yield
    report.end(name, time.perf_counter() - began)
