"""KvKeeper: hot blocks of the prefix cache outlive the engine, in a folder that several engines may share (``kv_cache_dir``).

Saved when the engine shuts down, loaded when it starts. One file for each kind of engine and model: its name is a hash of all that decides what
a block's bytes mean. Whatever is wrong with a file, the engine goes on without it.
"""

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from octavo.config import Config
from octavo.engine.console import LOGGER
from octavo.engine.report import Report, phase
from octavo.errors import ConfigError
from octavo.kv.manager import KvManager
from octavo.models.spec import ModelSpec
from octavo.ops.table import NUMERIC_CONTRACT, KvStore
from octavo.runner.kv_file import Identity, KvFile, KvFileError, check_writers, stamp_of, write_kv_file
from octavo.runner.memory import size
from octavo.weights.checkpoint import Checkpoint
from octavo.weights.identity import checkpoint_hash

PREFIX, SUFFIX = "kv-", ".octavo"
ABANDONED = 3600.0  # seconds after which an unfinished file is nobody's


class KvKeeper:
    """Where one engine keeps its cached blocks."""

    def __init__(self, folder: Path, most_bytes: int, identity: Identity, kv: KvManager, store: KvStore) -> None:
        name = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()[:32]
        self.path = folder / f"{PREFIX}{name}{SUFFIX}"
        self._most = most_bytes
        self._identity = identity
        self._kv = kv
        self._store = store
        self._saved: list[bytes] = []  # what the file held when this engine read it
        self._stamp: tuple[int, int] | None = None  # which file that was

    def load(self) -> int:
        """Put what was kept into the pool, the most recently used first. To be called before anything runs. Returns how many blocks."""
        kv, store = self._kv, self._store
        try:
            with KvFile(self.path, self._identity, store.block_bytes) as file:
                blocks = kv.adopt(file.keys)
                try:
                    file.fill(len(blocks), lambda number, data: store.write_block(blocks[number], data))
                except BaseException:
                    kv.reset_cache()
                    raise
                self._saved, self._stamp = file.keys, file.stamp
                return len(blocks)
        except FileNotFoundError:
            return 0
        except KvFileError as error:
            LOGGER.warning("kept KV blocks are not used: %s: %s", self.path, error)
            return 0

    def save(self) -> None:
        """Keep what is cached now. Nothing may run. What goes wrong is told in the log."""
        kept = self._kv.hot(self._most // self._store.block_bytes)
        keys, blocks = [key for key, _ in kept], [block for _, block in kept]
        try:
            if keys and (keys != self._saved or self._stamp != stamp_of(self.path)):  # others may have replaced or removed it
                write_kv_file(self.path, self._identity, keys, lambda number: self._store.read_block(blocks[number]))
            self._tidy()
        except (OSError, KvFileError) as error:
            LOGGER.warning("the KV cache could not be kept in %s: %s", self.path, error)

    def forget(self) -> None:
        """Keep nothing of what was kept so far: the cache was reset."""
        self._saved = []
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            LOGGER.warning("the kept KV blocks could not be removed: %s", error)

    def _tidy(self) -> None:
        """Other engines' files go, those saved longest ago first, until all are within the limit; and what a crash left unfinished."""
        files: list[tuple[float, int, Path]] = []
        for path in self.path.parent.iterdir():
            with suppress(FileNotFoundError):  # somebody else tidies, too
                status = path.lstat()
                if path.name.startswith(PREFIX) and path.suffix == SUFFIX:
                    files.append((status.st_mtime, status.st_size, path))
                elif path.name.startswith(f".{PREFIX}") and path.suffix == ".tmp" and time.time() - status.st_mtime > ABANDONED:
                    path.unlink()
        total = 0
        for _, nbytes, path in sorted(files, key=lambda file: (file[2] != self.path, -file[0])):
            total += nbytes
            if total > self._most and path != self.path:
                with suppress(FileNotFoundError):
                    path.unlink()


def open_keeper(config: Config, spec: ModelSpec, checkpoint: Checkpoint, kv: KvManager, store: KvStore, report: Report) -> KvKeeper | None:
    """What keeps the prefix cache, if that is asked for, once it has loaded what it kept. Raises: ConfigError, CheckpointError."""
    if config.kv.kv_cache_dir is None:
        return None
    with phase(report, "loading the kept KV cache"):
        folder = check_folder(config.kv.kv_cache_dir)
        identity = identity_of(config, spec, checkpoint_hash(checkpoint.files, folder), store.block_bytes)
        keeper = KvKeeper(folder, config.kv.kv_cache_dir_bytes, identity, kv, store)
        blocks = keeper.load()
    if blocks:
        report.note(f"KV cache: {blocks} blocks ({size(blocks * store.block_bytes)}) of earlier runs, from {keeper.path}")
    return keeper


def check_folder(path: str) -> Path:
    """The folder, made if it is not there. Raises: ConfigError when it cannot be written, or others could write what would be read from it."""
    folder = Path(path)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        usable = os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    except FileExistsError as error:
        raise ConfigError(f"kv_cache_dir {path!r} is no folder", "kv_cache_dir") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"kv_cache_dir {path!r} cannot be made: {getattr(error, 'strerror', None) or error}", "kv_cache_dir") from error
    if not usable:
        raise ConfigError(f"kv_cache_dir {path!r} cannot be read and written by this user", "kv_cache_dir")
    try:
        check_writers(f"kv_cache_dir {path!r}", folder)
    except KvFileError as error:
        raise ConfigError(str(error), "kv_cache_dir") from None
    return folder


def identity_of(config: Config, spec: ModelSpec, checkpoint: str, block_bytes: int) -> Identity:
    """All that decides which numbers a block holds for a key, and how its bytes are laid. ``checkpoint``: the hash of its content."""
    from octavo import __version__

    shape = asdict(spec)
    rope = shape.pop("rope")
    return {
        "octavo": __version__, "numeric contract": NUMERIC_CONTRACT, "checkpoint": checkpoint, "weights": str(config.model.quantization),
        "compute dtype": config.model.dtype, "KV dtype": config.kv.kv_cache_dtype, "rope": _digest(rope), "model": _digest(shape),
        "layout": config.runner.backend, "block size": config.kv.block_size, "block bytes": block_bytes,
    }


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
