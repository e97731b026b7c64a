"""Runs experiments: tells how they get on, prints a table each, writes a JSON file and a picture each, and the page of all results."""

import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from octavo.bench import picture, result
from octavo.bench.lab import Lab
from octavo.bench.outcome import Outcome
from octavo.bench.page import where_measured
from octavo.bench.tables import table
from octavo.engine.report import Report
from octavo.errors import ConfigError

NAMES = ("utilization", "batching", "prefix", "cache-cost", "sharing", "together", "preemption", "chunking", "fairness", "tight-pool", "sameness")


class Experiment(Protocol):
    """A module of octavo.bench.experiments. The first line of its docstring is the claim."""

    __doc__: str

    def run(self, lab: Lab) -> Outcome:
        """Measure."""

    def draw(self, figure: Any, data: dict[str, Any]) -> None:
        """Draw an outcome's data into a matplotlib figure."""


def find(name: str) -> Experiment:
    """An experiment by its name. Raises: ConfigError."""
    if name not in NAMES:
        raise ConfigError(f"there is no experiment {name!r}; there are: {', '.join(NAMES)}", "experiment")
    module: Any = importlib.import_module(f"octavo.bench.experiments.{name.replace('-', '_')}")
    return module


def claim(name: str) -> str:
    """What an experiment is to show, in one line."""
    return find(name).__doc__.partition("\n")[0]


def run(names: Sequence[str], model: str, out: Path, *, repeats: int, quick: bool, pictures: bool, num_threads: int | None, report: Report) -> None:
    """Run experiments one after the other over one loaded model; tables go to standard output, progress to standard error.

    Raises: ConfigError, CheckpointError, UnsupportedError.
    """
    chosen = {name: find(name) for name in names or NAMES}
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, not {repeats}", "repeats")
    if pictures:
        picture.require()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out: the folder {out} cannot be made: {error}", "out") from error
    lab = Lab(model, repeats=repeats, quick=quick, num_threads=num_threads, report=report, tell=_tell)
    try:
        head = result.head(lab.config)
        lab.warm_up()
        for number, (name, experiment) in enumerate(chosen.items(), 1):
            _tell(f"{name} ({number} of {len(chosen)}): {claim(name)}", indent=0)
            began = time.perf_counter()
            outcome = experiment.run(lab)
            seconds = time.perf_counter() - began
            whole = {"experiment": name, "claim": claim(name), "finding": outcome.finding, "columns": outcome.columns, "table": outcome.table,
                     "quick": quick, "repeats": repeats, "seconds": round(seconds, 1), **head, "data": outcome.data}
            result.write(out / f"{name}.json", whole)
            if pictures:
                paint(out / f"{name}.json")
            sys.stdout.write(f"{name}: {outcome.finding}\n\n{table(outcome.columns, outcome.table)}\n")
            sys.stdout.flush()
    finally:
        lab.close()
    _tell(f"results in {out}", indent=0)


def redraw(out: Path, names: Sequence[str]) -> None:
    """Draw the pictures of the results in a folder again. Raises: ConfigError, UnsupportedError."""
    for name in names or NAMES:
        find(name)
        if (out / f"{name}.json").exists():
            paint(out / f"{name}.json")


def paint(path: Path) -> None:
    """Draw the picture that belongs to a result's JSON, beside it. Raises: UnsupportedError."""
    found = json.loads(path.read_text())
    note = (f"{where_measured(found)}; {'quick run, ' if found['quick'] else ''}medians of {found['repeats']}, lines span lowest to highest; "
            f"octavo bench experiments {found['experiment']}")
    picture.save(path.with_suffix(".png"), found["finding"], find(found["experiment"]).draw, found["data"], note)


def _tell(text: str, indent: int = 2) -> None:
    sys.stderr.write(f"{'':{indent}}{text}\n")
    sys.stderr.flush()
