"""Kernels of quantized weights next to pages that nobody may touch: weights, activations and results end where such a page begins."""

import ctypes
import mmap
from typing import Any

import numpy as np
import pytest
from tests.ops.native_support import ISAS, Rig, f32
from tests.ops.quant_support import QUANTIZED, STORED, random_stored

from octavo.ops.native import NativeProvider

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes, libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], [ctypes.c_void_p, ctypes.c_size_t]


class Guarded:
    """nbytes (a multiple of 64) that end at a forbidden page; what lies before them is at least one page further forbidden, too."""

    def __init__(self, nbytes: int, huge: bool = False) -> None:
        inner = -(-nbytes // PAGE) * PAGE
        self.base, self.size = libc.mmap(None, inner + 2 * PAGE, 3, 0x22, -1, 0), inner + 2 * PAGE
        for at in (self.base, self.base + PAGE + inner):
            assert libc.mprotect(at, PAGE, 0) == 0
        self.address, self.nbytes = self.base + PAGE + inner - nbytes, nbytes
        self.array = (ctypes.c_uint8 * nbytes).from_address(self.address)

    def __del__(self) -> None:
        libc.munmap(self.base, self.size)


class GuardedProvider(NativeProvider):
    """Everything in memory of its own, up to its last byte."""

    def __init__(self, isa: str, quantization: str) -> None:
        super().__init__("bfloat16", 2, isa, quantization)
        self.kept: list[Guarded] = []

    def _room_for(self, nbytes: int) -> int:
        self.kept.append(Guarded(-(-nbytes // 64) * 64))
        return self.kept[-1].address


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [*QUANTIZED, *STORED])
def test_nothing_beyond_the_weights_is_read(isa: str, kind: str) -> None:
    rng = np.random.default_rng(1)
    p = GuardedProvider(isa, kind if kind in QUANTIZED else "gguf")
    k = 256 if "K" in kind else 160
    part: Any = rng.standard_normal((40, k)).astype(f32) if kind in QUANTIZED else random_stored(kind, 40, k, rng)
    rig = Rig(p)
    x = rig.ops.input("act", "T", k)
    out = rig.ops.linear(x, p.linear([part]))
    table = rig.ops.embed(p.table(part))
    rig.finish(out, table)
    values = rng.standard_normal((33, k)).astype(f32)
    rig.step["tokens"][:40] = np.arange(40)
    rig.fill(x, values)
    rig.run(33)
    whole = rig.read(out, 33)
    for rows in range(1, 34):
        rig.run(rows)
        np.testing.assert_array_equal(rig.read(out, rows), whole[:rows])
    rig.run(40)
    assert np.isfinite(rig.read(table, 40)).all() and len(p.kept) == 2
