"""A file of KV blocks is whole and ours, or it is refused with its reason; nothing is handed on that was not written."""

import os
import random
import stat
import struct
from pathlib import Path

import pytest

from octavo.runner.kv_file import MAGIC, KvFile, KvFileError, write_kv_file

BYTES = 1000
IDENTITY = {"model": "a", "contract": 1}


def block(number: int) -> memoryview:
    return memoryview(random.Random(number).randbytes(BYTES))


def keys(count: int) -> list[bytes]:
    return [random.Random(-1 - number).randbytes(32) for number in range(count)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_kv_file(tmp_path / "f", IDENTITY, keys(7), block)
    return tmp_path / "f"


def read(path: Path, identity: dict[str, str | int] = IDENTITY, count: int | None = None) -> dict[bytes, bytes]:
    found: dict[int, bytes] = {}
    with KvFile(path, identity, BYTES) as file:
        file.fill(len(file.keys) if count is None else count, lambda number, data: found.update({number: bytes(data)}))
        return {file.keys[number]: found[number] for number in sorted(found)}


@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_what_was_written_is_read(path: Path, count: int) -> None:
    assert read(path) == {key: bytes(block(number)) for number, key in enumerate(keys(7))}
    assert list(read(path, count=count)) == keys(7)[:count]
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_empty_one(tmp_path: Path) -> None:
    write_kv_file(tmp_path / "f", IDENTITY, [], block)
    assert read(tmp_path / "f") == {}


@pytest.mark.parametrize("mode", [0o775, 0o702, 0o1777])
def test_what_others_could_have_written_is_not_believed(path: Path, mode: int) -> None:
    path.parent.chmod(mode)
    with pytest.raises(KvFileError, match=f"its folder can be written by others .mode {mode:04o}."):
        read(path)
    whole = path.read_bytes()
    with pytest.raises(KvFileError, match=f"its folder can be written by others .mode {mode:04o}."):
        write_kv_file(path, IDENTITY, [], block)
    assert path.read_bytes() == whole
    path.parent.chmod(0o755)
    assert read(path)
    path.chmod(0o660)
    with pytest.raises(KvFileError, match="it can be written by others"):
        read(path)


@pytest.mark.parametrize("what", ["it", "its folder"])
def test_what_another_user_owns_is_not_believed(path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Root's is: who is root could write anything anyhow."""
    owners = {"it": path.stat().st_uid, "its folder": path.parent.stat().st_uid}

    def owned(status: os.stat_result) -> os.stat_result:
        name = "its folder" if stat.S_ISDIR(status.st_mode) else "it"
        return os.stat_result([*status[:4], owners[name], *status[5:]])

    real_stat, real_fstat = os.stat, os.fstat
    monkeypatch.setattr("octavo.runner.kv_file.os.stat", lambda file: owned(real_stat(file)))
    monkeypatch.setattr("octavo.runner.kv_file.os.fstat", lambda file: owned(real_fstat(file)))
    owners[what] = 0
    assert read(path)
    owners[what] = os.geteuid() + 1234
    with pytest.raises(KvFileError, match=f"{what} belongs to another user"):
        read(path)


def test_every_flipped_bit_is_found(path: Path) -> None:
    whole = path.read_bytes()
    spots = [*range(len(whole) - 7 * BYTES), *random.Random(0).sample(range(len(whole) - 7 * BYTES, len(whole)), 60)]
    for at in spots:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with pytest.raises(KvFileError):
            read(path)


def test_every_cut_and_every_tail_is_found(path: Path) -> None:
    whole = path.read_bytes()
    for length in [*range(0, 700, 7), *range(700, len(whole), 333), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(KvFileError):
            read(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(KvFileError, match=r"has \d+ bytes, and its head announces 7 blocks"):
        read(path)


def test_a_damaged_block_is_named(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    with pytest.raises(KvFileError, match="block 6 of 7 is damaged"):
        read(path)
    assert len(read(path, count=6)) == 6  # the others are what they were


@pytest.mark.parametrize("identity", [{"model": "b", "contract": 1}, {"model": "a", "contract": 2}, {"model": "a"}, IDENTITY | {"more": 1}])
def test_another_models_file_is_refused_by_name(path: Path, identity: dict[str, str | int]) -> None:
    name = next(name for name in sorted(identity.keys() | IDENTITY.keys()) if identity.get(name) != IDENTITY.get(name))
    with pytest.raises(KvFileError, match=f"another model's: {name} is {IDENTITY.get(name)}, not {identity.get(name)}"):
        read(path, identity)


def test_sizes_of_other_blocks_and_absurd_heads(path: Path) -> None:
    with pytest.raises(KvFileError, match="blocks of 999"):
        KvFile(path, IDENTITY, 999)
    for head, count in ((2**32 - 1, 1), (2, 2**63), (2, 2**64 - 1)):
        path.write_bytes(MAGIC + struct.pack("<IQ", head, count) + bytes(1000))
        with pytest.raises(KvFileError, match="announces"):
            read(path)
    path.write_bytes(b"something else that is long enough")
    with pytest.raises(KvFileError, match="no file of KV blocks"):
        read(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(KvFileError, match="not a regular file"):
            read(tmp_path / name)


def test_a_failure_to_write_leaves_the_old_one(path: Path) -> None:
    def broken(number: int) -> memoryview:
        if number == 2:
            raise OSError("no space")
        return block(number)

    with pytest.raises(OSError, match="no space"):
        write_kv_file(path, IDENTITY, keys(5), broken)
    assert len(read(path)) == 7 and [each.name for each in path.parent.iterdir()] == ["f"]
