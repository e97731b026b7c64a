"""The contract of quantized products restated in numpy: whole numbers in int64, every float32 operation apart."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.ops.kv_support import spread
from tests.ops.native_support import f32, flush

from octavo.ops.table import Stored
from octavo.quant import ggml
from octavo.quant.ggml import BLOCK_TYPES, HALVES
from octavo.quant.ggml_k import _six_bit_pairs

STORED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
QUANTIZED = ("int8", "int4", "int4_g128")


@dataclass
class Grid:
    """A matrix [N, K] of few bits. Codes mean what they say (zero subtracted); scale and minimum [N, steps]."""

    codes: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray | None
    step: int  # k of a weight scale
    group: int  # k of an activation scale
    k: int | None = None  # of the matrix, whose codes are those of spread rows, padded to a multiple of 32

    def numbers(self) -> np.ndarray:
        """The matrix in float32: code · scale, then + minimum."""
        k = self.codes.shape[1]
        each = lambda x: np.repeat(x, self.step, axis=1)[:, :k]  # noqa: E731
        out = self.codes.astype(f32) * each(self.scale)
        if self.k is not None:
            return spread(out)[:, : self.k]
        return out if self.minimum is None else out + each(self.minimum)

    def rows(self, part: slice) -> "Grid":
        return Grid(self.codes[part], self.scale[part], None if self.minimum is None else self.minimum[part], self.step, self.group, self.k)


def quantize_rows(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Act values [M, K] float32 → codes [M, K] and the scale of each value's group [M, K]."""
    codes, scales = np.zeros(x.shape, np.int64), np.zeros(x.shape, f32)
    for start in range(0, x.shape[1], group):
        part = x[:, start : start + group]
        top = np.abs(part).max(axis=1, keepdims=True)
        top = np.where(np.isnan(part).any(axis=1, keepdims=True), f32(np.nan), top)
        some = np.isfinite(top) & (top >= f32(2.0**-60))
        with np.errstate(all="ignore"):
            codes[:, start : start + group] = np.where(some, np.rint(np.where(some, part * (f32(127) / top), 0)), 0)
            scales[:, start : start + group] = np.where(some, top / f32(127), np.where(np.isfinite(top), f32(0), f32(np.nan)))
    return codes, scales


def contract_quant(x: np.ndarray, grid: Grid) -> np.ndarray:
    """x [M, K] act values · grid [N, K]ᵀ. → float32 [M, N]."""
    with np.errstate(all="ignore"):
        x = x.astype(f32) if grid.k is None else spread(x.astype(f32))
        a, scales = quantize_rows(x, grid.group)
        c = np.zeros((len(x), len(grid.codes)), f32)
        for s, k in enumerate(range(0, x.shape[1], grid.step)):
            part = slice(k, k + grid.step)
            dot = a[:, part] @ grid.codes[:, part].astype(np.int64).T
            assert np.abs(dot).max(initial=0) < 1 << 31
            c = flush(c + flush(flush(dot.astype(f32) * scales[:, k : k + 1]) * grid.scale[:, s]))
            if grid.minimum is not None:
                sums = flush(a[:, part].sum(axis=1, keepdims=True).astype(f32) * scales[:, k : k + 1])
                c = flush(c + flush(sums * grid.minimum[:, s]))
        return c


def int8_grid(w: np.ndarray) -> Grid:
    k, w = w.shape[1], spread(w)
    top = np.abs(w).max(axis=1, keepdims=True)
    some = top >= f32(2.0**-60)
    safe = np.where(some, top, f32(1))
    codes = np.where(some, np.rint(w * (f32(127) / safe)), 0).astype(np.int64)
    return Grid(codes, np.where(some, top / f32(127) * f32(1 / 32), f32(0)).astype(f32), None, w.shape[1], w.shape[1], k)


def random_stored(kind: str, n: int, k: int, rng: np.random.Generator) -> Stored:
    """Any bits as blocks, with scales of usual size."""
    block = BLOCK_TYPES[kind]
    raw = rng.integers(0, 256, (n * k // block.block, block.nbytes), np.uint8)
    for at in HALVES[kind]:
        raw[:, at : at + 2] = (rng.standard_normal((len(raw), 1)) * 0.02).astype(np.float16).view(np.uint8)
    raw = raw.reshape(n, -1)
    return Stored(kind, raw, (n, k), lambda: ggml.dequantize(raw, kind).reshape(n, k))


def stored_grid(stored: Stored) -> Grid:
    """Codes, scales and minima of stored blocks. Codes come from dequantizing with all scales 1 and all minima 0."""
    kind, (n, k) = stored.type, stored.shape
    block = BLOCK_TYPES[kind]
    raw = stored.raw.reshape(-1, block.nbytes)
    plain, one = raw.copy(), np.array([1], np.float16).view(np.uint8)
    for at in HALVES[kind]:
        plain[:, at : at + 2] = one if at == HALVES[kind][0] else 0
    half = lambda at: raw[:, at : at + 2].view(np.float16).astype(f32)  # noqa: E731
    minimum: Any = None
    if kind in ("Q4_K", "Q5_K"):
        plain[:, 4:8], plain[:, 8:12], plain[:, 12:16] = 1, 0, 1  # scales 0 to 3, offsets 0 to 3, low nibbles of scales 4 to 7
        small, offsets = _six_bit_pairs(raw[:, 4:16])
        scale, minimum = half(0) * small.astype(f32), -(half(2) * offsets.astype(f32))
    elif kind == "Q6_K":
        plain[:, 192:208] = 1
        scale = half(208) * raw[:, 192:208].view(np.int8).astype(f32)
    else:
        scale = half(0)
        minimum = half(2) if kind in ("Q4_1", "Q5_1") else None
    codes = ggml.dequantize(plain.reshape(n, -1), kind).reshape(n, k).astype(np.int64)
    step = 16 if kind == "Q6_K" else 32
    return Grid(codes, scale.reshape(n, -1), None if minimum is None else minimum.reshape(n, -1), step, 32)


def fit4(x: np.ndarray, half: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int4 of one step, [rows, n] float32 → codes, scale [rows], minimum [rows]; as kernels/pack_quant.h says, in its order."""

    def total(values: Any) -> np.ndarray:
        out = np.zeros(len(x), f32)
        for i in range(x.shape[1]):
            out = flush(out + flush(values(i)))
        return out

    def code(i: int, low: np.ndarray, inverse: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(flush((x[:, i] - low) * inverse)), 0, 15).astype(f32)

    def invert(scale: np.ndarray) -> np.ndarray:
        return np.where(scale > 0, f32(1) / np.where(scale > 0, scale, f32(1)), f32(0)).astype(f32)

    low, high, count = x.min(axis=1), x.max(axis=1), f32(x.shape[1])
    sums = total(lambda i: x[:, i])
    best, best_scale, best_low = np.full(len(x), np.inf, f32), None, None
    for turn in range(-1, 8):
        scale, minimum = (high - low) / (f32(15) if turn < 0 else f32(13.5) + f32(0.5) * f32(turn)), low
        if turn >= 0:
            inverse = invert(scale)
            codes = total(lambda i, v=inverse: code(i, low, v))
            squares = total(lambda i, v=inverse: code(i, low, v) * code(i, low, v))
            products = total(lambda i, v=inverse: code(i, low, v) * x[:, i])
            det = flush(flush(count * squares) - flush(codes * codes))
            safe = np.where(det > 0, det, f32(1))
            scale = np.where(det > 0, flush(flush(flush(count * products) - flush(codes * sums)) / safe), scale)
            minimum = np.where(det > 0, flush(flush(flush(sums * squares) - flush(codes * products)) / safe), minimum)
        if half:
            scale, minimum = (v.astype(np.float16).astype(f32) for v in (scale, minimum))
        inverse = invert(scale)
        error = total(lambda i, s=scale, m=minimum, v=inverse: np.square(flush(flush(code(i, m, v) * s) + m) - x[:, i]))
        better = error < best
        best = np.where(better, error, best)
        best_scale = scale if best_scale is None else np.where(better, scale, best_scale)
        best_low = minimum if best_low is None else np.where(better, minimum, best_low)
    inverse = invert(best_scale)
    codes = np.stack([code(i, best_low, inverse) for i in range(x.shape[1])], axis=1).astype(np.int64)
    return codes, best_scale.astype(f32), best_low.astype(f32)


def int4_grid(w: np.ndarray, step: int) -> Grid:
    parts = [fit4(w[:, k : k + step], step == 32) for k in range(0, w.shape[1], step)]
    return Grid(np.concatenate([p[0] for p in parts], axis=1), np.stack([p[1] for p in parts], axis=1), np.stack([p[2] for p in parts], axis=1),
                step, step)


def grid_of(quantization: str, w: np.ndarray) -> Grid:
    return int8_grid(w) if quantization == "int8" else int4_grid(w, 128 if quantization == "int4_g128" else 32)
