"""GGUF's types against the gguf package, bit for bit."""

import tracemalloc

import gguf
import numpy as np
import pytest

from octavo.errors import UnsupportedError
from octavo.quant.ggml import BLOCK_TYPES, PIECE, dequantize
from octavo.weights.gguf import BLOCK_TYPES as READER_TYPES

SERVED = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
# Byte positions of the float16 scales in a block: for tests that put chosen values there.
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
ODD = np.array([0.0, -0.0, 1.0, -1.5, 6e-8, -6e-8, 6.1e-5, 65504, -65504, np.inf, -np.inf, np.nan], np.float16)


def oracle(raw: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == np.float32 and ours.shape == theirs.shape
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), nan)
    assert np.array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


def rows_of(name: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows, blocks * BLOCK_TYPES[name].nbytes), dtype=np.uint8)


@pytest.mark.parametrize("name", SERVED)
def test_random_bytes(name: str) -> None:
    """Every bit pattern may occur, so scales are inf, NaN and denormal now and then; rows cross the piece boundary."""
    per_piece = PIECE // BLOCK_TYPES[name].block
    for rows, blocks in [(1, 1), (3, 2), (2, per_piece // 2 + 1), (1, per_piece), (5, per_piece // 4 + 3)]:
        raw = rows_of(name, rows, blocks, seed=rows)
        assert_same(dequantize(raw, name), oracle(raw, name))


@pytest.mark.parametrize("name", sorted(SCALES))
def test_odd_scales(name: str) -> None:
    size = BLOCK_TYPES[name].nbytes
    raw = rows_of(name, 1, len(ODD) ** 2 * 4, seed=7).reshape(-1, size)
    for i, block in enumerate(raw):
        for j, at in enumerate(SCALES[name]):
            block[at : at + 2] = ODD[(i // len(ODD) ** j) % len(ODD)].reshape(1).view(np.uint8)
    raw = raw.reshape(1, -1)
    theirs = oracle(raw, name)
    assert np.isnan(theirs).any() and np.isfinite(theirs).any()
    assert_same(dequantize(raw, name), theirs)


@pytest.mark.parametrize("name", ["F32", "Q4_1", "Q6_K"])
def test_any_memory(name: str) -> None:
    """Unaligned and strided bytes give the same numbers."""
    raw = rows_of(name, 4, 3)
    unaligned = np.empty(raw.size + 1, np.uint8)[1:].reshape(raw.shape)
    unaligned[:] = raw
    assert_same(dequantize(unaligned, name), oracle(raw, name))
    assert_same(dequantize(np.asfortranarray(raw), name), oracle(raw, name))


def test_block_sizes_are_ggmls() -> None:
    assert READER_TYPES is BLOCK_TYPES
    for kind in BLOCK_TYPES.values():
        theirs = gguf.GGMLQuantizationType[kind.name]
        assert (theirs.value, *gguf.GGML_QUANT_SIZES[theirs]) == (kind.id, kind.block, kind.nbytes)


def test_temporary_memory_is_bounded() -> None:
    raw = rows_of("Q5_K", 64, 1024)
    tracemalloc.start()
    out = dequantize(raw, "Q5_K")
    peak = tracemalloc.get_traced_memory()[1] - out.nbytes
    tracemalloc.stop()
    assert out.nbytes == 64 << 20
    assert peak < 8 << 20


def test_other_types_are_named() -> None:
    with pytest.raises(UnsupportedError, match=r"'blk\.0\.attn_q\.weight' is stored as IQ4_XS"):
        dequantize(rows_of("IQ4_XS", 1, 1), "IQ4_XS", "blk.0.attn_q.weight")
