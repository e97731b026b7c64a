"""Runs a Program of any provider over hand-made step arrays: no scheduler, no runner, block tables scattered on purpose.

Add a provider: one entry in PROVIDERS. Everything is read through the contract's arrays, so the same checks fit all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octavo.config import BLOCK_SIZE
from octavo.kv.spec import KvSpec
from octavo.models import registry
from octavo.ops.table import SLOT_FIELDS, STEP_FIELDS


def _torch(dtype: str) -> Any:
    from octavo.ops.torch_ops import TorchProvider

    return TorchProvider(dtype=dtype)


def _native(dtype: str) -> Any:
    pytest.importorskip("octavo._native", reason="the native library is not built here", exc_type=ImportError)
    from octavo.ops.native import NativeProvider

    return NativeProvider(dtype=dtype, num_threads=2)


PROVIDERS: dict[str, Callable[[str], Any]] = {"torch": _torch, "native": _native}


def load(path: Any, provider: Any, dtype: str) -> registry.LoadedModel:
    """Open a checkpoint and load it into the provider."""
    from octavo.weights.checkpoint import open_checkpoint

    return registry.load(open_checkpoint(path), provider, dtype)


@dataclass
class Item:
    """One sequence's part of a step: ``tokens`` at positions ``start`` …; ``rows`` are offsets into them."""

    slot: int
    start: int
    tokens: Sequence[int]
    rows: Sequence[int] = ()
    target: int = -1  # for all rows; -1: sample
    top: int = -1


@dataclass
class Sampling:
    """A slot's sampling state."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0
    mask: np.ndarray | None = None
    bias: np.ndarray | None = None
    seen: dict[int, int] = field(default_factory=dict)  # id → count in the output


class Bench:
    """A model compiled with its own arrays and blocks. ``step`` runs items; the outputs are ``bench.arrays``."""

    def __init__(self, provider: Any, model: registry.LoadedModel, *, dtype: str, max_tokens: int = 128, slots: int = 4, num_blocks: int = 96,
                 blocks_per_slot: int = 64, alternatives: int = 0, seed: int = 0, kv: str | None = None) -> None:
        spec = self.spec = model.spec
        dims = {"T": max_tokens, "S": slots, "R": max_tokens, "S+1": slots + 1, "K": max(alternatives, 1), "B": blocks_per_slot}
        self.arrays, slot_arrays = (
            {name: np.zeros([dims.get(d, d) for d in shape], np.dtype(kind)) for name, (kind, shape) in fields.items()}
            for fields in (STEP_FIELDS, SLOT_FIELDS)
        )
        self.slots = SimpleNamespace(arrays=slot_arrays, mask=[None] * slots, bias=[None] * slots, seen=[None] * slots)
        for slot in range(slots):
            self.sampling(slot, Sampling())
        self.free = list(np.random.default_rng(seed).permutation(num_blocks))  # so that no table is in order
        self.used = [0] * slots
        kv = provider.kv_store(KvSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, kv or dtype), num_blocks)
        self.program = provider.compile(model.fn, model.weights, spec, step=self.arrays, slots=self.slots, kv=kv)

    def sampling(self, slot: int, s: Sampling) -> None:
        """Set a slot's sampling state, addresses included."""
        a = self.slots.arrays
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency", "seed"):
            a[name][slot] = getattr(s, name)
        self.slots.mask[slot], self.slots.bias[slot] = s.mask, s.bias
        ids, counts = np.array(list(s.seen), np.int32), np.array(list(s.seen.values()), np.int32)
        self.slots.seen[slot] = (ids, counts, len(ids)) if s.seen else None
        a["num_seen"][slot] = len(ids)
        for name, array in (("mask", s.mask), ("bias", s.bias), ("seen_ids", ids if s.seen else None), ("seen_counts", counts if s.seen else None)):
            a[name][slot] = 0 if array is None else array.ctypes.data

    def release(self, slot: int) -> None:
        """Give a slot's blocks back; the next to come takes them first, dirty as they are."""
        self.free.extend(self.slots.arrays["block_table"][slot, : self.used[slot]])
        self.used[slot] = 0

    def step(self, items: Sequence[Item], *, sample: bool = True) -> int:
        """Write the arrays, run both segments. → rows."""
        a, table = self.arrays, self.slots.arrays["block_table"]
        t = r = 0
        for s, item in enumerate(items):
            n, end = len(item.tokens), item.start + len(item.tokens)
            while self.used[item.slot] * BLOCK_SIZE < end:
                table[item.slot, self.used[item.slot]] = self.free.pop()
                self.used[item.slot] += 1
            at = np.arange(item.start, end)
            a["tokens"][t : t + n] = item.tokens
            a["positions"][t : t + n] = at
            a["kv_slots"][t : t + n] = table[item.slot, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            a["q_start"][s : s + 2] = t, t + n
            a["seq_slot"][s], a["kv_len"][s] = item.slot, end
            for row in item.rows:
                for name, value in (("rows", t + row), ("row_slot", item.slot), ("row_pos", item.start + row + 1), ("row_target", item.target),
                                    ("row_top", item.top)):
                    a[name][r] = value
                r += 1
            t += n
        a["header"][:4] = t, len(items), r, max((item.top for item in items if item.rows), default=-1)
        self.program.forward()
        if sample:
            self.program.sample()
        return r

    def logprobs(self, slot: int, tokens: Sequence[int], chunks: Sequence[int], start: int = 0) -> np.ndarray:
        """Raw log-probabilities of the whole vocabulary after every token, fed in chunks of these sizes. → [n, V]."""
        assert sum(chunks) == len(tokens)
        parts, done = [], 0
        for size in chunks:
            part = tokens[done : done + size]
            rows = self.step([Item(slot, start + done, part, range(size), target=0, top=self.spec.vocab)])
            parts.append(self.table(rows))
            done += size
        return np.concatenate(parts)

    def table(self, rows: int) -> np.ndarray:
        """top_ids and top_logprobs as rows over the vocabulary. → [rows, V]."""
        v = self.spec.vocab
        out = np.full((rows, v), np.nan, np.float32)
        np.put_along_axis(out, self.arrays["top_ids"][:rows, :v].astype(np.int64), self.arrays["top_logprobs"][:rows, :v], axis=1)
        return out
