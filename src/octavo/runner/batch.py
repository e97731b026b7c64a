"""From a StepPlan to the step's arrays: one rule for prefill, decode and everything between.

    item                    its tokens           its rows for the head
    start=96, 3 tokens      positions 96 97 98   last one, if it samples
    start=0, 16 tokens      positions 0 … 15     those that are scored (prompt_logprobs), and the last one if it samples

Plain numbers through memoryviews, an item at a time. A step's kernels have read all of the weights since the last one, so every
function of NumPy that is called here would come from memory again, some microseconds each: with few items that was most of what a step took
outside its kernels, and with many it gained little (docs/log.md).
"""

from array import array
from dataclasses import dataclass

import numpy as np

from octavo.core.sampling import MOST_CANDIDATES
from octavo.core.step import PlanItem
from octavo.ops.table import STEP_FIELDS
from octavo.runner.slots import Slots


@dataclass(frozen=True, slots=True)
class Rows:
    """Which head rows belong to which item."""

    num: int  # R
    sampling: list[int]  # the row of each item that samples, in plan order
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
        views = {name: memoryview(a) for name, a in self.arrays.items()}
        self._header, self._q_start, self._seq_slot, self._kv_len = (views[name] for name in ("header", "q_start", "seq_slot", "kv_len"))
        self._tokens, self._positions, self._kv_slots = (views[name] for name in ("tokens", "positions", "kv_slots"))
        self._rows, self._row_slot, self._row_pos = (views[name] for name in ("rows", "row_slot", "row_pos"))
        self._row_target, self._row_top = views["row_target"], views["row_top"]
        self.out_token = views["out_token"]

    @property
    def num_bytes(self) -> int:
        """Address space of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def fill(self, items: list[PlanItem], slots: Slots) -> Rows:
        """Write the inputs of one step.

        Raises: ValueError when the plan contradicts what the slots hold (an epoch, a position, a missing block).
        """
        if len(items) > self.max_seqs:
            raise ValueError(f"a step of {len(items)} sequences exceeds {self.max_seqs}")
        num, most = 0, -1  # tokens so far; alternatives wanted of a row, at most
        num_rows, sampling, scored = 0, [], {}
        for s, item in enumerate(items):
            slot, first = item.slot, num
            num += len(item.tokens)
            end = item.start + len(item.tokens)
            self._check(item, slots, end, num)
            self._seq_slot[s], self._kv_len[s], self._q_start[s] = slot, end, first
            self._put_tokens(item, slots, first, num)
            if item.score_to > item.score_from:
                scored[s] = num_rows, num_rows + item.score_to - item.score_from
                most = max(most, self._put_scored(item, slots, first, num_rows))
                num_rows = scored[s][1]
            if item.sample:
                top = slots.top[slot]
                self._rows[num_rows], self._row_slot[num_rows], self._row_pos[num_rows] = num - 1, slot, end
                self._row_target[num_rows], self._row_top[num_rows] = -1, top
                most = max(most, top)
                sampling.append(num_rows)
                num_rows += 1
        self._q_start[len(items)] = num
        header = self._header
        header[0], header[1], header[2], header[3] = num, len(items), num_rows, most
        return Rows(num_rows, sampling, scored)

    def _put_tokens(self, item: PlanItem, slots: Slots, first: int, end: int) -> None:
        """An item's tokens to the places first … end - 1: ids, positions, and where their K and V go."""
        size, table, base, start = self.block_size, slots.table, item.slot * slots.blocks_per_slot, item.start
        if end - first == 1:
            token = item.tokens[0]
            self._tokens[first] = token if token >= 0 else self._unnamed(item, slots)
            self._positions[first] = start
            self._kv_slots[first] = table[base + start // size] * size + start % size
            return
        tokens = array("i", item.tokens)
        if min(tokens) < 0:
            tokens[-1] = self._unnamed(item, slots)
        self._tokens[first:end] = tokens
        self._positions[first:end] = array("i", range(start, start + end - first))
        while first < end:  # the tokens of one block
            offset = start % size
            count = min(size - offset, end - first)
            place = table[base + start // size] * size + offset
            self._kv_slots[first : first + count] = array("i", range(place, place + count))
            first, start = first + count, start + count

    def _unnamed(self, item: PlanItem, slots: Slots) -> int:
        """The token that a plan leaves to the slot."""
        if item.start + len(item.tokens) != slots.num_tokens[item.slot] or min(item.tokens[:-1], default=0) < 0:
            raise ValueError("the plan leaves a token to the slot that is not the slot's last one")
        return slots.last[item.slot]

    def _put_scored(self, item: PlanItem, slots: Slots, first: int, row: int) -> int:
        """The rows of an item's scored tokens, from ``row`` on. Returns the alternatives wanted of them."""
        state = slots.state[item.slot]
        if state is None or item.score_to >= len(state.prompt):
            raise ValueError(f"slot {item.slot} has no prompt tokens to score up to position {item.score_to}")
        first += item.score_from - item.start
        for place in range(item.score_to - item.score_from):
            self._rows[row + place], self._row_slot[row + place] = first + place, item.slot
            self._row_pos[row + place] = item.score_from + place + 1
            self._row_target[row + place], self._row_top[row + place] = state.prompt[item.score_from + place + 1], state.prompt_top
        return state.prompt_top

    def _check(self, item: PlanItem, slots: Slots, end: int, num: int) -> None:
        """Our own invariants, at the price of a few comparisons: a broken one would corrupt somebody's cache."""
        slot = item.slot
        epoch, known, blocks = slots.epoch[slot], slots.num_tokens[slot], slots.num_blocks[slot]
        if epoch != item.epoch or not item.tokens or end > known or end > blocks * self.block_size:
            raise ValueError(
                f"slot {slot} holds epoch {epoch}, {known} tokens and {blocks} blocks; "
                f"the plan has epoch {item.epoch} and positions {item.start} … {end - 1}"
            )
        if num > self.max_tokens:
            raise ValueError(f"a step of {num} tokens or more exceeds {self.max_tokens}")
