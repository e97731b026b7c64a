"""The swap tier's memory, the runner's moves over it, and the errors of disks."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness import PROVIDERS

from octavo.core.step import COPY, IN, OUT, Move, StepPlan
from octavo.errors import ConfigError
from octavo.kv.spec import KvSpec
from octavo.runner.runner import Runner
from octavo.runner.tier import FileTier, MemoryTier

BLOCK = 100


def of(number: int, size: int = BLOCK) -> memoryview:
    return memoryview(np.random.default_rng(number).integers(0, 256, size, np.uint8))


@pytest.fixture(params=["memory", "folder", "file"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made = MemoryTier(5, BLOCK) if request.param == "memory" else FileTier(str(tmp_path / ("" if request.param == "folder" else "new")), 5, BLOCK)
    yield made
    made.close()
    made.close()


def test_a_slot_gives_back_what_was_written_last(tier: Any) -> None:
    for slot, number in ((0, 1), (4, 2), (0, 3), (2, 4)):
        tier.write(slot, of(number))
    assert [bytes(tier.read(slot)) for slot in (0, 2, 4)] == [bytes(of(number)) for number in (3, 4, 2)]


def test_nothing_is_left_in_the_folder_and_nobody_else_may_read(tmp_path: Path) -> None:
    tier = FileTier(str(tmp_path), 3, 4096)
    assert list(tmp_path.iterdir()) == []
    found = os.fstat(tier._file.fileno())
    assert found.st_mode & 0o777 == 0o600 and found.st_size == 3 * 4096 and found.st_blocks * 512 >= 3 * 4096  # whole, from the start
    tier.close()


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    bad = ((mine, "no file is overwritten"), (tmp_path / "no" / "such", "No such file"), (mine / "below", "Not a directory"), ("a\0b", "null"))
    for path, words in bad:
        with pytest.raises(ConfigError, match=words) as caught:
            FileTier(str(path), 1, BLOCK)
        assert caught.value.param == "kv_swap_path"
    assert mine.read_text() == "precious"


def test_a_disk_without_room_is_told_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"swap file of 7 blocks \(28 KiB\) cannot be made .* are free: No space left"):
        FileTier(str(tmp_path), 7, 4096)


def test_a_file_system_that_promises_nothing_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", unable)
    tier = FileTier(str(tmp_path), 3, BLOCK)
    tier.write(2, of(1))
    assert bytes(tier.read(2)) == bytes(of(1))
    tier.close()


def test_a_file_that_was_cut_is_an_error(tmp_path: Path) -> None:
    tier = FileTier(str(tmp_path), 3, BLOCK)
    tier.write(2, of(1))
    os.ftruncate(tier._file.fileno(), 2 * BLOCK + 5)
    with pytest.raises(OSError, match="ends too soon"):
        tier.read(2)
    tier.close()


def test_memory_that_cannot_be_had() -> None:
    with pytest.raises(ConfigError, match="swap tier of 17179869184 blocks") as caught:
        MemoryTier(2**34, 2**40)
    assert caught.value.param == "kv_swap_bytes"


@pytest.fixture(params=PROVIDERS)
def store(request: pytest.FixtureRequest) -> Any:
    return PROVIDERS[request.param]("bfloat16").kv_store(KvSpec(3, 2, 20, "bfloat16"), 6)


def fill(store: Any) -> list[bytes]:
    """Every block other finite bytes. Returns them."""
    whole = [(of(number, store.block_bytes // 2 * 2).tobytes()) for number in range(store.num_blocks)]
    for block, data in enumerate(whole):
        store.write_block(block, memoryview(data))
    return whole


def runner(store: Any, tier: Any) -> Runner:
    class Program:
        def forward(self) -> None: ...
        def sample(self) -> None: ...

    return Runner(lambda batch, slots: Program(), kv=store, tier=tier, max_num_seqs=1, max_num_batched_tokens=4, max_model_len=16, max_logprobs=1,
                  vocab=9, block_size=16)


def test_stores_give_and_take_the_bytes_of_blocks(store: Any) -> None:
    whole = fill(store)
    assert [bytes(store.read_block(block)) for block in range(6)] == whole and len(whole[0]) == store.block_bytes
    store.copy_block(1, 4)
    store.write_block(2, store.read_block(5))
    assert [whole.index(bytes(store.read_block(block))) for block in range(6)] == [0, 1, 5, 3, 1, 5]


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_moves_are_made_in_their_order(store: Any, kind: str, tmp_path: Path) -> None:
    whole = fill(store)
    tier = MemoryTier(2, store.block_bytes) if kind == "memory" else FileTier(str(tmp_path), 2, store.block_bytes)
    made = runner(store, tier)
    moves = [Move(OUT, 0, 0), Move(COPY, 1, 0), Move(OUT, 0, 1), Move(IN, 0, 2), Move(OUT, 3, 0), Move(IN, 0, 4), Move(COPY, 4, 5), Move(IN, 1, 3)]
    result = made.execute(StepPlan(1, [], moves=moves))
    assert [whole.index(bytes(store.read_block(block))) for block in range(6)] == [1, 1, 0, 1, 3, 3]
    assert not result.failed_moves and 0 < result.swap_seconds <= result.seconds
    made.shutdown()


def test_a_disk_that_fails_is_told_move_by_move(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fill(store)
    made = runner(store, FileTier(str(tmp_path), 3, store.block_bytes))
    pwrite, calls = os.pwrite, []

    def failing(file: int, data: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, data[: len(data) // 2 + 1], offset)  # as the system may

    monkeypatch.setattr(os, "pwrite", failing)
    small = [Move(OUT, 0, 0), Move(OUT, 1, 1), Move(OUT, 2, 2), Move(IN, 2, 5)]
    result = made.execute(StepPlan(1, [], moves=small))
    assert result.failed_moves == [0] and "No space left" in result.moves_error and "moved out" in result.moves_error
    assert bytes(store.read_block(5)) == whole[2]
    made.shutdown()


def test_moves_without_a_tier_are_a_broken_plan(store: Any) -> None:
    made = runner(store, None)
    made.execute(StepPlan(1, [], moves=[Move(COPY, 0, 1)]))
    with pytest.raises(ValueError, match="no tier"):
        made.execute(StepPlan(2, [], moves=[Move(OUT, 0, 1)]))


def test_the_probe_leaves_every_block_as_it_was(store: Any) -> None:
    whole = fill(store)
    made = runner(store, MemoryTier(3, store.block_bytes))
    assert made.seconds_per_move() > 0
    assert [bytes(store.read_block(block)) for block in range(6)] == whole
