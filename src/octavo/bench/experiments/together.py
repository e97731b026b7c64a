"""Sequences over the same blocks read their K and V together, with the same tokens.

Claim: attention that takes all sequences of a shared prefix at once turns reads of memory into products. Source: Juravsky et al. 2024,
"Hydragen: High-Throughput LLM Inference with Shared Prefixes"; Ye et al. 2025, "FlashInfer", section 3.1 (composable formats).
Switched: what there is to share. As many requests, as long and as cached, behind one beginning, and each behind one of its own: the prefix
cache has all beginnings before what is measured, so the requests decode side by side. A request alone, which reads for itself, has to
give the same tokens.
"""

from random import Random
from statistics import median
from typing import Any

from octavo.bench.lab import Lab, Run
from octavo.bench.outcome import Outcome, Spread, ratio
from octavo.simulate.drive import Job

COMMON, APART = "one beginning", "beginnings of their own"


def run(lab: Lab) -> Outcome:
    """The step in which all requests decode, in milliseconds, by the length of the beginning."""
    count, own, out, heads = (8, 16, 8, (256,)) if lab.quick else (32, 16, 24, (256, 768))
    heads = tuple(head for head in heads if head + own + out <= lab.context) or (lab.context - own - out - 1,)
    rows: list[list[str]] = []
    data: dict[str, dict[str, list[float]]] = {}
    same = 0
    for head in heads:
        shared: list[float] = []

        def serve(common: bool, head: int = head, shared: list[float] = shared) -> Any:
            def once(draw: Random) -> tuple[Run, list[Job]]:
                first = lab.ids(draw, head)
                jobs = [Job(0.0, (first if common else lab.ids(draw, head)) + lab.ids(draw, own), out) for _ in range(count)]
                arm = lab.arm()
                arm.run([Job(0.0, job.prompt[: head + 1], 1) for job in jobs])
                before = lab.tokens_shared
                done = arm.run(jobs)
                if common:
                    shared.append((lab.tokens_shared - before) / (count * head * out))
                return done, jobs
            return once

        found = lab.rounds({COMMON: serve(True), APART: serve(False)}, min(lab.repeats, 3))  # beginnings of their own take long to compute
        for done, jobs in found[COMMON]:
            alone = lab.arm().run(jobs[:1])
            assert alone.records[0].ids == done.records[0].ids, "a request gave other tokens beside others"
            same += 1
        steps = {name: [1000 * _step(done) for done, _ in runs] for name, runs in found.items()}
        here, there = (Spread.of(steps[name]) for name in (COMMON, APART))
        rows.append([f"{count} × {head + own} tokens, {head} of them common", here.text(".1f", " ms"), there.text(".1f", " ms"),
                     ratio(steps[APART], steps[COMMON]).text(".2f", "×"), f"{100 * median(shared):.0f} %"])
        data[str(head)] = steps
    steps = data[longest := str(heads[-1])]
    here, there, gain = Spread.of(steps[COMMON]), Spread.of(steps[APART]), ratio(steps[APART], steps[COMMON])
    finding = (f"A decode step of {count} requests behind {longest} common tokens takes {here.median:.1f} ms, behind as many of their own "
               f"{there.median:.1f} ms ({gain.median:.2f}× as long); {same} of {same} requests gave alone the same tokens")
    columns = ["a step's requests", COMMON, APART, "gain", "reads of the beginning spared"]
    return Outcome(finding, columns, rows, {"steps": data, "count": count, "own": own})


def _step(run: Run) -> float:
    """Seconds between two tokens while all requests decode."""
    begun, end = max(record.tokens[0] for record in run.records), min(record.tokens[-1] for record in run.records)
    gaps = [b - a for a, b in zip(run.records[-1].tokens, run.records[-1].tokens[1:]) if a >= begun and b <= end]
    assert gaps, "the first request ended before the last one began"
    return median(gaps)


def draw(figure: Any, data: dict[str, Any]) -> None:
    """The step by the length of the beginning."""
    axes = figure.subplots()
    for name in (COMMON, APART):
        spreads = [Spread.of(steps[name]) for steps in data["steps"].values()]
        axes.errorbar([int(head) for head in data["steps"]], [s.median for s in spreads],
                      yerr=[[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]], marker="o", capsize=3, label=name)
    axes.set(xlabel="tokens of the beginning", ylabel=f"decode step of {data['count']} requests, ms", xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False)
