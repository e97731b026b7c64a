"""The swap tier's memory: where the blocks of preempted requests lie. Which slot is whose is kv/tier.py's business."""

import errno
import os
import shutil
import tempfile
from typing import Protocol

import numpy as np

from octavo.errors import ConfigError
from octavo.runner.memory import size


class TierMemory(Protocol):
    """Slots of one block each."""

    num_slots: int

    def write(self, slot: int, data: memoryview) -> None:
        """Keep a block's bytes. Raises: OSError."""

    def read(self, slot: int) -> memoryview:
        """A slot's bytes, until the next call. Raises: OSError."""

    def close(self) -> None:
        """Give everything up. May be called twice."""


class MemoryTier:
    """In this process' memory, committed when first written."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        """Raises: ConfigError when the address space has no room."""
        self.num_slots = num_slots
        try:
            self._slots = np.empty((num_slots, block_bytes), np.uint8)
        except (MemoryError, ValueError) as error:
            raise ConfigError(
                f"the memory for a swap tier of {num_slots} blocks ({size(num_slots * block_bytes)}) cannot be had: {error}", "kv_swap_bytes",
            ) from error

    def write(self, slot: int, data: memoryview) -> None:
        """Keep a block's bytes."""
        self._slots[slot] = data

    def read(self, slot: int) -> memoryview:
        """A slot's bytes."""
        return self._slots[slot].data

    def close(self) -> None:
        """Give the memory back."""
        self._slots = np.empty((0, 0), np.uint8)


class FileTier:
    """In a file of its full size, which has no name: whatever ends the process, nothing is left behind. Only its user may read it.

    Read and written by calls, not mapped: an error of the disk is then an OSError, where a mapping would kill the process.
    """

    def __init__(self, path: str, num_slots: int, block_bytes: int) -> None:
        """``path``: a folder, or the name of a file that does not exist. Raises: ConfigError when it cannot be made there, whole."""
        self.num_slots = num_slots
        self._bytes = block_bytes
        self._buffer = memoryview(bytearray(block_bytes))
        total = num_slots * block_bytes
        self._file = open(_nameless(path), "r+b", buffering=0)  # noqa: SIM115
        try:
            _allocate(self._file.fileno(), total)
        except OSError as error:
            self.close()
            folder = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
            free = size(shutil.disk_usage(folder).free)
            raise ConfigError(
                f"a swap file of {num_slots} blocks ({size(total)}) cannot be made at {path!r}, where {free} are free: {error.strerror}",
                "kv_swap_path",
            ) from error

    def write(self, slot: int, data: memoryview) -> None:
        """Keep a block's bytes."""
        file, done = self._file.fileno(), 0
        while done < self._bytes:
            done += os.pwrite(file, data[done:], slot * self._bytes + done)

    def read(self, slot: int) -> memoryview:
        """A slot's bytes."""
        file, done = self._file.fileno(), 0
        while done < self._bytes:
            count = os.preadv(file, [self._buffer[done:]], slot * self._bytes + done)
            if count == 0:
                raise OSError(errno.EIO, "the swap file ends too soon")
            done += count
        return self._buffer

    def close(self) -> None:
        """Close the file, which is gone then."""
        self._file.close()


def _nameless(path: str) -> int:
    """A new file in a folder, or under a new name, whose name is taken away at once."""
    try:
        if os.path.isdir(path):
            file, path = tempfile.mkstemp(prefix="octavo-swap-", dir=path)
        else:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(path)
    except FileExistsError as error:
        raise ConfigError(f"kv_swap_path {path!r} exists, and no file is overwritten: name a folder, or a new file", "kv_swap_path") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"no swap file can be made at {path!r}: {getattr(error, 'strerror', None) or error}", "kv_swap_path") from error
    return file


def _allocate(file: int, total: int) -> None:
    """Take the room now, so that a full disk is told at start. Where a file system cannot promise it, it is taken as it is needed."""
    try:
        os.posix_fallocate(file, 0, total)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(file, total)
