"""Plain floats and ggml's blocks of 32: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

Each function writes the numbers of ``blocks`` uint8 [n, bytes of a block] to ``out`` float32 [n, elements of a block], in
ggml's order of float32 operations (scale first, then offset). Source: ggml, ggml-quants.c.
"""

from collections.abc import Callable

import numpy as np


def half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte ``at`` of each block. → float32 [n, 1]."""
    return blocks[:, at : at + 2].view(np.float16).astype(np.float32)


def _f32(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks.view(np.float32)


def _f16(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks.view(np.float16)


def _bf16(blocks: np.ndarray, out: np.ndarray) -> None:
    np.left_shift(blocks.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)


def _nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    """16 bytes to 32 numbers: the low nibbles are the first half, the high ones the second."""
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _fives(bits: np.ndarray, packed: np.ndarray, out: np.ndarray) -> None:
    """32 nibbles, and the fifth bit of each in a little-endian 32-bit word."""
    _nibbles(packed, out)
    fifth = np.unpackbits(bits, axis=1, bitorder="little")
    fifth <<= 4
    out += fifth


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= half(blocks, 0)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= half(blocks, 0)
    out += half(blocks, 2)


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _fives(blocks[:, 2:6], blocks[:, 6:], out)
    out -= 16
    out *= half(blocks, 0)


def _q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _fives(blocks[:, 4:8], blocks[:, 8:], out)
    out *= half(blocks, 0)
    out += half(blocks, 2)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= half(blocks, 0)


EXPANDERS: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
}
