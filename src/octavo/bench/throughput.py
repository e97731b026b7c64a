"""`octavo bench throughput`: whole workloads, as many tokens a second as the engine makes."""

import statistics
from typing import Any

from octavo.bench.rig import Rig, ceilings_line, tell
from octavo.bench.tables import ranged, spread, table
from octavo.bench.workloads import make, named


def run(rig: Rig, workloads: str, repeat: int, warmup: int) -> tuple[str, dict[str, Any]]:
    """All workloads in turn, ``repeat`` times, after ``warmup`` rounds for nothing. → a table, and the result. Raises: ConfigError."""
    chosen = named(workloads, rig.limits.context)
    runs: dict[str, list[Any]] = {name: [] for name in chosen}
    for number in range(-warmup, repeat):
        rig.sample_ceilings()
        for place, (name, workload) in enumerate(chosen.items()):
            done = rig.run(make(workload, rig.llm.vocab_size, number + warmup, place))
            tell(f"{'warm-up' if number < 0 else f'round {number + 1} of {repeat}'}: {name} {done.seconds:.2f} s")
            if number >= 0:
                runs[name].append(done)
    ceilings = rig.ceilings()
    rows, results = [], {}
    for name, done in runs.items():
        seconds = [each.seconds for each in done]
        load, middle = done[0].load, statistics.median(seconds)
        floors = [floor / each.seconds for each in done if (floor := rig.floor(each, ceilings)) is not None]
        outside = [1 - sum(step.native for step in each.steps) / each.seconds for each in done]
        results[name] = {
            "requests": len(load.prompts), "tokens_in": load.tokens_in, "tokens_out": load.tokens_out, "seconds": spread(seconds),
            "output_tokens_per_second": load.tokens_out / middle, "total_tokens_per_second": (load.tokens_in + load.tokens_out) / middle,
            "roofline": spread(floors) if floors else None, "outside_native": spread(outside) if rig.native else None,
        }
        rows.append((
            name, len(load.prompts), load.tokens_in, load.tokens_out, ranged(seconds, form=".3f"), f"{load.tokens_out / middle:.1f}",
            f"{(load.tokens_in + load.tokens_out) / middle:.0f}", f"{100 * statistics.median(floors):.0f} %" if floors else None,
            f"{100 * statistics.median(outside):.1f} %" if rig.native else None))
    heads = ("workload", "requests", "in", "out", "seconds (range)", "out tok/s", "in+out tok/s", "of roofline", "outside kernels")
    text = table(heads, rows) + "\n" + ceilings_line(ceilings)
    return text, rig.head("throughput") | {"repeat": repeat, "results": results}
