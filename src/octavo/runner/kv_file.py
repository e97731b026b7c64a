"""A file of KV blocks: what a prefix cache held, for the next start of the same engine over the same model.

    MAGIC  bytes of the head  head (JSON: what the blocks are of)  keys  digests of the blocks  digest of all before  blocks

Keys come most recently used first, and no key before its parent; block i belongs to key i. Nothing is believed before its digest was
computed again, nor if somebody else could have written it: a damaged, cut or foreign file is a KvFileError that says what is wrong. It
holds what users wrote, in the form of numbers, so only its user may read it; and it is written only where it would be believed.
"""

import hashlib
import json
import os
import stat
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from octavo.errors import OctavoError
from octavo.files import open_regular, write_atomically

MAGIC = b"OCTKV\x00\x01\n"  # with the version of this layout, and of how keys are made (kv/prefix.py)
KEY_BYTES = 32
DIGEST_BYTES = 32
MOST_HEAD = 1 << 16
THREADS = 4  # hashing lets go of the interpreter's lock

Identity = Mapping[str, str | int]


class KvFileError(Exception):
    """A file that cannot be used, and why."""


class KvFile:
    """An open file whose head is sound. A context manager. Raises: KvFileError; FileNotFoundError."""

    def __init__(self, path: Path, identity: Identity, block_bytes: int) -> None:
        try:
            self._file = open_regular(path)
        except OctavoError as error:
            raise KvFileError(error.message) from None
        try:
            check_writers("it", self._file.fileno())
            check_writers("its folder", path.parent)
            self.keys, self._digests, self._start = _read_index(self._file, identity, block_bytes)
        except BaseException:
            self._file.close()
            raise
        self._block_bytes = block_bytes
        self.stamp = stamp_of(self._file.fileno())

    def fill(self, count: int, write: Callable[[int, memoryview], None]) -> None:
        """Hand the first ``count`` blocks to ``write``, as (number, bytes), from several threads. Raises: KvFileError, when some may be written."""
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(lambda share: self._fill(range(share, count, THREADS), write), range(THREADS)):
                pass  # of the threads' exceptions, the first

    def _fill(self, numbers: range, write: Callable[[int, memoryview], None]) -> None:
        buffer = memoryview(bytearray(self._block_bytes))
        for number in numbers:
            try:
                got = os.preadv(self._file.fileno(), [buffer], self._start + number * self._block_bytes)
            except OSError as error:
                raise KvFileError(f"block {number} cannot be read: {error}") from None
            if got < self._block_bytes or hashlib.sha256(buffer).digest() != self._digests[number]:
                raise KvFileError(f"block {number} of {len(self.keys)} is damaged: its bytes are not those that its digest was made of")
            write(number, buffer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


def stamp_of(file: Path | int) -> tuple[int, int] | None:
    """Which file it is: whoever replaces it leaves another stamp. None where there is none."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def write_kv_file(path: Path, identity: Identity, keys: Sequence[bytes], block: Callable[[int], memoryview]) -> None:
    """Replace the file by one with these keys; ``block(number)`` gives the bytes of each, the same ones when it is asked again.

    Raises: OSError; KvFileError for a folder that it would not be read from. Then the old file is as it was.
    """
    check_writers("its folder", path.parent)
    head = json.dumps(dict(identity), sort_keys=True).encode()
    assert len(head) <= MOST_HEAD and all(len(key) == KEY_BYTES for key in keys)
    with ThreadPoolExecutor(THREADS) as pool:
        digests = list(pool.map(lambda number: hashlib.sha256(block(number)).digest(), range(len(keys))))
    front = b"".join((MAGIC, struct.pack("<IQ", len(head), len(keys)), head, *keys, *digests))

    def write(file: BinaryIO) -> None:
        file.write(front)
        file.write(hashlib.sha256(front).digest())
        for number in range(len(keys)):
            file.write(block(number))

    write_atomically(path, write)


def check_writers(what: str, file: Path | int) -> None:
    """Digests show damage, not who wrote: numbers in the cache decide what a model says. So nobody but this user and root may be able to
    write a file, or to put one into a folder. ``what``: its name in the error. Raises: KvFileError.
    """
    try:
        status = os.stat(file)
    except OSError as error:
        raise KvFileError(f"{what} cannot be looked at: {error}") from None
    if status.st_uid not in (os.geteuid(), 0):
        raise KvFileError(f"{what} belongs to another user ({status.st_uid}), who could have written it")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KvFileError(f"{what} can be written by others (mode {stat.S_IMODE(status.st_mode):04o}): chmod go-w")


def _read_index(file: BinaryIO, identity: Identity, block_bytes: int) -> tuple[list[bytes], list[bytes], int]:
    """→ keys, digests of the blocks, where the blocks begin."""
    try:
        size = os.fstat(file.fileno()).st_size
        front = file.read(len(MAGIC) + 12)
        if len(front) < len(MAGIC) + 12 or not front.startswith(MAGIC):
            raise KvFileError("it is no file of KV blocks, or one of another version")
        head_bytes, count = struct.unpack_from("<IQ", front, len(MAGIC))
        start = len(front) + head_bytes + count * (KEY_BYTES + DIGEST_BYTES) + DIGEST_BYTES
        if head_bytes > MOST_HEAD or start + count * block_bytes != size:
            raise KvFileError(f"it has {size} bytes, and its head announces {count} blocks of {block_bytes}: it is cut, damaged or another cache's")
        rest = file.read(start - len(front))
    except OSError as error:
        raise KvFileError(f"it cannot be read: {error}") from None
    front, digest = front + rest[:-DIGEST_BYTES], rest[-DIGEST_BYTES:]
    if hashlib.sha256(front).digest() != digest:
        raise KvFileError("its head is damaged: the bytes are not those that its digest was made of")
    try:
        found = json.loads(rest[:head_bytes])
        if not isinstance(found, dict):
            raise ValueError("no object")
    except (ValueError, RecursionError) as error:
        raise KvFileError(f"its head cannot be read: {error}") from None
    if different := _differences(found, identity):
        raise KvFileError(f"it is another engine's or another model's: {different}")
    table = rest[head_bytes:-DIGEST_BYTES]
    cells = [table[at : at + KEY_BYTES] for at in range(0, len(table), KEY_BYTES)]
    if len(set(cells[:count])) < count:
        raise KvFileError("it has a key twice")
    return cells[:count], cells[count:], start


def _differences(found: Mapping[str, Any], wanted: Identity) -> str:
    names = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    return ", ".join(f"{name} is {str(found.get(name))[:80]}, not {str(wanted.get(name))[:80]}" for name in names)
