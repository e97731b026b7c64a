"""SwapTier: which tier slots hold the blocks of which preempted request. Ids only; the memory is the runner's."""

from collections.abc import Sequence
from typing import NamedTuple

from octavo.errors import ConfigError


class Swapped(NamedTuple):
    """What the tier holds of a request: its first ``num_tokens`` tokens, one slot for each of their blocks."""

    num_tokens: int
    slots: list[int]
    plan: int  # number of the plan that moves them there


class SwapTier:
    """Slots ``0 … num_slots - 1``, each of one block. A slot is free, or held for one or more requests that shared the block.

    Only requests that wait are in it: one that is resumed, or ends, is dropped. As moves are made in the order of their
    decisions, a dropped slot may be given again at once. The slot freed last is given next, so that a lightly used tier stays
    small: its memory is committed when first written. Who may touch it: Preempter.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ConfigError(f"the swap tier must have at least 1 block, not {num_slots}", "kv_swap_bytes")
        self.num_slots = num_slots
        self._refs = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))  # the next one is at the end
        self._held: dict[str, Swapped] = {}

    @property
    def num_used(self) -> int:
        """Slots that hold a block."""
        return self.num_slots - len(self._free)

    @property
    def num_requests(self) -> int:
        """Requests that have blocks here."""
        return len(self._held)

    def get(self, request_id: str) -> Swapped | None:
        """What is held of a request."""
        return self._held.get(request_id)

    def requests(self) -> list[str]:
        """Whose blocks are here."""
        return list(self._held)

    def put(self, request_id: str, num_tokens: int, slots: Sequence[int | None], plan: int) -> list[int] | None:
        """Hold a request's blocks: in the slot that is named (another's, who shared the block), or else in a new one.

        Returns the slots; None, and nothing taken, when too few are free.
        """
        assert request_id not in self._held, f"{request_id} is in the tier already"
        new = sum(slot is None for slot in slots)
        if new > len(self._free):
            return None
        given = [self._free.pop() if slot is None else slot for slot in slots]
        for slot in given:
            self._refs[slot] += 1
        self._held[request_id] = Swapped(num_tokens, given, plan)
        return list(given)

    def drop(self, request_id: str) -> bool:
        """Hold a request's blocks no longer. Returns whether there were any."""
        held = self._held.pop(request_id, None)
        if held is None:
            return False
        for slot in reversed(held.slots):
            self._refs[slot] -= 1
            if self._refs[slot] == 0:
                self._free.append(slot)
        return True

    def check(self, block_size: int) -> None:
        """Restate the invariants from nothing: each slot is free or held, as often as requests name it.

        Raises: AssertionError, saying what is wrong.
        """
        named = [0] * self.num_slots
        for request_id, held in self._held.items():
            assert held.num_tokens > 0 and len(held.slots) == -(-held.num_tokens // block_size), f"{request_id}: {held}"
            assert len(set(held.slots)) == len(held.slots), f"{request_id} names a slot twice: {held.slots}"
            for slot in held.slots:
                named[slot] += 1
        assert named == self._refs, f"slots are named {named} times, counted {self._refs}"
        assert sorted(self._free) == [slot for slot, refs in enumerate(named) if not refs], "a slot is lost, or free and held"
