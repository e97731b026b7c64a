"""Row purity: bitwise the same tokens and log-probabilities, however the work is cut.

Axes: alone or all at once × chunk budget × pool (roomy, or so small that requests are preempted) × threads × instruction
set × prefix cache (off, cold, warm, partial, restored from a file) × what becomes of a preempted request's blocks (computed again,
or swapped to memory or a file).
`make test` runs sets in which every pair of values of two axes occurs; `make matrix` runs everything.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("worker.py")


def instruction_sets() -> list[str]:
    from octavo.ops.native import native_info

    return native_info()["available"].split(",")


def run(isa: str, job: dict[str, Any], folder: Path, prefix: list[str] | None = None) -> dict[str, Any]:
    """The cells of one instruction set, in a process of their own."""
    source, result = folder / f"{isa}.json", folder / f"{isa}.out.json"
    source.write_text(json.dumps(job))
    env = {**os.environ, "OCTAVO_ISA": isa, "OCTAVO_LOG": "warning"}
    done = subprocess.run([*(prefix or []), sys.executable, str(WORKER), str(source), str(result)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{isa}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    found = json.loads(result.read_text())
    assert found["isa"] == isa
    return found


def pairwise(axes: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Cells in which every pair of values of two axes occurs: greedily the cell that covers most of what is left."""
    names = list(axes)
    cells = every(axes)

    def pairs(cell: dict[str, Any]) -> set[Any]:
        return set(itertools.combinations(((n, repr(cell[n])) for n in names), 2))

    left = set().union(*map(pairs, cells))
    chosen = []
    while left:
        best = max(cells, key=lambda c: len(pairs(c) & left))
        chosen.append(best)
        left -= pairs(best)
    return chosen


def every(axes: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """All cells, but those that swap while nothing is preempted."""
    cells = [dict(zip(axes, values)) for values in itertools.product(*axes.values())]
    return [cell for cell in cells if cell["swap"] == "recompute" or (cell["tight"] and not cell["alone"])]


def check(model: str, cells: list[dict[str, Any]], folder: Path, **job: Any) -> None:
    """Every cell answers as the first one does; cells with a small pool did preempt."""
    by_isa: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        by_isa.setdefault(cell["isa"], []).append(cell)
    first, where = None, None
    for isa, mine in by_isa.items():
        found = run(isa, {"model": model, "cells": mine, **job}, folder)
        for cell, got in zip(mine, found["cells"]):
            if cell["tight"] and not cell["alone"]:
                assert got["preemptions"] > 0, f"no preemption was forced in {cell}"
            out, back = got["swapped"]
            assert (out > 0) == (cell["swap"] != "recompute"), f"{out} blocks were swapped out in {cell}"
            assert back <= out and (back > 0 or out == 0 or cell["cache"] != "off"), f"{back} blocks came back in {cell}"
            if cell["cache"] == "off" or not cell["tight"]:  # cold: some of the prompts begin alike
                assert (got["hits"] > 0) == (cell["cache"] != "off"), f"{got['hits']} cached tokens in {cell}"
            if first is None:
                first, where = got["answers"], cell
                assert sum(len(o[0]) for r in first for o in r[1]) > job["count"], "hardly any token was generated"
            for number, (want, have) in enumerate(zip(first, got["answers"], strict=True)):
                assert have == want, f"request {number} differs between {where} and {cell}"


def cells_of(axes: dict[str, list[Any]], blocks: dict[bool, int], whole: bool) -> list[dict[str, Any]]:
    chosen = every(axes) if whole else pairwise(axes)
    return [{**cell, "blocks": blocks[cell["tight"]]} for cell in chosen]


TINY = {"count": 32, "max_prompt": 90, "max_tokens": 24, "max_model_len": 128}
REAL = {"count": 8, "max_prompt": 60, "max_tokens": 12, "max_model_len": 96}


def axes_of(budgets: list[int], threads: list[int]) -> dict[str, list[Any]]:
    return {"isa": instruction_sets(), "alone": [False, True], "budget": budgets, "tight": [False, True], "threads": threads,
            "cache": ["off", "cold", "warm", "partial", "restored"], "swap": ["recompute", "memory", "file"]}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.checkpoints import make_tiny

    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder, arch="llama")
    return str(folder)


@pytest.mark.parametrize(("dtype", "kv"), [("bfloat16", "auto"), ("float32", "auto"), ("bfloat16", "int8"), ("bfloat16", "fp8"), ("float32", "int4")])
def test_tiny_pairwise(tiny_model: str, tmp_path: Path, dtype: str, kv: str) -> None:
    cells = cells_of(axes_of([16, 64, 2048], [1, 2, 3]), {False: 1024, True: 10}, whole=False)
    check(tiny_model, cells, tmp_path, dtype=dtype, kv_cache_dtype=kv, **TINY)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_tiny_quantized_pairwise(tiny_model: str, tmp_path: Path, quantization: str) -> None:
    axes = axes_of([16, 64, 2048], [1, 2, 3])
    axes["isa"].append("amx_emulated")
    check(tiny_model, cells_of(axes, {False: 1024, True: 10}, whole=False), tmp_path, dtype="bfloat16", quantization=quantization, **TINY)


@pytest.mark.model
def test_smollm2_as_stored(smollm2: str, tmp_path: Path) -> None:
    """Q4_1 and Q8_0 as the file has them: some cells, every instruction set."""
    cells = [
        {"isa": isa, "alone": alone, "budget": budget, "tight": False, "threads": threads, "blocks": 256, "cache": "off", "swap": "recompute"}
        for isa, alone, budget, threads in [(instruction_sets()[-1], True, 16, 1), *((isa, False, 64, 2) for isa in instruction_sets())]
    ]
    check(smollm2, cells, tmp_path, dtype="bfloat16", quantization="gguf", **REAL)


@pytest.mark.model
def test_smollm2_some(smollm2: str, tmp_path: Path) -> None:
    isas = instruction_sets()
    cells = [
        {"isa": isas[-1], "alone": False, "budget": 2048, "tight": False, "threads": 2, "blocks": 256, "swap": "recompute", "cache": "off"},
        {"isa": isas[-1], "alone": True, "budget": 16, "tight": False, "threads": 1, "blocks": 256, "swap": "recompute", "cache": "warm"},
        {"isa": isas[-1], "alone": False, "budget": 64, "tight": True, "threads": 3, "blocks": 7, "swap": "file", "cache": "cold"},
        {"isa": isas[-1], "alone": False, "budget": 64, "tight": False, "threads": 2, "blocks": 256, "swap": "recompute", "cache": "partial"},
        *({"isa": isa, "alone": False, "budget": 64, "tight": False, "threads": 2,
           "blocks": 256, "swap": "recompute", "cache": "warm"} for isa in isas[:-1]),
    ]
    check(smollm2, cells, tmp_path, dtype="bfloat16", **REAL)


def whole(budgets: list[int], threads: list[int]) -> list[dict[str, Any]]:
    """Every cell on the best instruction set, and every pair of values of two axes over all of them (generic code takes minutes a cell)."""
    axes, blocks = axes_of(budgets, threads), {False: 1024, True: 10}
    return cells_of({**axes, "isa": axes["isa"][-1:]}, blocks, whole=True) + cells_of(axes, blocks, whole=False)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tiny_whole(tiny_model: str, tmp_path: Path, dtype: str) -> None:
    """64 requests; the largest budget takes all prompts in one step. (Quantized caches and weights: the pairs above.)"""
    check(tiny_model, whole([32, 512, 8192], [1, 2]), tmp_path, dtype=dtype, **{**TINY, "count": 64})


@pytest.mark.matrix
def test_smollm2_whole(smollm2: str, tmp_path: Path) -> None:
    job = {"count": 32, "max_prompt": 90, "max_tokens": 16, "max_model_len": 128}
    check(smollm2, whole([32, 512, 8192], [1, 2]), tmp_path, dtype="bfloat16", **job)


@pytest.mark.matrix
def test_generic_on_an_old_cpu(tiny_model: str, tmp_path: Path) -> None:
    """A CPU of 2008 (no AVX): no illegal instruction anywhere, and the same bits as here."""
    emulator = shutil.which("qemu-x86_64")
    if emulator is None:
        pytest.skip("qemu-x86_64 is not installed (Debian: qemu-user)")
    job = {"model": tiny_model, "dtype": "bfloat16", "count": 6, "max_prompt": 40, "max_tokens": 6, "max_model_len": 64,
           "cells": [{"alone": False, "budget": 64, "blocks": 64, "threads": 1, "cache": "cold", "swap": "recompute"}]}
    here, there = run("generic", job, tmp_path), run("generic", job, tmp_path, [emulator, "-cpu", "Nehalem"])
    assert here == there
