"""BlockPool: which blocks of the KV memory are in use, and by how many tables. Ids only; the memory is elsewhere."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from octavo.config import NO_BLOCK
from octavo.errors import ConfigError


class BlockPool:
    """Blocks ``0 … num_blocks - 1`` with reference counts. Each is exactly one of

        live     in ``refs`` ≥ 1 tables
        cached   in no table, and worth keeping: what it holds may be asked for again
        free     in no table, and nobody knows what it holds

    Giving, taking back and evicting cost O(1) a block. Free blocks are given before cached ones. The free list is a
    stack: the block freed last is given next, and an untouched one only when no used one is free. The KV memory is
    committed by the system when a page is first written, so a lightly loaded engine stays small, and what is given was
    likely just in the processor's cache. Cached blocks go least recently used first, and of one table the last block
    first: so the end of a sequence goes before its beginning, without which it could not be found. ``evicted`` hears of
    each cached block that is given to another use. A table may have places without a block (NO_BLOCK). Who may touch it: KvManager.
    """

    def __init__(self, num_blocks: int, evicted: Callable[[int], None] | None = None) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_kv_blocks must be at least 1, not {num_blocks}", "num_kv_blocks")
        self.num_blocks = num_blocks
        self.num_shared = 0  # blocks in more than one table
        self._evicted = evicted
        self._refs = [0] * num_blocks
        self._kept = bytearray(num_blocks)  # 1: to be cached when its last table is gone
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._free = list(range(num_blocks - 1, -1, -1))  # the next one is at the end

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks in no table whose content is kept for as long as nothing else needs them."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that ``take`` can give."""
        return len(self._free) + len(self._cached)

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these are cached: available now, and no longer once they are shared."""
        refs = self._refs
        return sum(not refs[block] for block in blocks if block != NO_BLOCK)

    def take(self, count: int) -> list[int] | None:
        """Give ``count`` blocks, each with one reference; None, and nothing given, when there are fewer."""
        free = self._free
        if (short := count - len(free)) > 0:
            if short > len(self._cached):
                return None
            for _ in range(short):
                self._evict()
        taken = [free.pop() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more table for each of these blocks, which are live or cached."""
        for block in blocks:
            if block == NO_BLOCK:
                continue
            refs = self._refs[block]
            if refs == 0:
                assert block in self._cached, f"block {block} is free and cannot be shared"
                del self._cached[block]
            elif refs == 1:
                self.num_shared += 1
            self._refs[block] = refs + 1

    def give_back(self, blocks: Sequence[int]) -> int:
        """Take one reference off each. Returns how many have none left: they are cached or free now. First block, first
        reused of the free ones, and last evicted of the cached ones."""
        gone = 0
        for block in reversed(blocks):
            if block == NO_BLOCK:
                continue
            refs = self._refs[block] - 1
            assert refs >= 0, f"block {block} is given back once too often"
            self._refs[block] = refs
            if refs == 0:
                gone += 1
                if self._kept[block]:
                    self._cached[block] = None
                else:
                    self._free.append(block)
            elif refs == 1:
                self.num_shared -= 1
        return gone

    def keep(self, block: int) -> None:
        """A live block is worth keeping when its last table is gone."""
        assert self._refs[block] > 0, f"block {block} is in no table and cannot be kept"
        self._kept[block] = 1

    def drop(self, block: int) -> None:
        """A block is not worth keeping any more; free at once if it is in no table."""
        self._kept[block] = 0
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def touch(self, block: int) -> None:
        """A cached block, if it is one, counts as just used."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def eviction_order(self) -> list[int]:
        """The cached blocks, the next to go first."""
        return list(self._cached)

    def kept(self) -> set[int]:
        """The blocks that are worth keeping, live ones too."""
        return {block for block, kept in enumerate(self._kept) if kept}

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        self._kept[block] = 0
        self._free.append(block)
        if self._evicted is not None:
            self._evicted(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Restate every invariant from nothing, given all tables.

        Raises: AssertionError, saying which block is wrong.
        """
        counted = [0] * self.num_blocks
        for all_places in tables:
            table = [block for block in all_places if block != NO_BLOCK]
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
            for block in table:
                counted[block] += 1
        for block, (refs, uses) in enumerate(zip(self._refs, counted, strict=True)):
            assert refs == uses, f"block {block} has {refs} references and is in {uses} tables"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        for block, refs in enumerate(self._refs):
            places = (refs > 0) + (block in free) + (block in self._cached)
            assert places == 1, f"block {block} has {refs} references, free: {block in free}, cached: {block in self._cached}"
            assert refs > 0 or self._kept[block] == (block in self._cached), f"block {block} is {'' if self._kept[block] else 'not '}to be kept"
        shared = sum(refs > 1 for refs in self._refs)
        assert self.num_shared == shared, f"{shared} blocks are in several tables, the count is {self.num_shared}"
