"""Where nothing is shared, the prefix cache's bookkeeping takes at most 1 % of a step.

Claim: a prefix cache that is never hit costs next to nothing, so it can be on by default. Source: vLLM's blog of January 2025 (V1: below 1 % at
a hit rate of 0 %).
Switched: the prefix cache, on prompts that have nothing in common. What it costs is the difference in the processor time of ``plan`` and
``commit``, as a share of all processor time of the thread that steps. (Processor time, so that neighbours on the machine do not count.)
"""

from collections.abc import Callable
from random import Random
from typing import Any

from octavo.bench.lab import Lab, Run, jobs_of
from octavo.bench.outcome import Outcome, Spread

LOADS = {"prompts": (256, 4), "outputs": (16, 32)}


def run(lab: Lab) -> Outcome:
    """A load of long prompts, and one of long outputs, each with the cache and without."""
    count = 8 if lab.quick else 16

    def serve(lengths: tuple[int, int], caching: bool) -> Callable[[Random], Run]:
        return lambda draw: lab.arm(prefix_caching=caching).run(jobs_of(lab, draw, [lengths] * count))

    rows, data, shares = [], {}, {}
    for name, lengths in LOADS.items():
        found = lab.rounds({"cache": serve(lengths, True), "none": serve(lengths, False)})
        assert not any(run.counters.cache_hits for run in found["cache"]), "something was shared after all"
        planning = {arm: [run.times.planning for run in runs] for arm, runs in found.items()}
        per_step = {arm: [1e6 * each / run.counters.steps for each, run in zip(planning[arm], runs)] for arm, runs in found.items()}
        extra = [(on - off) / run.times.all for on, off, run in zip(planning["cache"], planning["none"], found["cache"], strict=True)]
        shares[name] = Spread.of(extra)
        rows.append([f"{count} × ({lengths[0]} in, {lengths[1]} out)", *(Spread.of(per_step[arm]).text(".0f", " µs") for arm in ("cache", "none")),
                     Spread.of([1e3 * run.times.all / run.counters.steps for run in found["cache"]]).text(".1f", " ms"),
                     shares[name].text(".3f", " %", 100)])
        data[name] = {"share": extra, "per_step_us": per_step, "seconds": {arm: [run.times.all for run in runs] for arm, runs in found.items()},
                      "steps": {arm: [run.counters.steps for run in runs] for arm, runs in found.items()}, "lengths": lengths}
    worst = max(shares.values(), key=lambda spread: spread.median)
    finding = f"Without hits the prefix cache takes {100 * worst.median:.2f} % of the time of a step (bound: 1 %)"
    return Outcome(finding, ["load", "plan + commit, cache", "no cache", "whole step", "the cache's share"], rows, {"loads": data, "count": count})


def draw(figure: Any, data: dict[str, Any]) -> None:
    """Time of planning left, its share of the step right."""
    from octavo.bench.picture import COLOURS, bars

    left, right = figure.subplots(1, 2)
    loads = data["loads"]
    names = [f"{arm}\n{load}" for load in loads for arm in ("cache", "no cache")]
    bars(left, names, [loads[load]["per_step_us"][arm] for load in loads for arm in ("cache", "none")], ".0f", first_ours=False)
    for place, bar in enumerate(left.patches):
        bar.set_color(COLOURS[3 if place % 2 else 0])
    left.set(title="plan and commit, µs a step")
    bars(right, [f"long {load}" for load in loads], [[100 * each for each in loads[load]["share"]] for load in loads], ".3f")
    right.axhline(1, color=COLOURS[4], linewidth=1)
    right.annotate("bound", (0.5, 1), xytext=(0, 3), textcoords="offset points", ha="center", color=COLOURS[4], fontsize=9)
    right.set(title="the cache's share of the whole time, %")
