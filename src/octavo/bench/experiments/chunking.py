"""Chunked prefill keeps the time between tokens short while long prompts arrive, for a later first token of theirs.

Claim: stall-free batching gives 2.6 to 5.6 times the serving capacity under a limit on the time between tokens. Source: Agrawal et al. 2024,
"Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI.
Switched: the token budget of a step, from 64 to one that takes a whole prompt, and ``--target-itl-ms``, which sets it by the time that steps take.
Steady decodes run when long prompts arrive; measured are the decodes' times between tokens until the last prompt has its first token.
"""

import statistics
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from octavo.bench.lab import EVERYTHING, Lab
from octavo.bench.outcome import Outcome, Spread
from octavo.simulate.drive import Job, Record, quantile

BUDGETS = (64, 128, 256, 512, 1024, EVERYTHING)
DECODES = 8


def run(lab: Lab) -> Outcome:
    """One run per budget, and one with a target of three undisturbed steps' time."""
    prompts, length = (1, 512) if lab.quick else (2, 1536)
    undisturbed = lab.arm().run([Job(0.0, lab.ids(Random(2), 16), 24) for _ in range(DECODES)])
    pace = statistics.median(gap for record in undisturbed.records for gap in record.gaps)
    target = round(3e3 * pace, 1 if pace < 0.01 else 0)

    def serve(**settings: Any) -> Callable[[Random], tuple[float, float]]:
        def once(draw: Random) -> tuple[float, float]:
            """P99 between tokens, mean time to first token of the prompts; seconds."""
            arm = lab.arm(**settings)
            begun = 8 * pace
            steady = [Job(0.0, lab.ids(draw, 16), lab.context - 64) for _ in range(DECODES)]
            longs = [Job(begun, lab.ids(draw, length), 1) for _ in range(prompts)]

            def end(now: float, records: Mapping[str, Record]) -> None:
                if all(records[f"j{DECODES + place}"].finish_reason for place in range(prompts)):
                    for place in range(DECODES):
                        arm.core.abort(f"j{place}")

            records = arm.run([*steady, *longs], observe=end).records
            arrived, served = min(r.job.arrival for r in records[DECODES:]), max(r.tokens[0] for r in records[DECODES:])
            gaps = [after - before for r in records[:DECODES] for before, after in zip(r.tokens, r.tokens[1:]) if after > arrived and before < served]
            # On a machine that stalls, all may begin in one step: then nobody got a token in all that time.
            return quantile(gaps or [served - arrived], 0.99), statistics.fmean(r.ttft for r in records[DECODES:])
        return once

    names = [str(budget) if budget < EVERYTHING else "∞" for budget in BUDGETS]
    arms = {name: serve(max_num_batched_tokens=budget) for name, budget in zip(names, BUDGETS)}
    arms["target"] = serve(max_num_batched_tokens=EVERYTHING, target_itl_ms=target)
    found = lab.rounds(arms)
    itl = {name: [gap for gap, _ in runs] for name, runs in found.items()}
    ttft = {name: [first for _, first in runs] for name, runs in found.items()}
    rows = [[f"target {target:g} ms" if name == "target" else f"budget {name}", Spread.of(itl[name]).text(".0f", " ms", 1e3),
             Spread.of(ttft[name]).text(".2f", " s")] for name in found]
    middle = {name: Spread.of(values).median for name, values in itl.items()}
    shorter, later = middle["∞"] / middle["128"], Spread.of(ttft["128"]).median / Spread.of(ttft["∞"]).median
    finding = (f"While prompts of {length} tokens arrive, decodes wait {1e3 * middle['128']:.0f} ms (P99) at a budget of 128 against "
               f"{1e3 * middle['∞']:.0f} ms unchunked, {shorter:.1f}× shorter, and the prompts' first token comes after {later:.2f}× the time; "
               f"a target of {target:g} ms gives {1e3 * middle['target']:.0f} ms")
    return Outcome(finding, ["", "P99 between tokens", "prompts' time to first token"], rows,
                   {"itl": itl, "ttft": ttft, "target_ms": target, "pace_ms": 1e3 * pace, "prompts": prompts, "length": length, "decodes": DECODES})


def draw(figure: Any, data: dict[str, Any]) -> None:
    """P99 between tokens left, what it costs the prompts right."""
    from octavo.bench.picture import COLOURS, bars

    left, right = figure.subplots(1, 2)
    names = [f"target\n{data['target_ms']:g} ms" if name == "target" else name for name in data["itl"]]
    bars(left, names, [[1e3 * each for each in values] for values in data["itl"].values()], ".0f", first_ours=False)
    bars(right, names, list(data["ttft"].values()), ".2f", first_ours=False)
    for axes in (left, right):
        for bar in axes.patches:
            bar.set_color(COLOURS[0])
        axes.patches[-1].set_color(COLOURS[2])
        axes.set(xlabel="tokens of a step, at most")
    left.axhline(data["pace_ms"], color=COLOURS[3], linewidth=1, linestyle="--")
    left.set(title=f"{data['decodes']} decodes: P99 between tokens, ms\n(dashed: without prompts)")
    right.set(title=f"prompts of {data['length']}:\nmean time to first token, s")
