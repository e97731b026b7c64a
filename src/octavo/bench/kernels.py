"""`octavo bench kernels`: every op of the model's own program, at chosen numbers of rows, against the machine's ceilings.

All layers are walked, as in serving: a single layer would stay in the caches and look faster than it is.
"""

from typing import Any

from octavo.bench.latency import op_table
from octavo.bench.rig import Rig, ceilings_line, tell
from octavo.bench.steps import mean_profile
from octavo.bench.workloads import batch, make
from octavo.errors import ConfigError, UnsupportedError

DECODE_ROWS = 64  # up to so many rows are as many sequences that decode; more are one prompt's


def run(rig: Rig, rows: list[int], context: int, repeat: int) -> tuple[str, dict[str, Any]]:
    """Ops at each number of rows: medians would hide what mean times add up to, so means over ``repeat`` runs. → tables, and the result.

    Raises: ConfigError; UnsupportedError where there is nothing recorded to measure.
    """
    if rig.work is None:
        raise UnsupportedError("bench kernels measures the native backend's program", "backend")
    _check(rig, rows, context)
    texts, results = [], {}
    for count in rows:
        profiled = []
        for number in range(-1, repeat):
            rig.sample_ceilings()
            load = batch(count, context, 9) if count <= DECODE_ROWS else batch(1, count, 1)
            done = rig.run(make(load, rig.llm.vocab_size, number + 1, count),
                           profile=lambda plan, count=count: plan.num_tokens == count and (len(plan.items) in (1, count)))
            if number >= 0:
                profiled += done.profiled
        tell(f"{count} rows: {len(profiled)} steps measured")
        what = f"{count} sequences that decode at {context} tokens" if count <= DECODE_ROWS else f"a prompt of {count} tokens"
        results[str(count)], text = op_table(rig, mean_profile(rig.work, profiled), f"{count} rows ({what})")
        texts.append(text)
    return "\n".join([ceilings_line(rig.ceilings()), *texts]), rig.head("kernels") | {"repeat": repeat, "context": context, "results": results}


def _check(rig: Rig, rows: list[int], context: int) -> None:
    most = rig.llm.config.scheduler.max_num_batched_tokens
    if not rows or min(rows) < 1 or max(rows) > most:
        raise ConfigError(f"rows must be from 1 to max_num_batched_tokens ({most}), not {rows}", "rows")
    if not 2 <= context <= rig.llm.max_model_len - 9:
        raise ConfigError(f"context must be from 2 to {rig.llm.max_model_len - 9} tokens, not {context}", "context")
    if max(rows) > rig.llm.max_model_len - 1:
        raise ConfigError(f"rows of one prompt: at most {rig.llm.max_model_len - 1}, not {max(rows)}", "rows")
