"""Paged KV memory is filled with tokens almost wholly, and so serves more requests in the same bytes than contiguous reservation.

Claim: reserved KV memory is used to 20 to 38 %, paged to 96 %, which gives 2 to 4 times the throughput at the same latency. Source: Kwon et al. 2023,
"Efficient Memory Management for Large Language Model Serving with PagedAttention", sections 3.1 and 6.
Switched: how a request is given its KV memory, in a pool of the same bytes: blocks as it grows (with optimistic and with predicted admission), or
at admission one piece of the longest length that the load may have, of its prompt and its output rounded up to a power of two, or of exactly what
it will need (which nobody knows), first fit. The load is the first half of the workload ``mixed``, and once, in pages, all of it; requests ask for
more than they take. Predicted admission has seen 16 outputs before. Prefix caching is off. What more requests at once
are worth depends on what a row of a larger batch costs on the machine.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from octavo.bench.baselines import ContiguousKv, next_power_of_two
from octavo.bench.lab import HISTORY, Lab, Run, jobs_of, lognormal
from octavo.bench.outcome import Outcome, Spread, ratio
from octavo.bench.workloads import WORKLOADS
from octavo.kv.manager import KvManager

PAGES, PREDICTED = "pages", "pages, predicted"
ARMS = (PAGES, PREDICTED, "exact size", "power of two", "longest")


def run(lab: Lab) -> Outcome:
    """Serve the load in all four kinds of memory."""
    mixed = WORKLOADS["mixed"](lambda count: [0] * count)
    whole = [(len(prompt), out) for prompt, out in zip(mixed.prompts, mixed.outs, strict=True)]
    lengths = lognormal(12, 3.6, 3.2, most_in=128, most_out=64) if lab.quick else whole[:32]
    most = 128 if lab.quick else 512
    longest = 192 if lab.quick else 1536
    blocks = 3 * longest // 16
    reservations: dict[str, Callable[[int, int], int]] = {
        "exact size": lambda tokens_in, tokens_out: tokens_in + tokens_out,
        "power of two": lambda tokens_in, tokens_out: min(tokens_in + next_power_of_two(tokens_out), longest),
        "longest": lambda tokens_in, tokens_out: longest,
    }

    def memory(name: str) -> KvManager:
        if name not in reservations:
            return KvManager(blocks)
        reserve = reservations[name]
        return ContiguousKv(blocks, lambda request_id: reserve(*lengths[int(request_id[1:])]))

    scattered: dict[str, list[float]] = {name: [] for name in reservations}

    def serve(name: str) -> Callable[[Random], Run]:
        def once(draw: Random) -> Run:
            kv = memory(name)
            arm = lab.arm(kv=kv, admission="predicted" if name == PREDICTED else "optimistic")
            if name == PREDICTED:
                arm.learn(lab, [tokens_out for _, tokens_out in lengths[:HISTORY]], most)
            found = arm.run(jobs_of(lab, draw, lengths, most=most))
            if isinstance(kv, ContiguousKv):
                scattered[name].append(kv.scattered / kv.refused if kv.refused else 0.0)
            return found
        return once

    found = lab.rounds({name: serve(name) for name in ARMS})
    used = {name: [r.averages.utilization for r in runs] for name, runs in found.items()}
    resident = {name: [r.averages.resident for r in runs] for name, runs in found.items()}
    speed = {name: [r.tokens_per_second for r in runs] for name, runs in found.items()}
    preemptions = {name: [r.counters.preemptions for r in runs] for name, runs in found.items()}
    rows = [
        [name, Spread.of(used[name]).text(".1f", " %", 100), Spread.of(resident[name]).text(".1f"), Spread.of(speed[name]).text(".0f", " tokens/s"),
         ratio(speed[PREDICTED], speed[name]).text(".2f", "×"), Spread.of(preemptions[name]).text(".0f"),
         Spread.of(scattered[name]).text(".0f", " %", 100) if name in scattered else "–"]
        for name in ARMS
    ]
    full = 0.0
    if not lab.quick:
        full = lab.arm(kv=KvManager(blocks)).run(jobs_of(lab, Random(0), whole, most=most)).averages.utilization
        rows.append(["pages, all of mixed", f"{100 * full:.1f} %", *["–"] * 5])
    middle = {name: 100 * Spread.of(values).median for name, values in used.items()}
    gains = [ratio(speed[PREDICTED], speed[name]).median for name in reservations]
    finding = (f"Pages are {100 * full or middle[PAGES]:.1f} % full, reservations of exact size {middle['exact size']:.0f} %, of a power of two "
               f"{middle['power of two']:.0f} %, of the longest {middle['longest']:.0f} %; pages with predicted admission give "
               f"{', '.join(f'{gain:.2f}×' for gain in gains[:-1])} and {gains[-1]:.2f}× their throughput in the same bytes")
    columns = ["", "live tokens / slots", "requests at once", "output", "pages, predicted / this", "preemptions", "put off by scatter"]
    return Outcome(finding, columns, rows, {
        "utilization": used, "resident": resident, "tokens_per_second": speed, "scattered": scattered, "preemptions": preemptions,
        "utilization_of_mixed": full, "blocks": blocks, "longest": longest, "lengths": lengths,
    })


def draw(figure: Any, data: dict[str, Any]) -> None:
    """Utilization, requests at once, throughput."""
    from octavo.bench.picture import COLOURS, bars

    names = ["pages", "pages,\npredicted", "exact\nsize", "power\nof two", "longest"]
    panels = zip(figure.subplots(1, 3), (
        ("utilization", "live tokens / allocated slots, %", ".0f", 100), ("resident", "requests at once", ".1f", 1),
        ("tokens_per_second", "output tokens/s", ".0f", 1)))
    for axes, (key, label, form, times) in panels:
        bars(axes, names, [[times * value for value in data[key][name]] for name in ARMS], form)
        axes.patches[1].set_color(COLOURS[0])
        axes.tick_params(axis="x", labelsize=7)
        axes.set(title=label)
