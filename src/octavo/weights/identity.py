"""Which checkpoint it is: a hash of all that its files hold, so that what was made from one is never taken for another's.

Hashing reads everything once (about 1 GB/s). What was found is remembered in a file beside what is cached, by where a file is and what the
system says about it, so that a later start reads nothing.
"""

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError, OctavoError
from octavo.files import open_regular, read_small, write_atomically

MEMO = "checkpoints.json"
MOST_REMEMBERED = 256  # files
MOST_MEMO = 1 << 20  # bytes
SETTLED = 2.0  # seconds after which a changed file has a changed time: younger ones are not remembered (clocks of file systems are coarse)


def checkpoint_hash(files: list[Path], folder: Path | None = None) -> str:
    """The hash of what a checkpoint's files hold, 64 hexadecimal digits; their names and places do not count. ``files``: Checkpoint.files.

    ``folder`` holds the memory of earlier hashes; None, or one that cannot be written: everything is read.

    Raises: CheckpointError for a file that is missing or cannot be read.
    """
    memo = {} if folder is None else _recall(folder / MEMO)
    digests, learned = [], False
    for path in files:
        found, lasting = _look(path)
        known = memo.get(found["path"])
        if known is None or {name: known.get(name) for name in found} != found:
            digest = _read(path)
            again, _ = _look(path)
            memo.pop(found["path"], None)
            if lasting and again == found:
                memo[found["path"]] = found | {"sha256": digest}
                learned = True
        else:
            digest = known["sha256"]
        digests.append(digest)
    if learned and folder is not None:
        with suppress(OSError):  # then the next start reads them again
            _remember(folder / MEMO, memo)
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()


def _look(path: Path) -> tuple[dict[str, Any], bool]:
    """What the system says about a file, and whether a change from now on is sure to show."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be looked at: {error}") from None
    facts = {
        "path": os.fsencode(path.absolute()).hex(), "size": status.st_size, "mtime": status.st_mtime_ns, "ctime": status.st_ctime_ns,
        "inode": status.st_ino, "device": status.st_dev,
    }
    return facts, time.time() - max(status.st_mtime, status.st_ctime) > SETTLED


def _read(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _recall(path: Path) -> dict[str, dict[str, Any]]:
    """What is remembered, by file; nothing where the memory is missing or damaged."""
    try:
        entries = json.loads(read_small(path, MOST_MEMO))
    except (OSError, OctavoError, ValueError, RecursionError):
        return {}
    if not isinstance(entries, list):
        return {}
    return {entry["path"]: entry for entry in entries if _is_entry(entry)}


def _is_entry(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("path"), str) and isinstance(value.get("sha256"), str)


def _remember(path: Path, memo: dict[str, dict[str, Any]]) -> None:
    data = json.dumps(list(memo.values())[-MOST_REMEMBERED:]).encode()
    write_atomically(path, lambda file: file.write(data))
