"""Slots: what the runner remembers about each running request between steps."""

from array import array
from dataclasses import dataclass, field

import numpy as np

from octavo.config import NO_BLOCK
from octavo.core.step import PlanItem, SlotInit
from octavo.ops.table import SLOT_FIELDS
from octavo.runner.masks import TokenMask

U64 = 2**64 - 1


class SeenTokens:
    """The distinct tokens of prompt and output with their counts in the output, for penalties.

    ``ids`` and ``counts`` are int32; the first ``num`` entries hold. The order has no meaning.
    """

    def __init__(self, init: SlotInit) -> None:
        self._place = {token: i for i, token in enumerate(dict.fromkeys(init.tokens))}
        self.num = len(self._place)
        self.ids = np.zeros(_room(self.num), np.int32)
        self.counts = np.zeros_like(self.ids)
        self.ids[: self.num] = list(self._place)
        for token in init.tokens[init.prompt_len :]:
            self.counts[self._place[token]] += 1

    def add(self, token: int) -> None:
        """Count one more output token."""
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = self.num
            if place == len(self.ids):
                self.ids, self.counts = (np.resize(old, _room(place + 1)) for old in (self.ids, self.counts))
            self.ids[place], self.counts[place] = token, 0
            self.num += 1
        self.counts[place] += 1


def _room(num: int) -> int:
    return max(64, 1 << num.bit_length())


@dataclass(slots=True)
class SlotState:
    """The rare things about one slot, None or empty for a plain request."""

    mask: TokenMask | None = None
    seen: SeenTokens | None = None
    prompt: list[int] = field(default_factory=list)  # kept only where prompt_logprobs are wanted
    prompt_top: int = -1


class Slots:
    """Per-slot state: ``arrays`` are the SLOT_FIELDS that the program reads, the rest is the runner's own.

    ``mask``, ``bias`` and ``seen`` own the memory behind the addresses in ``arrays`` (None where the address is 0):
    uint32 words, float32 of the vocabulary, and (ids, counts, num_seen) with int32 arrays.
    """

    def __init__(self, num_slots: int, blocks_per_slot: int, vocab: int) -> None:
        dims: dict[str | int, int] = {"S": num_slots, "B": blocks_per_slot}
        self.num_slots = num_slots
        self.vocab = vocab
        self.arrays: dict[str, np.ndarray] = {
            name: np.zeros([dims.get(d, d) for d in shape], np.dtype(kind)) for name, (kind, shape) in SLOT_FIELDS.items()
        }
        self.mask: list[np.ndarray | None] = [None] * num_slots
        self.bias: list[np.ndarray | None] = [None] * num_slots
        self.seen: list[tuple[np.ndarray, np.ndarray, int] | None] = [None] * num_slots
        self.state: list[SlotState | None] = [None] * num_slots  # None: nothing rare
        self.busy: set[int] = set()  # slots whose mask or counts may change with the next token
        self.blocks_per_slot = blocks_per_slot
        self.table = memoryview(self.arrays["block_table"]).cast("B").cast("i")  # of all slots, one behind the other
        self.epoch = [-1] * num_slots  # nobody's
        self.num_tokens, self.num_blocks, self.last = [0] * num_slots, [0] * num_slots, [0] * num_slots  # known tokens, the last of which is ``last``
        self.top = [-1] * num_slots  # alternatives per sampled token; -1: no log-probabilities

    def free(self, slot: int) -> None:
        """Give a slot up."""
        self.epoch[slot] = -1
        self.num_blocks[slot] = 0
        if self.state[slot] is not None or self.bias[slot] is not None:
            self._drop(slot)

    def init(self, item: PlanItem) -> None:
        """Take a slot over for a request, new or resumed."""
        slot, init = item.slot, item.init
        assert init is not None
        self.free(slot)
        params, arrays = init.params, self.arrays
        for name, value in (
            ("temperature", params.temperature),
            ("top_k", max(0, min(params.top_k, self.vocab))),
            ("top_p", params.top_p),
            ("min_p", params.min_p),
            ("repetition", params.repetition_penalty),
            ("presence", params.presence_penalty),
            ("frequency", params.frequency_penalty),
            ("seed", init.seed & U64),
        ):
            arrays[name][slot] = value
        self.epoch[slot] = item.epoch
        self.last[slot] = init.tokens[-1]
        self.num_tokens[slot] = len(init.tokens)
        self.top[slot] = self._alternatives(params.logprobs)
        if params.logit_bias:
            self._set_bias(slot, params.logit_bias)
        state = SlotState()
        if TokenMask.needed(init):
            state.mask = TokenMask(init, self.vocab)
        if params.has_penalties:
            state.seen = SeenTokens(init)
        if params.prompt_logprobs is not None:
            state.prompt, state.prompt_top = init.tokens[: init.prompt_len], self._alternatives(params.prompt_logprobs)
        if state.mask or state.seen or state.prompt:
            self.state[slot] = state
            self._publish(slot, state)

    def extend(self, slot: int, blocks: list[int]) -> None:
        """Append blocks to a slot's table. NO_BLOCK, behind the window of every row to come, stands there as block 0: nothing of it is read."""
        have, end = self.num_blocks[slot], self.num_blocks[slot] + len(blocks)
        if end > self.blocks_per_slot:
            raise ValueError(f"slot {slot} has room for {self.blocks_per_slot} blocks, and the plan gives it {end}")
        base = slot * self.blocks_per_slot
        self.table[base + have : base + end] = array("i", blocks if NO_BLOCK not in blocks else [max(block, 0) for block in blocks])
        self.num_blocks[slot] = end

    def advance(self, slot: int, token: int) -> None:
        """A slot has one more token."""
        self.last[slot] = token
        self.num_tokens[slot] += 1
        if slot in self.busy and (state := self.state[slot]) is not None:
            if state.mask is not None:
                state.mask.advance(token)
            if state.seen is not None:
                state.seen.add(token)
            self._publish(slot, state)

    def _alternatives(self, wanted: int | None) -> int:
        """The row_top of a request's wish: None → -1, -1 (all) → the vocabulary."""
        return -1 if wanted is None else self.vocab if wanted < 0 else min(wanted, self.vocab)

    def _set_bias(self, slot: int, bias: dict[int, float]) -> None:
        dense = np.zeros(self.vocab, np.float32)
        dense[list(bias)] = list(bias.values())
        self.bias[slot] = dense
        self.arrays["bias"][slot] = dense.ctypes.data

    def _publish(self, slot: int, state: SlotState) -> None:
        """Show the program where a slot's mask and counts are now."""
        words = state.mask.words if state.mask is not None else None
        if words is not self.mask[slot]:
            self.mask[slot] = words
            self.arrays["mask"][slot] = 0 if words is None else words.ctypes.data
        seen = state.seen
        if seen is not None:
            shown = self.seen[slot]
            if shown is None or shown[0] is not seen.ids:
                self.arrays["seen_ids"][slot], self.arrays["seen_counts"][slot] = seen.ids.ctypes.data, seen.counts.ctypes.data
            self.seen[slot] = seen.ids, seen.counts, seen.num
            self.arrays["num_seen"][slot] = seen.num
        if seen is not None or (state.mask is not None and not state.mask.settled):
            self.busy.add(slot)
        else:
            self.busy.discard(slot)

    def _drop(self, slot: int) -> None:
        self.state[slot] = self.mask[slot] = self.bias[slot] = self.seen[slot] = None
        for name in ("mask", "bias", "seen_ids", "seen_counts", "num_seen"):
            self.arrays[name][slot] = 0
        self.busy.discard(slot)
