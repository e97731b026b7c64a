"""ggml's k-quants: super-blocks of 256 numbers in sub-blocks of 16 or 32, whose scales are quantized too.

Each function writes the numbers of ``blocks`` uint8 [n, bytes of a block] to ``out`` float32 [n, 256], in ggml's order
of float32 operations: the sub-block's scale is (super scale · small scale), and the result scale · q - offset.
Source: ggml, ggml-quants.c.
"""

from collections.abc import Callable

import numpy as np

from octavo.quant.ggml_legacy import half

_TWOS = np.array([0, 2, 4, 6], np.uint8)[:, None]  # shifts to the four 2-bit fields of a byte
_BITS = np.arange(8, dtype=np.uint8)[:, None]  # shifts to its eight bits


def _fields(packed: np.ndarray, groups: int, shifts: np.ndarray, mask: int) -> np.ndarray:
    """Split bytes into bit fields: each group of bytes gives its first field, then its second, … → [n, groups, fields, bytes]."""
    spread = packed.reshape(len(packed), groups, 1, -1) >> shifts
    spread &= mask
    return spread


def _nibbles(packed: np.ndarray, groups: int, out: np.ndarray) -> None:
    """Split bytes into nibbles: each group of bytes gives its low nibbles, then its high ones."""
    grouped = packed.reshape(len(packed), groups, -1)
    halves = out.reshape(len(packed), groups, 2, -1)
    halves[:, :, 0] = grouped & 15
    halves[:, :, 1] = grouped >> 4


def _six_bit_pairs(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight offsets of 6 bits, from 12 bytes. → two uint8 [n, 8].

    Bytes 0 to 3 hold scales 0 to 3, bytes 4 to 7 offsets 0 to 3 (low six bits); bytes 8 to 11 hold the low nibbles of
    scales and offsets 4 to 7, whose two high bits are the spare ones of the first eight bytes.
    """
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([a & 63, (c & 15) | ((a >> 2) & 48)], axis=1)
    offsets = np.concatenate([b & 63, (c >> 4) | ((b >> 2) & 48)], axis=1)
    return scales, offsets


def _scale(out: np.ndarray, scales: np.ndarray, offsets: np.ndarray | None = None) -> None:
    """Per sub-block: out · scale - offset, in place. Scales and offsets float32 [n, sub-blocks]."""
    parts = out.reshape(*scales.shape, -1)
    parts *= scales[..., None]
    if offsets is not None:
        parts -= offsets[..., None]


def _q2_k(blocks: np.ndarray, out: np.ndarray) -> None:
    small, quants = blocks[:, :16], blocks[:, 16:80]
    out.reshape(-1, 2, 4, 32)[:] = _fields(quants, 2, _TWOS, 3)
    _scale(out, half(blocks, 80) * (small & 15), half(blocks, 82) * (small >> 4))


def _q3_k(blocks: np.ndarray, out: np.ndarray) -> None:
    high, quants, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    # 16 scales of 6 bits: low nibbles in bytes 0 to 7 (first all the low ones, then the high ones), two high bits in the last four
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    top = _fields(packed[:, 8:], 1, _TWOS, 3).reshape(-1, 16)
    small = (low | (top << 4)).astype(np.float32)
    small -= 32
    q = _fields(quants, 2, _TWOS, 3)
    q |= _fields(high, 1, _BITS, 1).reshape(q.shape) << 2  # the third bit is stored inverted: absent means minus four
    out.reshape(q.shape)[:] = q
    out -= 4
    _scale(out, half(blocks, 108) * small)


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 16:], 4, out)
    scales, offsets = _six_bit_pairs(blocks[:, 4:16])
    _scale(out, half(blocks, 0) * scales, half(blocks, 2) * offsets)


def _q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 48:], 4, out)
    fifth = _fields(blocks[:, 16:48], 1, _BITS, 1)
    fifth <<= 4
    out += fifth.reshape(out.shape)
    scales, offsets = _six_bit_pairs(blocks[:, 4:16])
    _scale(out, half(blocks, 0) * scales, half(blocks, 2) * offsets)


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    low, high, small = blocks[:, :128], blocks[:, 128:192], blocks[:, 192:208].view(np.int8)
    _nibbles(low, 2, out)
    top = _fields(high, 2, _TWOS, 3)
    top <<= 4
    out += top.reshape(out.shape)
    out -= 32
    _scale(out, half(blocks, 208) * small)


EXPANDERS: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
