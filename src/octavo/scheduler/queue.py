"""WaitingQueue: the requests that wait, in policy order."""

import heapq
from collections.abc import Iterator

from octavo.core.request import Request
from octavo.scheduler.policy import Policy


class WaitingQueue:
    """A heap by policy order. Push and pop cost O(log n), removal O(1): a removed entry is skipped when it surfaces.

    A preempted request is pushed again with its old order, so it gets its old place back.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[float, int], int, Request]] = []
        self._live: dict[str, int] = {}  # request id → the number of its entry
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        """In policy order."""
        return (request for _, entry, request in sorted(self._heap) if self._live.get(request.id) == entry)

    def push(self, request: Request) -> None:
        """Put a request at its place."""
        self._pushes += 1
        self._live[request.id] = self._pushes
        heapq.heappush(self._heap, (self._policy.order(request), self._pushes, request))

    def first(self) -> Request | None:
        """The next in order, which stays; None when nobody waits."""
        while self._heap:
            _, entry, request = self._heap[0]
            if self._live.get(request.id) == entry:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        del self._live[request.id]
        if len(self._heap) > 2 * len(self._live) + 64:  # removed entries may not pile up behind a head that waits long
            self._heap = [e for e in self._heap if self._live.get(e[2].id) == e[1]]
            heapq.heapify(self._heap)
