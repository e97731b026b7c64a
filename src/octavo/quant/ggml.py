"""The tensor types of GGUF files: their blocks, and how a whole tensor becomes float32.

A row is cut into blocks of ``block`` elements, each stored in ``nbytes`` bytes. Source: ggml, ggml-common.h.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np

PIECE = 1 << 17  # elements dequantized at a time: 512 kB of float32 stay in the second-level cache


@dataclass(frozen=True, slots=True)
class BlockType:
    """One storage type. ``id`` is its number in GGUF files."""

    name: str
    id: int
    block: int  # elements
    nbytes: int  # bytes of one block


BLOCK_TYPES: dict[str, BlockType] = {
    t.name: t
    for t in (
        BlockType("F32", 0, 1, 4),
        BlockType("F16", 1, 1, 2),
        BlockType("Q4_0", 2, 32, 18),
        BlockType("Q4_1", 3, 32, 20),
        BlockType("Q5_0", 6, 32, 22),
        BlockType("Q5_1", 7, 32, 24),
        BlockType("Q8_0", 8, 32, 34),
        BlockType("Q2_K", 10, 256, 84),
        BlockType("Q3_K", 11, 256, 110),
        BlockType("Q4_K", 12, 256, 144),
        BlockType("Q5_K", 13, 256, 176),
        BlockType("Q6_K", 14, 256, 210),
        # Known well enough to check where such a tensor lies; reading one is an UnsupportedError.
        BlockType("IQ2_XXS", 16, 256, 66),
        BlockType("IQ2_XS", 17, 256, 74),
        BlockType("IQ3_XXS", 18, 256, 98),
        BlockType("IQ1_S", 19, 256, 50),
        BlockType("IQ4_NL", 20, 32, 18),
        BlockType("IQ3_S", 21, 256, 110),
        BlockType("IQ2_S", 22, 256, 82),
        BlockType("IQ4_XS", 23, 256, 136),
        BlockType("I8", 24, 1, 1),
        BlockType("I16", 25, 1, 2),
        BlockType("I32", 26, 1, 4),
        BlockType("I64", 27, 1, 8),
        BlockType("F64", 28, 1, 8),
        BlockType("IQ1_M", 29, 256, 56),
        BlockType("BF16", 30, 1, 2),
        BlockType("TQ1_0", 34, 256, 54),
        BlockType("TQ2_0", 35, 256, 66),
        BlockType("MXFP4", 39, 32, 17),
    )
}


def dequantize(raw: "np.ndarray", type_name: str, tensor: str = "?") -> "np.ndarray":
    """Stored bytes to numbers. uint8 [rows, bytes of a row] → float32 [rows, elements of a row].

    Temporary memory is a small multiple of ``PIECE``, whatever the tensor's size. Only the bits of NaNs may differ from
    what ggml computes.

    Raises: UnsupportedError when the type cannot be dequantized, naming it and ``tensor``.
    """
    import numpy as np

    expand = _expanders().get(type_name)
    if expand is None:
        raise UnsupportedError(f"tensor {tensor!r} is stored as {type_name}, which is not served; types that are: {', '.join(_expanders())}")
    kind = BLOCK_TYPES[type_name]
    rows = raw.shape[0]
    if not raw.flags.c_contiguous:
        raw = np.ascontiguousarray(raw)
    blocks = raw.reshape(-1, kind.nbytes)
    out = np.empty((len(blocks), kind.block), np.float32)
    step = PIECE // kind.block
    with np.errstate(all="ignore"):  # a damaged scale may be inf or NaN: the numbers say so themselves
        for start in range(0, len(blocks), step):
            expand(blocks[start : start + step], out[start : start + step])
    return out.reshape(rows, -1)


# At which bytes of a block a float16 lies: types whose scales can be checked without dequantizing.
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def scales_finite(raw: "np.ndarray", type_name: str) -> bool:
    """Whether all float16 scales and minima in stored rows are finite. uint8 [rows, bytes of a row]; types of HALVES."""
    import numpy as np

    blocks = np.ascontiguousarray(raw).reshape(-1, BLOCK_TYPES[type_name].nbytes)
    return not any(((blocks[:, at + 1] & 0x7C) == 0x7C).any() for at in HALVES[type_name])


def _expanders() -> "dict[str, Callable[[np.ndarray, np.ndarray], None]]":
    """By type: write the numbers of blocks uint8 [n, nbytes] to float32 [n, block]."""
    from octavo.quant import ggml_k, ggml_legacy

    return {**ggml_legacy.EXPANDERS, **ggml_k.EXPANDERS}
