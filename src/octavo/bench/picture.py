"""Pictures of results: one look for all. The only file that imports matplotlib (extra "bench")."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.errors import UnsupportedError

COLOURS = ("#1f5a8c", "#d9822b", "#5b8c3a", "#8c8c8c", "#a23b3b", "#6b4fa0", "#c9a227")  # ours first
STYLE = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": "#e4e4e4",
    "axes.titlesize": 10, "axes.labelsize": 9, "xtick.labelsize": 9, "ytick.labelsize": 9, "legend.fontsize": 9, "legend.frameon": False,
    "font.family": "sans-serif", "axes.titlelocation": "left",
}


def require() -> None:
    """Raises: UnsupportedError when matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"pictures need {error.name}: pip install 'octavo[bench]', or leave them out with --no-pictures") from error
    matplotlib.use("Agg")


def save(path: Path, title: str, draw: Callable[[Any, dict[str, Any]], None], data: dict[str, Any], note: str) -> None:
    """Draw into a PNG. ``note``: what was measured and where, in small type below. Raises: UnsupportedError."""
    require()
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE | {"axes.prop_cycle": cycler(color=COLOURS)}):
        figure = Figure(figsize=(8, 4.4), dpi=110, layout="constrained")
        lines = textwrap.wrap(title, 84, break_on_hyphens=False)
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=11, fontweight="bold")
        figure.supxlabel("\n".join(textwrap.wrap(note, 140)), x=0.01, ha="left", fontsize=7, color="#666666")
        draw(figure, data)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None})


def bars(axes: Any, names: list[str], samples: list[list[float]], form: str, *, first_ours: bool = True) -> None:
    """A bar per name at the median, with the range of its samples and the median's value above."""
    from octavo.bench.outcome import Spread

    spreads = [Spread.of(each) for each in samples]
    colours = [COLOURS[0] if first_ours and not place else COLOURS[3] if first_ours else COLOURS[place] for place in range(len(names))]
    middles = [spread.median for spread in spreads]
    ranges = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
    axes.bar(range(len(names)), middles, color=colours, width=0.62)
    axes.errorbar(range(len(names)), middles, yerr=ranges, fmt="none", ecolor="#333333", elinewidth=1, capsize=3)
    for place, spread in enumerate(spreads):
        axes.annotate(format(spread.median, form), (place, spread.high), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=9)
    axes.set_xticks(range(len(names)), names)
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
