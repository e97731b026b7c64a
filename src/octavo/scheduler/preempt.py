"""Preemption: what becomes of what a victim has computed.

    give_way ──▶ swap       its blocks are moved out to the tier ──▶ come_back: those that the cache has not are moved in again
             └─▶ recompute  nothing is kept but what the prefix cache happens to ──▶ come_back: nothing to do

The two give the same K and V, bit for bit, so the choice changes time only. It is made for each victim from measured speeds:

    swap       (blocks moved out + blocks moved in) · seconds per block
    recompute  tokens · seconds per token of a full step

of which the cache spares the part that it has spared recent resumptions. A full tier means recompute. A tier that fails (a disk
that is full, or broken) is given up: whoever has blocks there, or came back from there in the steps concerned, computes anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.config import NO_BLOCK
from octavo.core.request import Request
from octavo.core.step import COPY, IN, OUT, Move, PlanItem, StepPlan, StepResult
from octavo.kv.tier import SwapTier
from octavo.observe.events import Recovered
from octavo.scheduler.times import StepTimes

FRESH = 0.2  # the part of a moving mean that the newest value is


class PreemptionStats(NamedTuple):
    """Totals since the start, and what the swap tier holds."""

    preemptions: int
    tokens_lost: int  # computed tokens that preemptions threw away; the cache may have kept them
    tokens_recomputed: int  # computed tokens that were computed once more
    blocks_out: int  # moved to the tier
    blocks_in: int  # moved back
    tier_blocks: int  # the tier's size; 0 without one
    tier_used: int
    requests_swapped: int  # that have blocks there


class Away(NamedTuple):
    """What was decided for a victim."""

    how: str  # swap | recompute
    tokens: int  # leading ones that the tier keeps
    blocks: int  # moved out for it
    seconds: float  # expected, until it is where it was


@dataclass(slots=True)
class _Debt:
    """A preempted request that has not all computed again."""

    computed: int = 0  # leading tokens that it had
    recomputed: int = 0
    blocks: int = 0  # that came back
    seconds: float = 0.0


class Preempter:
    """Keeps the plan's moves, the tier's bookkeeping, and what preemptions cost. ``full_step``: tokens of the largest step;
    ``block_seconds``: a first guess of the time of one move; ``mode``: auto | swap | recompute.
    """

    def __init__(self, mode: str, block_size: int, tier: SwapTier | None, times: StepTimes, full_step: int, block_seconds: float = 0.0) -> None:
        self.tier = tier
        self.moves: list[Move] = []  # of the plan being made
        self.failed = False  # the tier is given up
        self._mode = mode
        self._block_size = block_size
        self._times = times
        self._full_step = full_step
        self._block_seconds = block_seconds
        self._spared = 0.0  # the part of what preempted ones had that the cache still had when they came back
        self._slot_of: dict[int, int] = {}  # blocks that the moves so far took out, as they are now → their slots
        self._debts: dict[str, _Debt] = {}
        self._movers: dict[int, dict[str, int]] = {}  # plan → request → moves for it
        self._back: dict[int, list[str]] = {}  # plan → whom its moves bring back

    def copy(self, source: int, target: int) -> None:
        """Copy a block in the plan being made."""
        self._slot_of.pop(target, None)
        self.moves.append(Move(COPY, source, target))

    def take_moves(self) -> list[Move]:
        """The moves of the plan that is made now."""
        moves, self.moves = self.moves, []
        self._slot_of.clear()
        return moves

    def give_way(self, request: Request, table: Sequence[int], plan: int, *, sound: bool) -> Away:
        """Decide for a victim with these blocks, and note the moves. ``plan``: the number of the plan being made. Not
        ``sound``: a step failed, and what is in the blocks is not known. What a window has left behind cannot be moved: recompute.
        """
        debt = self._debts.setdefault(request.id, _Debt())
        debt.computed = max(debt.computed, min(request.num_computed, len(request.tokens)))
        useful = min(request.num_computed, len(request.tokens) - 1)  # the last token's row is always computed
        blocks = table[: -(-useful // self._block_size)]
        known = [self._slot_of.get(block) for block in blocks]
        lasting = 1.0 - self._spared
        swap = (known.count(None) + lasting * len(blocks)) * self._block_seconds
        recompute = lasting * useful * self._times.each(self._full_step)
        if not blocks or NO_BLOCK in blocks or not sound or self._mode == "recompute" or (self._mode == "auto" and swap >= recompute):
            return Away("recompute", 0, 0, recompute)
        slots = None if self.tier is None or self.failed else self.tier.put(request.id, useful, known, plan)
        if slots is None:
            return Away("recompute", 0, 0, recompute)
        out = [Move(OUT, block, slot) for block, slot, shared in zip(blocks, slots, known, strict=True) if shared is None]
        self._slot_of.update((move.source, move.target) for move in out)
        self._note(out, request.id, plan)
        return Away("swap", useful, len(out), swap)

    def come_back(self, request: Request, table: Sequence[int], cached: int, most: int, plan: int) -> tuple[int, int]:
        """A preempted request has this table now, of which the cache filled the first ``cached`` tokens: fill it from the tier
        up to ``most`` tokens. Returns the tokens that it has then, and how many blocks were moved.
        """
        debt = self._debts[request.id]
        self._spared += FRESH * (min(cached / debt.computed, 1.0) - self._spared) if debt.computed else 0.0
        held = None if self.tier is None else self.tier.get(request.id)
        if held is None:
            return cached, 0
        start = max(cached, min(held.num_tokens, most))
        numbers = range(cached // self._block_size, -(-start // self._block_size))
        back = [Move(IN, held.slots[number], table[number]) for number in numbers] if start > cached else []
        for move in back:
            self._slot_of.pop(move.target, None)
        self._note(back, request.id, plan)
        if back:
            self._back.setdefault(plan, []).append(request.id)
            debt.blocks += len(back)
        self._release(request.id)
        return start, len(back)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._debts.pop(request_id, None)
        self._release(request_id)

    def committed(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from a step: what its moves took, and for whom."""
        movers = self._movers.pop(plan.number, None)
        self._back.pop(plan.number, None)
        if movers is None:
            return
        each = result.swap_seconds / sum(movers.values())
        if not result.failed_moves:
            self._block_seconds += FRESH * (each - self._block_seconds)
        for request_id, count in movers.items():
            if (debt := self._debts.get(request_id)) is not None:
                debt.seconds += count * each

    def computed(self, request: Request, item: PlanItem, token_seconds: float) -> tuple[int, Recovered | None]:
        """A step has run a request's item. Returns the tokens that it had been through before, and the news if they were the last."""
        debt = self._debts.get(request.id)
        if debt is None:
            return 0, None
        end = item.start + len(item.tokens)
        again = max(0, min(end, debt.computed) - item.start)
        debt.recomputed += again
        debt.seconds += again * token_seconds
        if end < debt.computed:
            return again, None
        del self._debts[request.id]
        return again, Recovered(request.id, debt.recomputed, debt.blocks, debt.seconds)

    def distrust(self, plan: int, back_since: int) -> set[str]:
        """What this plan and those after it moved out cannot be trusted: it is held no longer. Returns who was brought back by
        plan ``back_since`` or one after it."""
        if self.tier is not None:
            for request_id in self.tier.requests():
                held = self.tier.get(request_id)
                if held is not None and held.plan >= plan:
                    self._release(request_id)
        return {request_id for number, back in self._back.items() if number >= back_since for request_id in back}

    def lost(self, plan: StepPlan) -> None:
        """A plan was not executed: nothing is learned from it."""
        self._movers.pop(plan.number, None)
        self._back.pop(plan.number, None)

    def check(self, waiting: set[str], unfinished: set[str]) -> None:
        """Restate the invariants, given the ids. Raises: AssertionError."""
        if self.tier is not None:
            self.tier.check(self._block_size)
            assert set(self.tier.requests()) <= waiting, "the tier holds blocks of somebody who does not wait"
        assert self._debts.keys() <= unfinished, "a debt of somebody who has ended"

    def _note(self, moves: list[Move], request_id: str, plan: int) -> None:
        if moves:
            self.moves += moves
            counts = self._movers.setdefault(plan, {})
            counts[request_id] = counts.get(request_id, 0) + len(moves)

    def _release(self, request_id: str) -> None:
        if self.tier is not None and self.tier.drop(request_id):
            self._slot_of.clear()  # a slot may be another's now
