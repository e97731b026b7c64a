"""Continuous batching keeps the batch full where outputs differ in length, and changes nothing where they do not.

Claim: iteration-level scheduling gives up to 8 times the throughput of static batching on long-tailed outputs, and the more, the longer the
tail. Source: Yu et al. 2022, "Orca", OSDI; Anyscale 2023, "How continuous batching enables 23x throughput in LLM inference".
Switched: who may join. Static: a batch is formed and nobody joins until its longest member has ended, once with the places of ended members
left free (as kind as can be), and once going on computing them, as padded batches do. Loads: long-tailed output lengths, and equal ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from octavo.bench.baselines import StaticBatching
from octavo.bench.lab import Lab, Run, jobs_of
from octavo.bench.outcome import Outcome, Spread, ratio

TAIL, EQUAL = "long tail", "equal lengths"
CONTINUOUS, STATIC, PADDED = "continuous", "static", "static, padded"


def run(lab: Lab) -> Outcome:
    """The same requests, batched each way."""
    size, count = (4, 12) if lab.quick else (8, 32)
    draw = Random(1)
    tail = [(24, min(max(int(draw.paretovariate(0.9) * 6), 6), 48 if lab.quick else 192)) for _ in range(count)]
    equal = [(24, max(1, sum(out for _, out in tail) // count))] * count

    def serve(lengths: Sequence[tuple[int, int]], kind: str) -> Callable[[Random], tuple[float, float]]:
        def once(draw: Random) -> tuple[float, float]:
            jobs, static = jobs_of(lab, draw, lengths), StaticBatching(size)
            if kind == PADDED:
                batches = [jobs[first : first + size] for first in range(0, count, size)]
                jobs = [replace(job, output=max(each.output for each in batch)) for batch in batches for job in batch]
            arm = lab.arm(max_num_seqs=size, predicates=[] if kind == CONTINUOUS else [static])
            static.scheduler = arm.scheduler
            found: Run = arm.run(jobs)
            useful = sum(out for _, out in lengths)
            return useful / found.seconds, found.averages.resident / size * useful / sum(job.output for job in jobs)
        return once

    found = {
        TAIL: lab.rounds({kind: serve(tail, kind) for kind in (CONTINUOUS, STATIC, PADDED)}),
        EQUAL: lab.rounds({kind: serve(equal, kind) for kind in (CONTINUOUS, STATIC)}),
    }
    speed = {load: {kind: [each for each, _ in runs] for kind, runs in by_kind.items()} for load, by_kind in found.items()}
    fill = {load: {kind: [each for _, each in runs] for kind, runs in by_kind.items()} for load, by_kind in found.items()}
    gains = {load: {kind: ratio(by_kind[CONTINUOUS], by_kind[kind]) for kind in by_kind} for load, by_kind in speed.items()}
    rows = [
        [f"{load}, {kind}", Spread.of(speed[load][kind]).text(".0f", " tokens/s"), Spread.of(fill[load][kind]).text(".0f", " %", 100),
         gains[load][kind].text(".2f", "×")]
        for load in speed for kind in speed[load]
    ]
    finding = (f"On long-tailed outputs continuous batching gives {gains[TAIL][STATIC].median:.2f}× the throughput of static batching, "
               f"{gains[TAIL][PADDED].median:.2f}× that of padded batches; at equal lengths {gains[EQUAL][STATIC].median:.2f}×")
    return Outcome(finding, ["", "output", "batch fill", "continuous / this"], rows,
                   {"tokens_per_second": speed, "fill": fill, "tail": [out for _, out in tail], "equal": equal[0][1], "batch": size})


def draw(figure: Any, data: dict[str, Any]) -> None:
    """Throughput of both loads, and how full the batch was."""
    from octavo.bench.picture import bars

    panels = figure.subplots(1, 3, width_ratios=(3, 2, 3))
    for axes, load in zip(panels, (TAIL, EQUAL)):
        kinds = list(data["tokens_per_second"][load])
        bars(axes, [kind.replace(", ", ",\n") for kind in kinds], [data["tokens_per_second"][load][kind] for kind in kinds], ".0f")
        axes.set(title=f"{load}:\noutput tokens/s")
    kinds = list(data["fill"][TAIL])
    bars(panels[2], [kind.replace(", ", ",\n") for kind in kinds], [[100 * v for v in data["fill"][TAIL][kind]] for kind in kinds], ".0f")
    panels[2].set(title=f"long tail: places of {data['batch']}\nthat do useful work, %")
