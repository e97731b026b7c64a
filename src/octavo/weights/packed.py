"""Packed weights kept on disk: the next start maps what an earlier one made of the same checkpoint, instead of making it again.

    ~/.cache/octavo/packed/KEY.weights     (hub.cache_dir())
    magic · bytes of the description · its SHA-256 · the description (JSON) · the image's pieces, each from a page on (ops/image.py)

KEY is a hash of the checkpoint's content, of the rules that were applied to it, and of all that the provider says about its packing. A file
is written aside and renamed into place, so concurrent starts and a crash leave whole files only; its image has a checksum, which a start
verifies (one pass at memory speed). What is damaged is told, and made again. Anything in the folder may be deleted at any time.
"""

import hashlib
import json
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError
from octavo.files import open_regular, write_atomically

MAGIC = b"OCTAVOW1"
MOST_HEADER = 1 << 26  # bytes
PAGE = 4096
LEAST = 32 << 20  # bytes of a checkpoint: a smaller one is packed in no time
LIMIT = 32 << 30  # bytes of all files together; those unused for longest go first
ABANDONED = 3600.0  # seconds after which a file that was never finished is removed
SUFFIX = ".weights"


class PackedStore:
    """The file of one checkpoint under one packing. ``warn`` hears what is wrong with it."""

    def __init__(self, folder: Path, checkpoint: str, packing: str, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._checkpoint = checkpoint
        self._packing = packing
        self._warn = warn
        self.hit = False  # whether ``load`` found it
        self.writing: threading.Thread | None = None

    def path(self, recipe: Sequence[Any]) -> Path:
        """Where the weights are kept that the checkpoint gives by a recipe: rules, and how they are applied."""
        facts = "\n".join([self._checkpoint, self._packing, *(repr(each) for each in recipe)])
        return self._folder / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}{SUFFIX}"

    def load(self, recipe: Sequence[Any], provider: Any) -> dict[str, Any] | None:
        """The handles that ``recipe`` gave, mapped; None where they are not kept, or damaged, which is told.

        Cost: reads every byte once, at memory speed when the system still has the file in memory.
        """
        path = self.path(recipe)
        try:
            found = self._open(path, provider)
        except FileNotFoundError:
            return None
        except (OSError, CheckpointError, ValueError, KeyError, TypeError) as error:
            self._warn(f"the packed weights in {path} cannot be used ({error}): they are made again")
            return None
        self.hit = True
        with suppress(OSError):
            os.utime(path)  # used: it goes last
        return found

    def save(self, recipe: Sequence[Any], provider: Any, handles: Mapping[str, Any]) -> None:
        """Write a file in the background; what goes wrong is told, and harms nobody."""
        self.writing = threading.Thread(target=self._save, args=(self.path(recipe), provider, handles), name="octavo-packed-weights")
        self.writing.start()

    def _open(self, path: Path, provider: Any) -> dict[str, Any]:
        import numpy as np

        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(len(MAGIC) + 8 + 32)
            if len(head) < len(MAGIC) + 40 or head[: len(MAGIC)] != MAGIC:
                raise ValueError("it does not begin as such a file does")
            length = int.from_bytes(head[len(MAGIC) : len(MAGIC) + 8], "little")
            if length > MOST_HEADER:
                raise ValueError(f"a description of {length} bytes")
            text = file.read(length)
            if hashlib.sha256(text).digest() != head[-32:]:
                raise ValueError("its description is damaged")
            description = json.loads(text)
            begin = _aligned(len(head) + length)
            if size != begin + description["nbytes"]:
                raise ValueError(f"it has {size} bytes, not {begin + description['nbytes']}")
            memory = np.frombuffer(_map(file.fileno()), np.uint8)[begin:]
        at = 0
        for nbytes, checksum in description["pieces"]:
            if provider.checksum(memory[at : at + nbytes]) != checksum:
                raise ValueError(f"its bytes from {begin + at} on are damaged")
            at += _aligned(nbytes)
        if at != memory.nbytes:
            raise ValueError(f"its pieces take {at} bytes, not {memory.nbytes}")
        handles: dict[str, Any] = provider.adopt(description, memory)
        return handles

    def _save(self, path: Path, provider: Any, handles: Mapping[str, Any]) -> None:
        try:
            image, state = provider.image(handles)
            self._folder.mkdir(parents=True, exist_ok=True)
            self._make_room(image.nbytes, path)
            pieces = [[piece.nbytes, provider.checksum(piece)] for piece in image.pieces]
            text = json.dumps({"handles": image.handles, "nbytes": image.nbytes, "pieces": pieces, **state}).encode()
            head = MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text

            def write(file: Any) -> None:
                for piece in (head, *(piece.data for piece in image.pieces)):
                    file.write(piece)
                    file.write(bytes(_aligned(len(piece)) - len(piece)))

            write_atomically(path, write)
        except (OSError, MemoryError) as error:
            self._warn(f"the packed weights cannot be kept in {self._folder} ({error}): the next start makes them again")

    def _make_room(self, nbytes: int, path: Path) -> None:
        """Remove what was never finished, and what was unused for longest, until the limit holds. Raises: OSError when the disk is too full."""
        now = time.time()
        found = []
        for file in self._folder.iterdir():
            with suppress(OSError):
                status = file.stat()
                if file.name.endswith(".tmp") and now - status.st_mtime > ABANDONED:
                    file.unlink()
                elif file.suffix == SUFFIX and file != path:
                    found.append((status.st_mtime, status.st_size, file))
        total = nbytes + sum(size for _, size, _ in found)
        for _, size, file in sorted(found):
            if total <= LIMIT:
                break
            file.unlink(missing_ok=True)
            total -= size
        free = shutil.disk_usage(self._folder).free
        if free < 2 * nbytes:
            raise OSError(f"{nbytes >> 20} MiB to write, {free >> 20} MiB of disk free: at least twice as much is asked for")


def _map(descriptor: int) -> mmap.mmap:
    """A whole file, read-only and shared with all who map it, in large pages where the system has it so."""
    mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    for advice in ("MADV_HUGEPAGE", "MADV_WILLNEED"):
        if hasattr(mmap, advice):
            with suppress(OSError):  # advice only
                mapped.madvise(getattr(mmap, advice))
    return mapped


def _aligned(n: int) -> int:
    return -(-n // PAGE) * PAGE
