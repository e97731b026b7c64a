"""What one step of a model costs, summed from its ops: read by the simulator and by capacity planning. Stdlib only."""

from collections.abc import Sequence

from octavo.models.spec import ModelSpec
from octavo.ops import table
from octavo.ops.table import Cost


def step_cost(
    spec: ModelSpec, spans: Sequence[tuple[int, int]], rows: int, *, weight_bytes: float = 2, act_bytes: int = 2, kv_bytes: float = 2
) -> Cost:
    """Bytes and flops of one step.

    ``spans``: per sequence, its tokens in this step and in the cache after it. ``rows``: rows that go to the head.
    ``weight_bytes``: per weight of a matrix or table (a fraction for 4-bit formats); ``act_bytes``, ``kv_bytes``: per value.
    """
    t, d, size = sum(new for new, _ in spans), spec.hidden, spec.head_dim
    q, kv = spec.num_heads * size, spec.num_kv_heads * size
    into_cache = (
        table.norm_cost(t, d, act_bytes)
        + table.linear_cost(t, q + 2 * kv, d, weight_bytes, act_bytes)
        + table.rope_store_cost(t, spec.num_heads, spec.num_kv_heads, size, act_bytes, kv_bytes)
    )

    def behind_attention(n: int) -> Cost:
        return (
            table.linear_cost(n, d, q, weight_bytes, act_bytes, residual=True)
            + table.norm_cost(n, d, act_bytes)
            + table.linear_cost(n, 2 * spec.ffn, d, weight_bytes, act_bytes, act="silu_mul")
            + table.linear_cost(n, d, spec.ffn, weight_bytes, act_bytes, residual=True)
        )

    total = table.embed_cost(t, d, weight_bytes) + into_cache.times(spec.num_layers) + behind_attention(t).times(spec.num_layers - 1)
    for window in set(spec.windows):
        one = table.attention_cost(t, spans, spec.num_heads, spec.num_kv_heads, size, act_bytes, kv_bytes, window)
        total += one.times(spec.windows.count(window))
    if rows:  # of other rows the last layer makes no more than K and V
        total += behind_attention(rows) + table.norm_cost(rows, d, act_bytes) + table.head_cost(rows, spec.vocab, d, weight_bytes, act_bytes)
    return total
