"""Anonymous memory of the native library."""

import ctypes
import mmap
import threading

import pytest
from tests.ops.native_support import provider

from octavo.kv.spec import KvSpec
from octavo.ops.native import COMMITTED

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)


def resident(memory, start: int, nbytes: int) -> int:
    """Pages of it that the system has given out."""
    found = (ctypes.c_ubyte * (nbytes // PAGE))()
    assert libc.mincore(ctypes.c_void_p(memory.address + start), ctypes.c_size_t(nbytes), found) == 0
    return sum(x & 1 for x in found)


def test_commit_gives_out_pages_and_changes_nothing() -> None:
    memory = provider("bfloat16", "generic", 1).new_memory(64 * PAGE)
    view = memoryview(memory).cast("B")
    view[PAGE] = 7
    before = resident(memory, 0, 64 * PAGE)
    assert before < 16
    if not memory.commit(0, 16 * PAGE):
        pytest.skip("this system cannot give out pages ahead (Linux 5.14)")
    assert resident(memory, 0, 16 * PAGE) == 16 and view[PAGE] == 7 and view[0] == 0
    assert resident(memory, 0, 64 * PAGE) < 64
    for start, nbytes in ((-PAGE, PAGE), (1, PAGE), (0, 65 * PAGE), (65 * PAGE, 0), (0, -1), (63 * PAGE, 2 * PAGE)):
        with pytest.raises(ValueError, match="from a page on"):
            memory.commit(start, nbytes)


def test_the_first_blocks_have_their_pages() -> None:
    kv = KvSpec(8, 1, 64, "bfloat16")
    store = provider("bfloat16", "generic", 1).kv_store(kv, 2 * COMMITTED // kv.bytes_per_block)
    for thread in threading.enumerate():
        if thread.name == "kv-pages":
            thread.join()
    if not store.memory.commit(0, PAGE):
        pytest.skip("this system cannot give out pages ahead (Linux 5.14)")
    assert resident(store.memory, 0, COMMITTED) == COMMITTED // PAGE
    assert resident(store.memory, COMMITTED, COMMITTED // 2) < COMMITTED // PAGE // 8
