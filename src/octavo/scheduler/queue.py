"""WaitingQueue: the requests that wait, in policy order."""

import heapq
from collections.abc import Hashable, Iterator, KeysView

from octavo.core.request import Request
from octavo.scheduler.policy import Policy

Entry = tuple[tuple[float, int], int, Request]  # place in the group, number of the push, request


class _Group:
    """A heap of one group's requests; the entries that no longer hold are skipped when they surface."""

    __slots__ = ("heap", "live")

    def __init__(self) -> None:
        self.heap: list[Entry] = []
        self.live = 0  # entries that hold


class WaitingQueue:
    """One heap per group of the policy. Push costs O(log n), removal O(1), the first O(groups).

    A preempted request is pushed again with its old order, so it gets its old place back; one whose rank has changed is pushed
    again while it waits.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._groups: dict[Hashable, _Group] = {}  # only those that somebody of waits
        self._live: dict[str, int] = {}  # request id → the number of the push that holds
        self._pushes = 0
        self.last_group: Hashable | None = None  # the one that last had nobody waiting any more

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._live

    def __iter__(self) -> Iterator[Request]:
        """In policy order."""
        level, live = self._policy.level, self._live
        every = [(level(key), entry) for key, group in self._groups.items() for entry in group.heap if live.get(entry[2].id) == entry[1]]
        return (entry[2] for _, entry in sorted(every))

    @property
    def groups(self) -> KeysView[Hashable]:
        """The groups of which somebody waits."""
        return self._groups.keys()

    def push(self, request: Request) -> None:
        """Put a request at its place, also when it waits at another."""
        key = self._policy.group(request)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
        self._pushes += 1
        group.live += request.id not in self._live
        self._live[request.id] = self._pushes
        heapq.heappush(group.heap, (self._policy.order(request), self._pushes, request))
        self._tidy(group)

    def first(self) -> Request | None:
        """The next in order, which stays; None when nobody waits."""
        groups = self._groups
        if not groups:
            return None
        if len(groups) == 1:
            return self._top(next(iter(groups.values())))[2]
        level = self._policy.level
        return min((level(key), self._top(group)) for key, group in groups.items())[1][2]

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        del self._live[request.id]
        key = self._policy.group(request)
        group = self._groups[key]
        group.live -= 1
        if group.live:
            self._tidy(group)
        else:
            del self._groups[key]
            self.last_group = key

    def _top(self, group: _Group) -> Entry:
        heap, live = group.heap, self._live
        while live.get(heap[0][2].id) != heap[0][1]:
            heapq.heappop(heap)
        return heap[0]

    def _tidy(self, group: _Group) -> None:
        """Entries that no longer hold may not pile up behind a head that waits long."""
        if len(group.heap) > 2 * group.live + 64:
            group.heap = [entry for entry in group.heap if self._live.get(entry[2].id) == entry[1]]
            heapq.heapify(group.heap)
