"""How others batch and reserve, around the same engine and kernels: what the mechanisms are measured against. For benches, never for users."""

from collections.abc import Callable
from itertools import islice

from octavo.core.request import Request
from octavo.kv.manager import NO_MATCH, KvManager, Match
from octavo.kv.pool import BlockPool
from octavo.scheduler.scheduler import Scheduler


class StaticBatching:
    """The admission predicate of static batching: a batch is formed of those that wait, and nobody joins until its longest member has ended.

    Kind to the baseline: places whose member has ended cost nothing here, where a plain implementation goes on computing them.
    ``scheduler`` is set once it is made.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._batch: set[str] = set()
        self.scheduler: Scheduler | None = None
        self.batches = 0

    def __call__(self, request: Request) -> bool:
        """Whether the request is of the batch that runs, or of the one that now forms."""
        assert self.scheduler is not None
        if request.id not in self._batch and not self.scheduler.running:
            self._batch = {waiting.id for waiting in islice(self.scheduler.waiting, self._size)}
            self.batches += 1
        return request.id in self._batch


class ContiguousPool(BlockPool):
    """Gives only blocks that lie together: the first hole that is large enough."""

    def holes(self) -> list[tuple[int, int]]:
        """The runs of free blocks, as (first, count), in order. Cost: one pass over the pool."""
        found, first = [], None
        for block, refs in enumerate([*self._refs, 1]):
            if not refs and first is None:
                first = block
            elif refs and first is not None:
                found.append((first, block - first))
                first = None
        return found

    def take(self, count: int) -> list[int] | None:
        """A run of ``count`` blocks, each with one reference; None, and nothing given, when no hole has so many."""
        first = next((first for first, size in self.holes() if size >= count), None) if count else 0
        if first is None:
            return None
        taken = list(range(first, first + count))
        self._free = [block for block in self._free if not first <= block < first + count]
        for block in taken:
            self._refs[block] = 1
        return taken


class ContiguousKv(KvManager):
    """Reserves at admission, in one piece, all that a request may come to need: how KV memory was managed before pages.

    ``reserve`` says how many tokens that is, by the request's id. The piece is whole blocks, since the kernels address blocks: up to 15 tokens
    more than an allocator of tokens would take. It cannot grow, and nothing is shared. ``scattered`` counts the admissions that were put off
    although there were enough free blocks, because no hole had so many: external fragmentation.
    """

    def __init__(self, num_blocks: int, reserve: Callable[[str], int]) -> None:
        super().__init__(num_blocks)
        self.pool = ContiguousPool(num_blocks)
        self._reserve = reserve
        self.refused = 0  # admissions put off for want of space, the scattered ones included
        self.scattered = 0

    def admit(
        self, request_id: str, match: Match, num_tokens: int, room: int | None = None, keys: list[bytes] | None = None
    ) -> list[int] | None:
        """Give a request the table of its whole reservation; None, and nothing taken, when no hole is large enough."""
        tokens = max(self._reserve(request_id), num_tokens)
        assert isinstance(self.pool, ContiguousPool) and match == NO_MATCH
        if all(size < self.blocks_for(tokens) for _, size in self.pool.holes()):
            self.refused += 1
            self.scattered += self.blocks_for(tokens) <= self.pool.num_free
            return None
        return super().admit(request_id, match, tokens)


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not below a number."""
    return 1 << (number - 1).bit_length()
