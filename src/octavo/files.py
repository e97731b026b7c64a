"""Files of a model are read from here: regular files only, of a bounded size, and every failure is a CheckpointError. And files that
are kept for a later start are written from here: whole or not at all."""

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from octavo.errors import CheckpointError

_KINDS = {
    stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a directory",
}


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Anything but a regular file (or a link to one) is refused before it is opened: a pipe would
    wait for a writer that never comes, and opening a device may do things.

    Raises: FileNotFoundError; CheckpointError for all else.
    """
    try:
        _check_kind(path, os.stat(path).st_mode)
        # In case it was exchanged in between: a pipe does not block, and is looked at again.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check_kind(path, os.fstat(descriptor).st_mode)
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(*error.args) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def read_small(path: Path, most: int) -> bytes:
    """A whole file of at most ``most`` bytes. Raises: FileNotFoundError; CheckpointError when it is too large or cannot be read."""
    with open_regular(path) as file:
        try:
            data = file.read(most + 1) if os.fstat(file.fileno()).st_size <= most else None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
    if data is None or len(data) > most:
        raise CheckpointError(f"{path} has more than {most} bytes, which no such file has")
    return data


def is_there(path: Path) -> bool:
    """Whether there is something of that name. Raises: CheckpointError when that cannot be told."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be looked at: {error}") from None
    return True


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Make or replace a file that only this user may read. Who opens ``path`` finds the old file or the whole new one, also
    after a crash, and also when several processes write it.

    Raises: OSError; what ``write`` raises. Then the old file is as it was.
    """
    descriptor, made = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(made)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # the new name, too, outlives a crash
    finally:
        os.close(folder)


def _check_kind(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a regular file")
