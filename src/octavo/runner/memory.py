"""How much memory there is, how much of it the KV pool takes, and the ledger that is told at start."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GIB = 1024**3
POOL_CAP = 4 * GIB  # of the default pool only: an explicit size is obeyed


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the memory goes, in bytes. ``available``: what the machine or container had left before the KV pool."""

    weights: int
    kv: int
    activations: int
    available: int | None
    swap: int = 0  # the swap tier, where it is in memory

    @property
    def free(self) -> int | None:
        """What remains once the whole pool, the tier and all activations are touched; None where it cannot be known."""
        return None if self.available is None else self.available - self.kv - self.activations - self.swap

    def line(self) -> str:
        """One line for people."""
        free = "unknown" if self.free is None else size(self.free)
        swap = f" and swap tier {size(self.swap)}" if self.swap else ""
        return (f"weights {size(self.weights)}, KV pool {size(self.kv)}{swap} (committed as it is used), "
                f"activations {size(self.activations)}, free {free}")


def size(num_bytes: int) -> str:
    """A number of bytes for people, in binary units."""
    if abs(num_bytes) < 1024:
        return f"{num_bytes} bytes"
    if abs(num_bytes) < 1024**2:
        return f"{num_bytes / 1024:.0f} KiB"
    if abs(num_bytes) < GIB:
        return f"{num_bytes / 1024**2:.1f} MiB"
    return f"{num_bytes / GIB:.2f} GiB"


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that can still be taken: the least of MemAvailable and what every enclosing memory cgroup (v1 or v2) leaves.

    None where neither can be read (not Linux). File cache that the kernel would give back counts as available.
    """
    left = list(_cgroup_rooms(proc, cgroups))
    total = _stat(proc / "meminfo", "MemAvailable:")
    if total is not None:
        left.append(total * 1024)
    return max(0, min(left)) if left else None


def default_num_blocks(*, max_num_seqs: int, max_model_len: int, block_size: int, block_bytes: int, available: int | None) -> int:
    """Blocks of the default pool: min(what max_num_seqs could need, half of the available memory, 4 GiB), at least 1."""
    most = max_num_seqs * -(-max_model_len // block_size)
    limit = POOL_CAP if available is None else min(POOL_CAP, available // 2)
    return max(1, min(most, limit // block_bytes))


def _cgroup_rooms(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each memory cgroup around this process leaves, in bytes; none for a cgroup without a limit."""
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        elif not controllers:
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        else:
            continue
        # Inside a container the path may name a folder of the host that is not mounted: then its parents count.
        own = root / path.strip("/")
        for folder in (own, *own.parents):
            if not folder.is_relative_to(root):
                break
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None:
                yield limit - used + (_stat(folder / "memory.stat", names[2]) or 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None  # "max": no limit


def _stat(path: Path, name: str) -> int | None:
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None
