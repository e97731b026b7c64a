"""Requests that begin alike compute the common part once; where nothing is shared, the prefix cache costs nothing.

Claim: prefix sharing saves what is shared of the prefill, up to 5 times the throughput on programs that share much, with at most 1 % lost at
no hits. Source: Zheng et al. 2024, "SGLang: Efficient Execution of Structured Language Model Programs"; vLLM's blog of January 2025.
Switched: the prefix cache. First a load of requests behind one long common beginning, then prompts of which 0 to 90 % is common.
"""

from random import Random
from typing import Any

from octavo.bench.lab import Lab, Run
from octavo.bench.outcome import Outcome, Spread, ratio
from octavo.simulate.drive import Job

SHARES = (0.0, 0.3, 0.6, 0.9)


def run(lab: Lab) -> Outcome:
    """The workload ``prefix`` with the cache and without; then one sweep over the share."""
    count, head, own, out = (8, 384, 32, 16) if lab.quick else (32, 768, 32, 64)

    def workload(caching: bool) -> Any:
        def serve(draw: Random) -> Run:
            common = lab.ids(draw, head)
            return lab.arm(prefix_caching=caching).run([Job(0.0, common + lab.ids(draw, own), out) for _ in range(count)])
        return serve

    found = lab.rounds({"cache": workload(True), "none": workload(False)})
    spared = 1 - found["cache"][0].counters.tokens_planned / found["none"][0].counters.tokens_planned
    faster = ratio([r.seconds for r in found["none"]], [r.seconds for r in found["cache"]])
    sooner = ratio([_ttft(r) for r in found["none"]], [_ttft(r) for r in found["cache"]])
    prompts, length = (4, 256) if lab.quick else (8, 512)

    def sweep(share: float | None) -> Any:
        def serve(draw: Random) -> Run:
            common = lab.ids(draw, int(length * (share or 0)))
            jobs = [Job(0.0, common + lab.ids(draw, length - len(common)), 8) for _ in range(prompts)]
            return lab.arm(prefix_caching=share is not None).run(jobs)
        return serve

    swept = lab.rounds({"none": sweep(None), **{f"{share:.0%}": sweep(share) for share in SHARES}})
    without = [r.seconds for r in swept.pop("none")]
    gains = {share: ratio(without, [r.seconds for r in runs]) for share, runs in swept.items()}
    rows = [
        ["time", *(Spread.of([r.seconds for r in found[name]]).text(".2f", " s") for name in ("cache", "none")), faster.text(".2f", "×")],
        ["mean time to first token", *(Spread.of([_ttft(r) for r in found[name]]).text(".2f", " s") for name in ("cache", "none")),
         sooner.text(".2f", "×")],
        ["rows computed", *(f"{found[name][0].counters.tokens_planned:,}" for name in ("cache", "none")), f"{spared:.0%} spared"],
        *([f"{share} of {length} tokens shared", Spread.of([r.seconds for r in swept[share]]).text(".2f", " s"),
           Spread.of(without).text(".2f", " s"), gain.text(".2f", "×")] for share, gain in gains.items()),
    ]
    loss = 1 - gains["0%"].median
    finding = (f"{count} requests behind {head} common tokens run {faster.median:.1f}× as fast with the prefix cache, the first token comes "
               f"{sooner.median:.1f}× as soon; at 0 % shared it costs {100 * loss:.1f} %")
    return Outcome(finding, ["", "cache", "no cache", "gain"], rows, {
        "seconds": {name: [r.seconds for r in runs] for name, runs in found.items()},
        "ttft": {name: [_ttft(r) for r in runs] for name, runs in found.items()},
        "rows": {name: runs[0].counters.tokens_planned for name, runs in found.items()}, "sweep_without": without,
        "sweep": {share: [r.seconds for r in runs] for share, runs in swept.items()}, "count": count, "head": head, "length": length,
    })


def _ttft(run: Run) -> float:
    return sum(record.ttft for record in run.records) / len(run.records)


def draw(figure: Any, data: dict[str, Any]) -> None:
    """The workload's time left, the sweep right."""
    from octavo.bench.picture import COLOURS, bars

    left, right = figure.subplots(1, 2, width_ratios=(1, 1.5))
    bars(left, ["cache", "no cache"], [data["seconds"]["cache"], data["seconds"]["none"]], ".1f")
    left.set(title=f"{data['count']} requests, {data['head']} tokens common", ylabel="seconds")
    gains = [ratio(data["sweep_without"], seconds) for seconds in data["sweep"].values()]
    places = [float(share.rstrip("%")) for share in data["sweep"]]
    right.axhline(1, color=COLOURS[3], linewidth=1)
    right.errorbar(places, [g.median for g in gains], yerr=[[g.median - g.low for g in gains], [g.high - g.median for g in gains]], marker="o",
                   capsize=3)
    for place, gain in zip(places, gains):
        right.annotate(f"{gain.median:.2f}×", (place, gain.median), xytext=(6, -12), textcoords="offset points", fontsize=9)
    right.set(title=f"prompts of {data['length']} tokens", xlabel="shared by all prompts, %", ylabel="speed, cache / no cache", ylim=(0, None))
    right.margins(x=0.1)
