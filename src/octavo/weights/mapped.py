"""A whole file as read-only memory."""

import contextlib
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import CheckpointError
from octavo.files import open_regular

if TYPE_CHECKING:
    import numpy as np


class MappedFile:
    """A file's bytes: ``buffer`` for parsing, ``array`` for numbers.

    The map is read-only and inherited by forked children. Arrays that were given out keep it alive, so they stay valid
    after ``close``, which then only drops this object's own hold. A file that is cut after it was opened is out of
    scope: the kernel answers a read beyond its end with SIGBUS.

    Raises: CheckpointError when the file is missing, unreadable, empty or no regular file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with open_regular(self.path) as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size == 0:
                    raise CheckpointError(f"{self.path} is empty")
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} does not exist") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path} cannot be opened: {error}") from None

    @property
    def buffer(self) -> mmap.mmap:
        """The bytes. Raises ValueError after ``close``."""
        if self._map is None:
            raise ValueError(f"{self.path} is closed")
        return self._map

    def array(self, offset: int, nbytes: int) -> "np.ndarray":
        """A view of some bytes, without a copy. → uint8 [nbytes], read-only. The caller has checked the bounds."""
        import numpy as np

        if nbytes == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(self.buffer, np.uint8, nbytes, offset)

    def close(self) -> None:
        """Give the file up. Safe to call twice, and while arrays that came from it are in use."""
        mapped, self._map = self._map, None
        if mapped is not None:
            with contextlib.suppress(BufferError):  # arrays still look into the map: it goes when the last of them does
                mapped.close()
