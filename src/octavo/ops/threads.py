"""How many threads this process may use: the affinity mask and the container's CPU quota."""

import math
import os
from pathlib import Path


def allowed_threads() -> int:
    """CPUs in the affinity mask, cut to the cgroup's quota (v1 or v2, rounded up); at least 1."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota()
    return max(1, cpus if quota is None else min(cpus, math.ceil(quota)))


def cgroup_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """CPUs' worth of time that the process's control groups grant, the tightest on the way up; None without a limit."""
    quotas: list[float] = []
    for line in _read(own).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            base = root
        elif "cpu" in controllers.split(","):
            base = root / ("cpu" if (root / "cpu").exists() else controllers)
        else:
            continue
        here = base / path.lstrip("/")
        for folder in (here, *here.parents):
            quotas += _quota_of(folder)
            if folder == base:
                break
        quotas += _quota_of(base)  # inside a container the path is the host's, and only the root is mounted
    return min(quotas, default=None)


def _quota_of(folder: Path) -> list[float]:
    words = _read(folder / "cpu.max").split()
    if not words:
        words = [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
    try:
        quota, period = float(words[0]), float(words[1])
    except (ValueError, IndexError):  # "max", or no such file
        return []
    return [quota / period] if quota > 0 and period > 0 else []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
