"""What an experiment hands on, and the little statistics it needs."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """``finding``: one sentence with the figures, the picture's title. ``table``: rows of text under ``columns``. ``data``: plain numbers, lists and
    dictionaries, from which the picture is drawn; raw samples among them."""

    finding: str
    columns: list[str]
    table: list[list[str]]
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and the range of the samples around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """Of at least one sample."""
        return cls(statistics.median(samples), min(samples), max(samples))

    def text(self, form: str = ".3g", unit: str = "", times: float = 1.0) -> str:
        """Median (lowest … highest), multiplied by ``times``."""
        middle, low, high = (f"{value * times:{form}}" for value in (self.median, self.low, self.high))
        return f"{middle}{unit}" if low == high else f"{middle}{unit} ({low} … {high})"


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Of pairs from the same round."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])
