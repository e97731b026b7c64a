"""Predicted admission: let a request in only while the blocks that all will need at their peak are there.

Optimistic admission asks whether a request fits now; when many then grow at once, some are preempted and computed anew. This
predicate asks what will be needed: it expects of each running request an output as long as recent ones were, and lets the next one
in while the sum at its highest stays within the pool. What it expects too little is still preempted; nothing is ever refused.

Source: Gong et al. 2025, "Past-Future Scheduler for LLM Serving under SLA Guarantees": lengths of the past, conditioned on what a
request has already; they draw a sample of it, this takes a quantile, so that the same history gives the same decision.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from octavo.core.request import Request
from octavo.kv.manager import KvManager

WINDOW = 512  # output lengths remembered
FEW = 16  # below so many of them ``PRIOR`` is expected at least: those that end first are the short ones
PRIOR = 256  # output tokens
NO_LIMIT = 1 << 62  # token slots
QUANTILE = 0.5  # over six distributions of lengths and pools of 10 to 30 % of the need, the median left 0 to 19 % of the preemptions, and
# took less time than optimistic admission in each; 0.7 left fewer still, and idle blocks made it slower in some


class OutputLengths:
    """How long recent outputs were."""

    def __init__(self, window: int = WINDOW, quantile: float = QUANTILE) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._window = window
        self._quantile = quantile

    def add(self, length: int) -> None:
        """One more has ended."""
        if len(self._recent) == self._window:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(length)
        insort(self._sorted, length)

    def expect(self, so_far: int) -> int:
        """The output tokens in the end of a request that has ``so_far``: the quantile of recent lengths above that. One that is
        longer than all of them is expected to double.
        """
        known = self._sorted
        first = bisect_right(known, so_far)
        above = len(known) - first
        expected = known[first + min(int(self._quantile * above), above - 1)] if above else 2 * so_far
        return max(expected, so_far + 1, PRIOR if len(known) < FEW else 0)


class Predicted:
    """The admission predicate. ``running`` is the scheduler's list.

    A request that would run alone is always let in, so nothing can wait for ever on an expectation.
    """

    def __init__(self, running: Sequence[Request], kv: KvManager, lengths: OutputLengths | None = None) -> None:
        self._running = running
        self._kv = kv
        self._lengths = lengths or OutputLengths()

    def __call__(self, request: Request) -> bool:
        """Whether the expected peak with this request is within the pool. Cost: O(running · log running)."""
        group = [request] if request.group is None else request.group.members
        alike = (len(group) - 1) * (request.num_prompt // self._kv.block_size)
        return not self._running or self.peak([*self._running, *group], alike) <= self._kv.capacity

    def ended(self, request: Request, reason: str) -> None:
        """Learn from an end. An abort counts: stop strings end that way, and its blocks are free whoever ended it."""
        if reason != "error" and request.num_output:
            self._lengths.add(request.num_output)

    def peak(self, requests: Sequence[Request], alike: int = 0) -> float:
        """The most token slots that these will hold at once, if each samples one token a step and ends where expected.

        Uses grow until somebody ends, so the highest is just before an end: when the i-th longest ends, it and the i - 1 that
        last longer have each grown by what it had left. Each may leave the better part of a block unused. What running
        ones share now is counted once, and taken off all of them evenly, with the ``alike`` blocks that new ones will share.

        Where all layers have a window, nobody grows beyond that and the parts of two blocks, or what it holds already: a prompt that
        is not computed yet has all its blocks.
        """
        kv, left = self._kv, []
        spare = kv.block_size - 1
        widest = NO_LIMIT if kv.window is None else kv.window + 2 * spare
        for request in requests:
            known = len(request.tokens)
            end = min(request.num_prompt + self._lengths.expect(request.num_output), request.limit) - 1  # the last is never computed
            now = known + spare - kv.unseen(request.num_computed) * kv.block_size
            left.append((max(end - known, 0), now, max(now, widest)))
        left.sort(reverse=True)
        ledger = kv.ledger()
        twice = ledger.logical - ledger.live + alike
        shared = twice * kv.block_size / len(left)  # of each, on average
        most, held, growing, full = 0.0, 0, 0, 0
        stops: list[tuple[int, int]] = []  # a heap of minus the steps until one stops growing, and what it holds then
        for place, (steps, now, end) in enumerate(left, 1):
            heappush(stops, (now - end, end))
            full += end
            while stops and -stops[0][0] > steps:  # in fewer steps it still grows
                room, end = heappop(stops)
                held += end + room
                full -= end
                growing += 1
            most = max(most, held + growing * steps + full - place * shared)
        return most
