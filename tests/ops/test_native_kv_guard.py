"""The cache's kernels touch no byte outside the pool: pages that may not be touched lie right before and behind it."""

import ctypes
import faulthandler
import mmap
import os

import numpy as np
import pytest
from tests.ops.kv_support import PAIRS
from tests.ops.native_support import ISAS, Rig, f32, provider, same_bits, tiny_spec

from octavo.ops.native import NativeKvStore

LIBC = ctypes.CDLL(None, use_errno=True)
BLOCKS = 5


class Guarded:
    """``nbytes`` that end (or begin, ``low``) where a forbidden page begins (or ends)."""

    def __init__(self, nbytes: int, low: bool) -> None:
        inner = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.map = mmap.mmap(-1, inner + 2 * mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        for page in (start, start + mmap.PAGESIZE + inner):
            assert LIBC.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, 0) == 0, ctypes.get_errno()
        self.address = start + mmap.PAGESIZE + (0 if low else inner - nbytes)
        self.nbytes = nbytes
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.address))


def rig_of(p, spec, kv, low):
    """With a guarded pool of BLOCKS; None: an ordinary one."""
    rig = Rig(p, tokens=64, seqs=4, blocks=BLOCKS, table=8, spec=spec, kv=kv)
    if low is not None:
        store = NativeKvStore(Guarded(rig.kv.memory.nbytes, low), rig.kv.spec, BLOCKS)
        rig.ops.kv = rig.kv = store
    rig.qkv = rig.ops.input("f32", "T", (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
    rig.out = rig.ops.attention(rig.ops.rope_store(rig.qkv, spec.num_layers - 1, spec.rope), spec.num_layers - 1, None)
    rig.finish(rig.out)
    rig.slots["block_table"][0, :BLOCKS] = [2, 1, 3, 0, 4] if low is None else [4, 0, 3, 1, 2]  # the pool's last and first block first
    return rig


def rows_of(rig, qkv, start):
    n = len(qkv)
    at = np.arange(start, start + n)
    rig.step["positions"][:n], rig.step["kv_len"][0] = at, start + n
    rig.step["kv_slots"][:n] = rig.slots["block_table"][0, at // 16] * 16 + at % 16
    rig.fill(rig.qkv, qkv)
    rig.run(n)
    return rig.read(rig.out, n)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "kv"), PAIRS)
def test_nothing_outside_the_pool_is_touched(dtype, kv, isa):
    """Every number of rows from 1 to 33, tails of blocks, head sizes that fill their padding and that do not."""
    for heads, groups, dim in ((3, 1, 24), (2, 2, 64)):
        spec = tiny_spec(heads, groups, dim, layers=2)
        qkv = np.random.default_rng(dim).standard_normal((64, (heads + 2 * groups) * dim)).astype(f32)
        rigs = [rig_of(provider(dtype, isa), spec, kv, low) for low in (None, True, False)]
        for rows in range(1, 34):
            want, *got = (np.concatenate([rows_of(rig, qkv[:rows], 0), rows_of(rig, qkv[rows : rows + 1], rows)]) for rig in rigs)
            assert all(same_bits(g, want) for g in got), (rows, dim)


def test_the_guard_works():
    """A read behind it ends the process: tried in another one."""
    memory = Guarded(100, low=False)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        os.close(2)  # what a sanitizer would print
        ctypes.string_at(memory.address + 100, 1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] != 0

