"""A preempted request comes back by the cheaper of two ways, swap or recompute, chosen by measured speeds.

Claim: recomputing costs at most 20 % more than swapping, and swapping is bad where blocks are small (on a GPU, over a bus). Source: Kwon et al. 2023,
section 7.3. On a CPU a tier in memory is a copy from memory to memory, and one in a file goes through the system's page cache.
Switched: ``--preemption-mode`` and the tier (memory, file) over the victim's context. A pool holds two requests until they grow; the second, with
all of its context computed, gives way. Its cost is what moving blocks out and in took, or computing again. The prefix cache is off.
"""

import statistics
import tempfile
from collections.abc import Callable
from random import Random
from typing import Any

from octavo.bench.lab import Lab
from octavo.bench.outcome import Outcome, Spread
from octavo.observe.events import Event, Preempted, Recovered
from octavo.runner.tier import FileTier, MemoryTier
from octavo.simulate.drive import Job

ARMS = {"recompute": ("recompute", None), "swap, memory": ("swap", "memory"), "swap, file": ("swap", "file"), "auto, memory": ("auto", "memory"),
        "auto, file": ("auto", "file")}
BLOCK = 16


def run(lab: Lab) -> Outcome:
    """Each length of context each way."""
    lengths = (32, 128) if lab.quick else (32, 128, 512, 1024)
    slots = -(-max(lengths) // BLOCK) + 2

    def serve(length: int, mode: str, where: str | None) -> Callable[[Random], tuple[float, str]]:
        def once(draw: Random) -> tuple[float, str]:
            """Seconds that the preemption cost, and how it was done."""
            with tempfile.TemporaryDirectory() as folder:
                tier = None if where is None else FileTier(folder, slots, lab.block_bytes) if where == "file" else MemoryTier(slots, lab.block_bytes)
                heard: list[Event] = []
                # One block each and one between them: the first request takes it, the second needs it for its next token.
                arm = lab.arm(prefix_caching=False, num_kv_blocks=1 + length // BLOCK + 1, preemption_mode=mode, tier=tier)
                arm.core.observers.append(lambda event, now: heard.append(event))
                arm.run([Job(0.0, lab.ids(draw, BLOCK), BLOCK), Job(0.0, lab.ids(draw, length), 4)])
                if tier is not None:
                    tier.close()
            gone, back = [e for e in heard if isinstance(e, Preempted)], [e for e in heard if isinstance(e, Recovered)]
            assert len(gone) == len(back) == 1 and gone[0].request_id == "j1", f"one preemption was to be, of the second request: {heard}"
            return back[0].seconds, gone[0].how
        return once

    found = {length: lab.rounds({name: serve(length, *arm) for name, arm in ARMS.items()}) for length in lengths}
    cost = {length: {name: [seconds for seconds, _ in runs] for name, runs in by_arm.items()} for length, by_arm in found.items()}
    rows, chosen, regret = [], {}, []
    for length, by_arm in cost.items():
        middle = {name: statistics.median(values) for name, values in by_arm.items()}
        for where in ("memory", "file"):
            ways = {"recompute": middle["recompute"], "swap": middle[f"swap, {where}"]}
            hows = [how for _, how in found[length][f"auto, {where}"]]
            chosen[f"{length}, {where}"] = hows
            regret.append(max(ways[how] for how in hows) / min(ways.values()))
        rows.append([f"{length} tokens", *(Spread.of(values).text(".2f", " ms", 1e3) for values in by_arm.values())])
    longest = {name: statistics.median(values) for name, values in cost[lengths[-1]].items()}
    finding = (f"Bringing {lengths[-1]} tokens back costs {1e3 * longest['recompute']:.0f} ms by computing, "
               f"{1e3 * longest['swap, memory']:.1f} ms from memory, {1e3 * longest['swap, file']:.1f} ms from a file; "
               f"the way chosen costs at most {max(regret):.2f}× the better one at any length")
    return Outcome(finding, ["context", *ARMS], rows, {"cost": cost, "chosen": chosen, "regret": regret})


def draw(figure: Any, data: dict[str, Any]) -> None:
    """Cost over context, both axes logarithmic."""
    from octavo.bench.picture import COLOURS

    axes = figure.subplots()
    lengths = [int(length) for length in data["cost"]]
    for name, colour in (("recompute", COLOURS[1]), ("swap, file", COLOURS[2]), ("swap, memory", COLOURS[0])):
        spreads = [Spread.of([1e3 * each for each in by_arm[name]]) for by_arm in data["cost"].values()]
        ranges = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
        axes.errorbar(lengths, [s.median for s in spreads], yerr=ranges, marker="o", capsize=3, color=colour, label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens of context to bring back", ylabel="cost of the preemption, ms")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(loc="center left")
    axes.margins(x=0.06)
