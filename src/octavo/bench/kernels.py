"""`octavo bench kernels`: every op of the model's own program, at chosen numbers of rows, against the machine's ceilings.

All layers are walked, as in serving: a single layer would stay in the caches and look faster than it is.
"""

from typing import Any

from octavo.bench.latency import op_table
from octavo.bench.rig import Limits, Rig, ceilings_line, tell
from octavo.bench.steps import mean_profile
from octavo.bench.workloads import SLACK, batch, decoding, make
from octavo.core.step import StepPlan
from octavo.errors import ConfigError, UnsupportedError

DECODE_ROWS = 64  # up to so many rows are as many sequences that decode; more are one prompt's
STEPS = 8  # in which all of them decode, at least
ROOM = STEPS + SLACK + 5  # tokens behind the context: while short prompts join, the first ones decode a few more


def run(rig: Rig, rows: list[int], context: int, repeat: int) -> tuple[str, dict[str, Any]]:
    """Ops at each number of rows: medians would hide what mean times add up to, so means over ``repeat`` runs. → tables, and the result.

    Raises: ConfigError, also where not one step of so many rows ran; UnsupportedError where there is nothing recorded to measure.
    """
    if rig.work is None:
        raise UnsupportedError("bench kernels measures the native backend's program", "backend")
    check(rig.limits, rows, context)
    budget = rig.limits.max_num_batched_tokens
    texts, results = [], {}
    for count in rows:
        profiled = []
        load = decoding(count, context, STEPS, budget) if count <= DECODE_ROWS else batch(1, count, 1)
        for number in range(-1, repeat):
            rig.sample_ceilings()
            done = rig.run(make(load, rig.llm.vocab_size, number + 1, count), profile=lambda plan, count=count: measured(plan, count, context))
            if number >= 0:
                profiled += done.profiled
        if not profiled:
            raise ConfigError(
                f"no step had {count} rows: fewer sequences run at once, or fewer tokens are computed in a step, under these settings "
                f"({rig.llm.config.kv.num_kv_blocks} KV blocks, target_itl_ms {rig.llm.config.scheduler.target_itl_ms})", "rows")
        tell(f"{count} rows: {len(profiled)} steps measured")
        what = f"{count} sequences that decode at {context} tokens" if count <= DECODE_ROWS else f"a prompt of {count} tokens"
        results[str(count)], text = op_table(rig, mean_profile(rig.work, profiled), f"{count} rows ({what})")
        texts.append(text)
    return "\n".join([ceilings_line(rig.ceilings()), *texts]), rig.head("kernels") | {"repeat": repeat, "context": context, "results": results}


def measured(plan: StepPlan, rows: int, context: int) -> bool:
    """Whether a step has all the rows: of sequences that all decode, behind about ``context`` tokens each, or of one prompt."""
    if rows > DECODE_ROWS:
        return plan.num_tokens == rows and len(plan.items) == 1
    return plan.num_tokens == rows == len(plan.items) and all(item.sample and item.start >= context - SLACK for item in plan.items)


def check(limits: Limits, rows: list[int], context: int) -> None:
    """Whether steps of so many rows can be made. Raises: ConfigError."""
    most, seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    if not rows or min(rows) < 1 or max(rows) > most:
        raise ConfigError(f"rows must be from 1 to max_num_batched_tokens ({most}), not {rows}", "rows")
    if (decoding_rows := max((count for count in rows if count <= DECODE_ROWS), default=0)) > seqs:
        raise ConfigError(f"{decoding_rows} rows are as many sequences that decode; at most {seqs} run (max_num_seqs)", "rows")
    if not 2 <= context <= limits.context - ROOM:
        raise ConfigError(f"context must be from 2 to {limits.context - ROOM} tokens, not {context}", "context")
    if max(rows) > limits.context - 1:
        raise ConfigError(f"rows of one prompt: at most {limits.context - 1}, not {max(rows)}", "rows")
