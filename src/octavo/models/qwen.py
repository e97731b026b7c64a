"""Qwen2 and Qwen2.5: Llama's body with biases on q, k and v, and a window on the upper layers if the model says so.

Source: Yang et al. 2024 (Qwen2).
"""

from typing import Any

from octavo.models.llama import llama
from octavo.models.spec import Fields

FULL, SLIDING = "full_attention", "sliding_attention"
qwen2 = llama


def qwen2_traits(c: Fields, layers: int) -> dict[str, Any]:
    """Biases and windows: ``layer_types`` if given, else layers from ``max_window_layers`` on slide, if sliding is on at all."""
    window = c.whole("sliding_window", 4096, high=1 << 31) if c.flag("use_sliding_window", False) else None
    if "sliding_window" in c.values and c.values["sliding_window"] is None:
        window = None
    first = c.whole("max_window_layers", 28, low=0)
    kinds = c.get("layer_types", [SLIDING if window is not None and i >= first else FULL for i in range(layers)])
    if not isinstance(kinds, list | tuple) or len(kinds) != layers or not all(kind in (FULL, SLIDING) for kind in kinds):
        raise c.bad("layer_types", kinds, f"a list of {layers} times {FULL} or {SLIDING}")
    if window is None and SLIDING in kinds:
        raise c.bad("layer_types", SLIDING, f"{FULL} everywhere, since use_sliding_window is off or sliding_window is null")
    return {"windows": tuple(window if kind == SLIDING else None for kind in kinds), "qkv_bias": True}
