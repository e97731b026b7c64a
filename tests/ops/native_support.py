"""Single native ops over hand-filled buffers, and the numeric contract restated in numpy float32."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from octavo.kv.spec import KvSpec
from octavo.models.spec import RopeSpec
from octavo.ops.native import EMULATED, NativeProvider, native_info
from octavo.ops.recorder import Buffer, Recorder
from octavo.ops.table import SLOT_FIELDS, STEP_FIELDS

ISAS = [EMULATED, *native_info()["available"].split(",")]
BEST = native_info()["variant"]  # what runs unless something else is asked for
DTYPES = ("bfloat16", "float32")
f32 = np.float32
_providers: dict[Any, NativeProvider] = {}


def provider(dtype: str = "bfloat16", isa: str = "generic", threads: int = 2, quantization: str | None = None) -> NativeProvider:
    """One provider per kind: threads are kept between tests."""
    key = (dtype, isa, threads, quantization)
    if key not in _providers:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _providers[key] = NativeProvider(dtype, threads, isa, quantization)
    return _providers[key]


def tiny_spec(heads: int = 2, groups: int = 1, dim: int = 16, layers: int = 1) -> SimpleNamespace:
    inv = tuple(float(x) for x in (1.0 / 10000 ** (np.arange(dim // 2) * 2 / dim)).astype(f32))
    return SimpleNamespace(num_heads=heads, num_kv_heads=groups, head_dim=dim, num_layers=layers, rope=RopeSpec(inv))


class Rig:
    """A recorder with its own arrays. Record ops on ``ops``, then ``run``."""

    def __init__(self, p: NativeProvider, *, tokens: int = 64, seqs: int = 8, slots: int | None = None, blocks: int = 64, table: int = 32,
                 alternatives: int = 8, spec: Any = None, kv: str | None = None) -> None:
        self.spec = spec or tiny_spec()
        dims = {"T": tokens, "S": seqs, "R": tokens, "S+1": seqs + 1, "K": alternatives, "B": table}
        self.step, self.slots = (
            {name: np.zeros([sizes.get(d, d) for d in shape], np.dtype(kind)) for name, (kind, shape) in fields.items()}
            for fields, sizes in ((STEP_FIELDS, dims), (SLOT_FIELDS, dims | {"S": slots or seqs}))
        )
        self.slots["top_p"][:] = 1
        self.slots["repetition"][:] = 1
        self.step["row_target"][:] = -1
        self.step["row_top"][:] = -1
        self.kv = p.kv_store(KvSpec(self.spec.num_layers, self.spec.num_kv_heads, self.spec.head_dim, kv or p.dtype), blocks)
        self.ops = Recorder(p, self.spec, self.step, self.slots, self.kv)
        self.program: Any = None

    def finish(self, *keep: Buffer) -> None:
        self.program = self.ops.finish(keep)

    def fill(self, buffer: Buffer, values: np.ndarray) -> None:
        view = self.program.view(buffer, len(values))
        view[:] = to_bf16_bits(values) if view.dtype == np.uint16 else values

    def read(self, buffer: Buffer, rows: int) -> np.ndarray:
        view = self.program.view(buffer, rows)
        return from_bits(view) if view.dtype == np.uint16 else view.copy()

    def run(self, t: int, s: int = 0, r: int = 0) -> None:
        self.step["header"][:3] = t, s, r
        if s == 0:
            self.step["header"][1], self.step["q_start"][:2] = 1, (0, t)
        self.program.forward()


def to_bf16_bits(x: np.ndarray) -> np.ndarray:
    """To nearest even; magnitudes below 2^-60 to +0; NaN to 0x7fc0."""
    u = np.ascontiguousarray(x, f32).view(np.uint32)
    r = ((u.astype(np.uint64) + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    r = np.where((r & 0x7FFF) < (67 << 7), np.uint16(0), r)
    return np.where((u & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FC0), r).astype(np.uint16)


def from_bits(u: np.ndarray) -> np.ndarray:
    return (u.astype(np.uint32) << 16).view(f32)


def act(x: np.ndarray, dtype: str) -> np.ndarray:
    return from_bits(to_bf16_bits(x)) if dtype == "bfloat16" else np.asarray(x, f32)


def flush(x: np.ndarray) -> np.ndarray:
    """Denormal results are zero while kernels run."""
    return np.where(np.abs(x) < f32(2.0**-126), f32(0) * np.sign(x), x).astype(f32)


def contract_product(a: np.ndarray, b: np.ndarray, block: int = 32) -> np.ndarray:
    """a [M, K] · b [N, K]ᵀ as the contract says: per group of ``block``, c + (even chain + odd chain). All float32."""
    k = -(-a.shape[1] // block) * block
    a, b = (np.pad(x, ((0, 0), (0, k - x.shape[1]))).astype(f32) for x in (a, b))
    c = np.zeros((len(a), len(b)), f32)
    with np.errstate(all="ignore"):
        for base in range(0, k, block):
            chains = []
            for first in (0, 1):
                chain = np.zeros_like(c)
                for i in range(base + first, base + block, 2):
                    chain = flush(chain + flush(a[:, i : i + 1] * b[None, :, i]))
                chains.append(chain)
            c = flush(c + flush(chains[0] + chains[1]))
    return c


def contract_sum16(x: np.ndarray) -> np.ndarray:
    """Sum over the last axis in 16 lanes, then the lanes in order. float32."""
    n = -(-x.shape[-1] // 16) * 16
    x = np.pad(x.astype(f32), [(0, 0)] * (x.ndim - 1) + [(0, n - x.shape[-1])])
    lanes = np.zeros((*x.shape[:-1], 16), f32)
    for i in range(0, n, 16):
        lanes = lanes + x[..., i : i + 16]
    total = lanes[..., 0]
    for i in range(1, 16):
        total = total + lanes[..., i]
    return total


def contract_exp(x: np.ndarray) -> np.ndarray:
    """The polynomial of native/kernels/vec.h, step by step in float32."""
    x = np.asarray(x, f32)
    with np.errstate(all="ignore"):
        y = np.where(x < f32(-88), f32(-88), x)
        y = np.where(y > f32(89), f32(89), y)
        t = y * f32(1.44269504) + f32(12582912)
        n = t.view(np.int32) - np.int32(0x4B400000)
        k = t - f32(12582912)
        r = y - k * f32(0.693359375)
        r = r - k * f32(-2.12194440e-4)
        q = r * f32(1.98412698e-4) + f32(1.38888889e-3)
        for c in (8.33333333e-3, 4.16666667e-2, 1.66666667e-1, 0.5):
            q = q * r + f32(c)
        p = (r * r) * q + r
        p = p + f32(1)
        half = n >> 1
        p = p * ((half + 127) << 23).astype(np.int32).view(f32)
        p = p * ((n - half + 127) << 23).astype(np.int32).view(f32)
    p = np.where(x < f32(-87.33654), f32(0), p)
    p = np.where(x > f32(88.72283), f32(np.inf), p)
    return np.where(np.isnan(x), f32(np.nan), p).astype(f32)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Bitwise equal, NaN as a class."""
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype == f32:
        nan = np.isnan(a)
        return bool((nan == np.isnan(b)).all() and (a.view(np.uint32) == b.view(np.uint32))[~nan].all())
    return bool(np.array_equal(a, b))
