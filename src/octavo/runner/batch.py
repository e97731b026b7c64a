"""From a StepPlan to the step's arrays: one set of vectorized rules for prefill, decode and everything between.

    item                    its tokens           its rows for the head
    start=96, 3 tokens      positions 96 97 98   last one, if it samples
    start=0, 16 tokens      positions 0 … 15     those that are scored (prompt_logprobs), and the last one if it samples
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np

from octavo.core.sampling import MOST_CANDIDATES
from octavo.core.step import PlanItem
from octavo.ops.table import STEP_FIELDS
from octavo.runner.slots import Slots


@dataclass(frozen=True, slots=True)
class Rows:
    """Which head rows belong to which item. ``sampling`` rows are one per item that samples, in plan order."""

    num: int  # R
    sampling: np.ndarray  # row numbers
    sampling_slots: np.ndarray  # the slot of each
    scored: dict[int, tuple[int, int]]  # item → its scored rows [from, to)


class Batch:
    """The step's arrays, made once, filled at each step."""

    def __init__(self, *, max_tokens: int, max_seqs: int, max_logprobs: int, vocab: int, block_size: int) -> None:
        dims: dict[str | int, int] = {
            "T": max_tokens, "S": max_seqs, "S+1": max_seqs + 1, "R": max_tokens,
            "K": vocab if max_logprobs < 0 else min(max(max_logprobs, MOST_CANDIDATES), vocab),  # beam search needs more than callers may see
        }
        # np.zeros takes pages when they are touched, so the wide top_* arrays cost only what is used of them.
        self.arrays: dict[str, np.ndarray] = {
            name: np.zeros([dims.get(d, d) for d in shape], np.dtype(kind)) for name, (kind, shape) in STEP_FIELDS.items()
        }
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.block_size = block_size
        self._iota = np.arange(max_tokens + 1, dtype=np.int32)

    @property
    def num_bytes(self) -> int:
        """Address space of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def fill(self, items: list[PlanItem], slots: Slots) -> Rows:
        """Write the inputs of one step.

        Raises: ValueError when the plan contradicts what the slots hold (an epoch, a position, a missing block).
        """
        a = self.arrays
        num_seqs = len(items)
        slot = np.array([item.slot for item in items], np.int32)
        start = np.array([item.start for item in items], np.int32)
        count = np.array([len(item.tokens) for item in items], np.int32)
        q_start = a["q_start"][: num_seqs + 1]
        q_start[0] = 0
        np.cumsum(count, out=q_start[1:])
        num_tokens = int(q_start[-1])
        end = start + count
        self._check(items, slots, slot, count, end)

        owner = np.repeat(self._iota[:num_seqs], count)
        token_slot = slot[owner]
        tokens = np.fromiter(chain.from_iterable([item.tokens for item in items]), np.int32, num_tokens)
        positions = a["positions"][:num_tokens]
        np.add(self._iota[:num_tokens], (start - q_start[:-1])[owner], out=positions)
        unnamed = tokens < 0
        if (unnamed & (positions != slots.num_tokens[token_slot] - 1)).any():
            raise ValueError("the plan leaves a token to the slot that is not the slot's last one")
        np.copyto(a["tokens"][:num_tokens], np.where(unnamed, slots.last[token_slot], tokens))
        block, offset = np.divmod(positions, self.block_size)
        np.add(slots.arrays["block_table"][token_slot, block] * self.block_size, offset, out=a["kv_slots"][:num_tokens])
        a["seq_slot"][:num_seqs] = slot
        a["kv_len"][:num_seqs] = end
        rows = self._fill_rows(items, slots, slot, q_start, end)
        a["header"][:4] = num_tokens, num_seqs, rows.num, a["row_top"][: rows.num].max(initial=-1)
        return rows

    def _fill_rows(self, items: list[PlanItem], slots: Slots, slot: np.ndarray, q_start: np.ndarray, end: np.ndarray) -> Rows:
        a = self.arrays
        sampling = np.flatnonzero([item.sample for item in items])
        num = len(sampling)
        if not any(item.score_to > item.score_from for item in items):
            where, sampled_slots = self._iota[:num], slot[sampling]
            a["rows"][:num] = q_start[sampling + 1] - 1
            a["row_slot"][:num] = sampled_slots
            a["row_pos"][:num] = end[sampling]
            a["row_target"][:num] = -1
            a["row_top"][:num] = slots.top[sampled_slots]
            return Rows(num, where, sampled_slots, {})
        num, places, scored = 0, [], {}
        for i, item in enumerate(items):
            wanted = item.score_to - item.score_from
            if wanted > 0:
                state = slots.state[item.slot]
                if state is None or item.score_to >= len(state.prompt):
                    raise ValueError(f"slot {item.slot} has no prompt tokens to score up to position {item.score_to}")
                to = num + wanted
                first = int(q_start[i]) + item.score_from - item.start
                a["rows"][num:to] = self._iota[first : first + wanted]
                a["row_slot"][num:to] = item.slot
                a["row_pos"][num:to] = self._iota[:wanted] + (item.score_from + 1)
                a["row_target"][num:to] = state.prompt[item.score_from + 1 : item.score_to + 1]
                a["row_top"][num:to] = state.prompt_top
                scored[i] = num, to
                num = to
            if item.sample:
                a["rows"][num] = q_start[i + 1] - 1
                a["row_slot"][num] = item.slot
                a["row_pos"][num] = end[i]
                a["row_target"][num] = -1
                a["row_top"][num] = slots.top[item.slot]
                places.append(num)
                num += 1
        return Rows(num, np.array(places, np.int32), slot[sampling], scored)

    def _check(self, items: list[PlanItem], slots: Slots, slot: np.ndarray, count: np.ndarray, end: np.ndarray) -> None:
        """Our own invariants, at the price of a few array comparisons: a broken one would corrupt somebody's cache."""
        if len(items) > self.max_seqs or int(count.sum()) > self.max_tokens:
            raise ValueError(f"a step of {len(items)} sequences and {count.sum()} tokens exceeds {self.max_seqs} and {self.max_tokens}")
        epoch = np.array([item.epoch for item in items], np.int64)
        wrong = (slots.epoch[slot] != epoch) | (count < 1) | (end > slots.num_blocks[slot] * self.block_size) | (end > slots.num_tokens[slot])
        if wrong.any():
            item = items[int(np.flatnonzero(wrong)[0])]
            last = item.start + len(item.tokens) - 1
            raise ValueError(
                f"slot {item.slot} holds epoch {slots.epoch[item.slot]}, {slots.num_tokens[item.slot]} tokens and "
                f"{slots.num_blocks[item.slot]} blocks; the plan has epoch {item.epoch} and positions {item.start} … {last}"
            )
