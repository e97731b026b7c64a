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
        counts = [len(item.tokens) for item in items]
        num_tokens = sum(counts)
        slot, epoch, start, count = np.array([[item.slot for item in items], [item.epoch for item in items], [item.start for item in items], counts])
        end = start + count
        held = slots.held[slot]
        self._check(items, held, epoch, count, end, num_tokens)

        q_start, positions = a["q_start"][: num_seqs + 1], a["positions"][:num_tokens]
        if num_tokens == num_seqs:  # one each: the same rule without its detours
            token_slot = slot
            q_start[:] = self._iota[: num_seqs + 1]
            positions[:] = start
        else:
            q_start[0] = 0
            np.cumsum(count, out=q_start[1:])
            owner = np.repeat(self._iota[:num_seqs], count)
            token_slot, held = slot[owner], held[owner]
            np.add(self._iota[:num_tokens], (start - q_start[:-1])[owner], out=positions)
        tokens = np.fromiter(chain.from_iterable([item.tokens for item in items]), np.int32, num_tokens)
        unnamed = tokens < 0
        _, known, _, last = held.T
        if (unnamed & (positions != known - 1)).any():
            raise ValueError("the plan leaves a token to the slot that is not the slot's last one")
        a["tokens"][:num_tokens] = np.where(unnamed, last, tokens)
        block, offset = np.divmod(positions, self.block_size)
        np.add(slots.arrays["block_table"][token_slot, block] * self.block_size, offset, out=a["kv_slots"][:num_tokens])
        a["seq_slot"][:num_seqs] = slot
        a["kv_len"][:num_seqs] = end
        rows = self._fill_rows(items, slots, slot, q_start, end)
        a["header"][:4] = num_tokens, num_seqs, rows.num, a["row_top"][: rows.num].max(initial=-1)
        return rows

    def _fill_rows(self, items: list[PlanItem], slots: Slots, slot: np.ndarray, q_start: np.ndarray, end: np.ndarray) -> Rows:
        a = self.arrays
        samples = [item.sample for item in items]
        if not any(item.score_to > item.score_from for item in items):
            sampled_slots, last, ends = slot, q_start[1:], end
            if not all(samples):
                picked = np.flatnonzero(samples)
                sampled_slots, last, ends = slot[picked], last[picked], end[picked]
            num = len(sampled_slots)
            a["rows"][:num] = last - 1
            a["row_slot"][:num] = sampled_slots
            a["row_pos"][:num] = ends
            a["row_target"][:num] = -1
            a["row_top"][:num] = slots.top[sampled_slots]
            return Rows(num, self._iota[:num], sampled_slots, {})
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
        return Rows(num, np.array(places, np.int32), slot[np.flatnonzero(samples)], scored)

    def _check(self, items: list[PlanItem], held: np.ndarray, epoch: np.ndarray, count: np.ndarray, end: np.ndarray, num_tokens: int) -> None:
        """Our own invariants, at the price of a few array comparisons: a broken one would corrupt somebody's cache."""
        if len(items) > self.max_seqs or num_tokens > self.max_tokens:
            raise ValueError(f"a step of {len(items)} sequences and {num_tokens} tokens exceeds {self.max_seqs} and {self.max_tokens}")
        its_epoch, known, blocks, _ = held.T
        wrong = (its_epoch != epoch) | (count < 1) | (end > known) | (end > blocks * self.block_size)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            item = items[at]
            last = item.start + len(item.tokens) - 1
            raise ValueError(
                f"slot {item.slot} holds epoch {its_epoch[at]}, {known[at]} tokens and {blocks[at]} blocks; "
                f"the plan has epoch {item.epoch} and positions {item.start} … {last}"
            )
