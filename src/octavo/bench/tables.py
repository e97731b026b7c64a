"""Numbers for people: a table in columns, medians with their range."""

import math
import statistics
from collections.abc import Sequence
from typing import Any


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows under heads: the first column to the left, the others to the right; None is a dash."""
    cells = [[str(head) for head in heads], *(["–" if cell is None else str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(heads))]
    return "\n".join("  ".join(cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(zip(row, widths)))
                     .rstrip() for row in cells) + "\n"


def spread(samples: Sequence[float]) -> dict[str, Any]:
    """Median, least, most and the samples themselves."""
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "samples": list(samples)}


def percentile(samples: Sequence[float], part: float) -> float:
    """The sample below which ``part`` (0 … 1) of them lie, nearest rank."""
    return sorted(samples)[max(0, math.ceil(part * len(samples)) - 1)]


def ranged(samples: Sequence[float], scale: float = 1.0, form: str = ".1f") -> str:
    """Median (least to most)."""
    low, middle, high = (value * scale for value in (min(samples), statistics.median(samples), max(samples)))
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"
