"""bfloat16 in numpy, which has no such type: its bits are kept as uint16."""

import numpy as np

_PIECE = 1 << 18  # elements at a time: bounds the temporary memory


def to_bits(values: np.ndarray) -> np.ndarray:
    """float32 → bfloat16 bits, rounded to nearest, ties to even. Shapes agree.

    NaNs stay NaNs: sign and upper payload are kept, the quiet bit is set. Finite values above the largest bfloat16
    become infinite. Denormals are rounded like all others.
    """
    if values.dtype != np.float32:
        raise TypeError(f"float32 is needed, not {values.dtype}")
    out = np.empty(values.shape, np.uint16)
    flat, target = np.ascontiguousarray(values).reshape(-1).view(np.uint32), out.reshape(-1)
    for start in range(0, len(flat), _PIECE):
        bits = flat[start : start + _PIECE]
        rounded = bits >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits  # wraps for some NaNs only, which are replaced next
        rounded >>= 16
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        if nan.any():
            rounded[nan] = bits[nan] >> 16 | 0x40
        target[start : start + _PIECE] = rounded
    return out


def from_bits(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) → float32, exactly. Shapes agree."""
    if bits.dtype != np.uint16:
        raise TypeError(f"uint16 holding bfloat16 bits is needed, not {bits.dtype}")
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)
