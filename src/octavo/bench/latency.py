"""`octavo bench latency`: one batch of equal requests: its first token, its steps, what is spent outside the kernels, and where the rest goes."""

import statistics
from typing import Any

from octavo.bench.rig import Limits, Rig, Run, ceilings_line, tell
from octavo.bench.steps import OpTime, floor_seconds, mean_profile
from octavo.bench.tables import percentile, ranged, spread, table
from octavo.bench.workloads import batch, make
from octavo.errors import ConfigError

PROFILED = 32  # decode steps whose ops are measured, in a run of their own


def run(rig: Rig, batch_sizes: list[int], tokens_in: int, tokens_out: int, repeat: int, warmup: int) -> tuple[str, dict[str, Any]]:
    """Every batch size in turn, ``repeat`` times. → tables, and the result. Raises: ConfigError."""
    check(rig.limits, batch_sizes, tokens_in, tokens_out)
    runs: dict[int, list[Run]] = {size: [] for size in batch_sizes}
    for number in range(-warmup, repeat):
        rig.sample_ceilings()
        for size in batch_sizes:
            done = rig.run(make(batch(size, tokens_in, tokens_out), rig.llm.vocab_size, number + warmup, size))
            tell(f"{'warm-up' if number < 0 else f'round {number + 1} of {repeat}'}: batch of {size} {done.seconds:.2f} s")
            if number >= 0:
                runs[size].append(done)
    rows, results, profiles = [], {}, ""
    for size, done in runs.items():
        found, row = _facts(rig, size, done)
        results[str(size)] = found
        rows.append(row)
        if rig.native:
            found["profile"], text = profile(rig, size, tokens_in)
            profiles += f"\n{text}"
    heads = ("batch", "seconds (range)", "first token ms", "step ms", "P99", "out tok/s", "of roofline", "outside kernels")
    text = table(heads, rows) + "\n" + ceilings_line(rig.ceilings()) + profiles
    return text, rig.head("latency") | {"repeat": repeat, "tokens_in": tokens_in, "tokens_out": tokens_out, "results": results}


def check(limits: Limits, batch_sizes: list[int], tokens_in: int, tokens_out: int) -> None:
    """Whether the batches fit. Raises: ConfigError."""
    if not batch_sizes or min(batch_sizes) < 1 or max(batch_sizes) > limits.max_num_seqs:
        raise ConfigError(f"batch sizes must be from 1 to max_num_seqs ({limits.max_num_seqs}), not {batch_sizes}", "batch_size")
    if tokens_out < 3:
        raise ConfigError(f"output_len is {tokens_out}: time between tokens needs at least 3", "output_len")
    if tokens_in < 2 or tokens_in + tokens_out > limits.context:
        raise ConfigError(f"input_len {tokens_in} and output_len {tokens_out}: at least 2 in, and at most {limits.context} together", "input_len")


def _facts(rig: Rig, size: int, runs: list[Run]) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """What the runs of one batch size say, for the result and as a row."""
    ceilings = rig.ceilings()
    seconds, first = [run.seconds for run in runs], [run.first_token for run in runs]
    steps = [took for run in runs for took, _ in run.decode]
    medians = [statistics.median(took for took, _ in run.decode) for run in runs]
    outside = [1 - sum(native for _, native in run.decode) / sum(took for took, _ in run.decode) for run in runs]
    floors: list[float] = []
    if rig.work is not None and ceilings is not None:
        for run in runs:
            decode = [step for step in run.steps[1:] if step.decode]
            floors.append(floor_seconds(decode, rig.work, ceilings) / sum(took for took, _ in run.decode))
    middle = statistics.median(seconds)
    found = {
        "seconds": spread(seconds), "first_token_seconds": spread(first), "step_seconds": spread(medians),
        "step_seconds_p99": percentile(steps, 0.99), "output_tokens_per_second": sum(runs[0].load.outs) / middle,
        "decode_tokens_per_second": size / statistics.median(medians),
        "roofline": spread(floors) if floors else None, "outside_native": spread(outside) if rig.native else None,
    }
    row = (
        size, ranged(seconds, form=".3f"), ranged(first, 1e3), ranged(medians, 1e3, ".2f"), f"{1e3 * percentile(steps, 0.99):.2f}",
        f"{sum(runs[0].load.outs) / middle:.1f}", f"{100 * statistics.median(floors):.0f} %" if floors else None,
        f"{100 * statistics.median(outside):.1f} %" if rig.native else None)
    return found, row


def profile(rig: Rig, size: int, tokens_in: int) -> tuple[list[dict[str, Any]], str]:
    """A decode step of ``size`` sequences, by op. → records, and a table."""
    done = rig.run(make(batch(size, tokens_in, min(PROFILED + 1, rig.llm.max_model_len - tokens_in)), rig.llm.vocab_size, 1, size),
                   profile=lambda plan: len(plan.items) == size and plan.num_tokens == size)
    assert rig.work is not None
    title = f"A decode step of {size} sequence{'s' if size > 1 else ''} of {tokens_in} tokens and more"
    return op_table(rig, mean_profile(rig.work, done.profiled), title)


def op_table(rig: Rig, ops: list[OpTime], title: str) -> tuple[list[dict[str, Any]], str]:
    """Times of ops against the ceilings. → records, and a table, the longest first."""
    ceilings = rig.ceilings()
    assert ceilings is not None
    total = sum(op.seconds for op in ops) or 1.0
    records, rows = [], []
    for op in sorted(ops, key=lambda op: -op.seconds):
        if op.seconds == 0:
            continue
        floor, operations = ceilings.floor(op.work), sum(op.work) - op.work.nbytes
        records.append({"op": op.name, "seconds": op.seconds, "roofline": floor / op.seconds, **op.work._asdict()})
        rows.append((
            op.name, f"{1e3 * op.seconds:.3f}", f"{100 * op.seconds / total:.1f} %",
            f"{op.work.nbytes / op.seconds / 1e9:.1f}" if op.work.nbytes else None,
            f"{operations / op.seconds / 1e9:.0f}" if operations else None, f"{100 * floor / op.seconds:.0f} %" if floor else None))
    heads = ("op (all layers)", "ms", "share", "GB/s", "Gop/s", "of roofline")
    return records, f"{title}: {1e3 * total:.2f} ms in ops\n{table(heads, rows)}"
