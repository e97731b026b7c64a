"""Rotary frequencies from a model's settings, in the float32 steps that transformers takes. Stdlib only.

Sources: Su et al. 2021 (rotary embedding); Chen et al. 2023 (linear position interpolation); the Llama 3.1 model card
and reference code, 2024 ("llama3": by wavelength).
"""

import math
import struct
from collections.abc import Sequence

from octavo.errors import CheckpointError


def f32(x: float) -> float:
    """The nearest float32, as a Python float; infinite beyond its range."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def base_frequencies(theta: float, head_dim: int) -> list[float]:
    """theta^(-2i/D) for i < D/2, each step rounded to float32."""
    exponents = (f32(i / head_dim) for i in range(0, head_dim, 2))
    return [f32(1.0 / f32(theta**e)) for e in exponents]


def linear_scaling(inv_freq: Sequence[float], factor: float) -> list[float]:
    """Every position counts 1/factor."""
    return [f32(x / factor) for x in inv_freq]


def llama3_scaling(inv_freq: Sequence[float], factor: float, low: float, high: float, original_context: float) -> list[float]:
    """Long wavelengths are stretched by factor, short ones kept, those between blended.

    ``low`` and ``high`` (low < high) divide the original context: wavelengths above original/low are long, below
    original/high short.
    """
    out = []
    for x in inv_freq:
        wavelength = f32(f32(2 * math.pi) / x)
        if wavelength < original_context / high:
            out.append(x)
        elif wavelength > original_context / low:
            out.append(f32(x / factor))
        else:
            smooth = f32(f32(f32(original_context / wavelength) - low) / (high - low))
            out.append(f32(f32(f32(f32(1.0 - smooth) * x) / factor) + f32(smooth * x)))
    return out


def divided(inv_freq: Sequence[float], factors: Sequence[float]) -> list[float]:
    """Each frequency divided by its own factor (GGUF's ``rope_freqs.weight``: how llama3 scaling is stored there)."""
    if len(factors) != len(inv_freq):
        raise CheckpointError(f"rope_freqs.weight has {len(factors)} values, the head size asks for {len(inv_freq)}", "rope_freqs.weight")
    bad = [f for f in factors if not (math.isfinite(f) and f > 0)]
    if bad:
        raise CheckpointError(f"rope_freqs.weight holds {bad[0]!r:.80}; its values must be above 0", "rope_freqs.weight")
    return [f32(x / f32(f)) for x, f in zip(inv_freq, factors)]
