from pathlib import Path

import pytest

from octavo.runner.memory import GIB, Ledger, available_memory, default_num_blocks, size

MEMINFO = "MemTotal:       16000000 kB\nMemFree:         100 kB\nMemAvailable:    8000000 kB\n"


def tree(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "cg"


def test_without_cgroups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert available_memory(*tree(tmp_path, {})) == 8_000_000 * 1024


def test_v2_limit_counts_reclaimable_cache(tmp_path: Path) -> None:
    got = available_memory(*tree(tmp_path, {
        "proc/self/cgroup": "0::/a/b\n",
        "cg/a/b/memory.max": "1000000\n", "cg/a/b/memory.current": "600000\n", "cg/a/b/memory.stat": "anon 5\ninactive_file 100000\n",
    }))
    assert got == 500_000


def test_v2_the_tightest_parent_holds(tmp_path: Path) -> None:
    got = available_memory(*tree(tmp_path, {
        "proc/self/cgroup": "0::/a/b\n",
        "cg/a/b/memory.max": "max\n", "cg/a/b/memory.current": "1\n",
        "cg/a/memory.max": "5000\n", "cg/a/memory.current": "1000\n",
    }))
    assert got == 4000


def test_v2_namespaced_path_that_is_not_mounted(tmp_path: Path) -> None:
    got = available_memory(*tree(tmp_path, {
        "proc/self/cgroup": "0::/docker/xyz\n", "cg/memory.max": "9000\n", "cg/memory.current": "2000\n",
    }))
    assert got == 7000


def test_v1_memory_controller_only(tmp_path: Path) -> None:
    got = available_memory(*tree(tmp_path, {
        "proc/self/cgroup": "9:cpu:/x\n4:memory:/job\n3:cpuset:/\n",
        "cg/memory/job/memory.limit_in_bytes": "70000\n", "cg/memory/job/memory.usage_in_bytes": "30000\n",
        "cg/memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 10000\n",
        "cg/memory/memory.limit_in_bytes": "9223372036854771712\n", "cg/memory/memory.usage_in_bytes": "30000\n",
        "cg/cpu/x/memory.limit_in_bytes": "1\n", "cg/cpu/x/memory.usage_in_bytes": "1\n",
    }))
    assert got == 50_000


def test_usage_over_the_limit_is_nothing_left(tmp_path: Path) -> None:
    got = available_memory(*tree(tmp_path, {"proc/self/cgroup": "0::/\n", "cg/memory.max": "10\n", "cg/memory.current": "20\n"}))
    assert got == 0


def test_unreadable_is_unknown(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "no", tmp_path / "none") is None


def test_this_machine() -> None:
    got = available_memory()
    assert got is not None and got > 0


@pytest.mark.parametrize(("seqs", "length", "available", "want"), [
    (2, 100, 100 * GIB, 14),  # what the sequences could need: 2 · ceil(100 / 16)
    (256, 8192, 2 * GIB, 1024),  # half of what there is
    (256, 8192, 100 * GIB, 4096),  # the cap
    (256, 8192, None, 4096),
    (256, 8192, 100, 1),  # never none
])
def test_default_pool(seqs: int, length: int, available: int | None, want: int) -> None:
    got = default_num_blocks(max_num_seqs=seqs, max_model_len=length, block_size=16, block_bytes=1024**2, available=available)
    assert got == want


def test_ledger_adds_up() -> None:
    ledger = Ledger(weights=GIB, kv=2 * GIB, activations=1024**2, available=10 * GIB)
    assert ledger.free == 8 * GIB - 1024**2
    assert "KV pool 2.00 GiB" in ledger.line() and "8.00 GiB" in ledger.line()
    assert Ledger(1, 1, 1, None).free is None and "unknown" in Ledger(1, 1, 1, None).line()


def test_size() -> None:
    assert (size(288), size(2048), size(3 * 1024**2), size(GIB * 3 // 2)) == ("288 bytes", "2 KiB", "3.0 MiB", "1.50 GiB")
