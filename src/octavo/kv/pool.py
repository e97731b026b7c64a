"""BlockPool: which blocks of the KV memory are in use, and by how many tables. Ids only; the memory is elsewhere."""

from collections.abc import Iterable, Sequence

from octavo.errors import ConfigError


class BlockPool:
    """Blocks ``0 … num_blocks - 1`` with reference counts. Giving and taking back cost O(1) a block.

    The free list is a stack: the block freed last is given next, and an untouched one only when no used one is free.
    The KV memory is committed by the system when a page is first written, so a lightly loaded engine stays small, and
    what is given was likely just in the processor's cache. Who may touch it: KvManager.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_kv_blocks must be at least 1, not {num_blocks}", "num_kv_blocks")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # the next one is at the end

    @property
    def num_free(self) -> int:
        """Blocks that ``take`` can give."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Give ``count`` blocks, each with one reference; None, and nothing given, when there are fewer."""
        free = self._free
        if count > len(free):
            return None
        taken = [free.pop() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more table for each of these blocks, which are in use."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is free and cannot be shared"
            self._refs[block] += 1

    def give_back(self, blocks: Sequence[int]) -> int:
        """Take one reference off each; those without any become free. Returns how many did. First block, first reused."""
        freed = 0
        for block in reversed(blocks):
            refs = self._refs[block] - 1
            assert refs >= 0, f"block {block} is given back once too often"
            self._refs[block] = refs
            if refs == 0:
                self._free.append(block)
                freed += 1
        return freed

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Restate every invariant from nothing, given all tables.

        Raises: AssertionError, saying which block is wrong.
        """
        counted = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
            for block in table:
                counted[block] += 1
        for block, (refs, uses) in enumerate(zip(self._refs, counted, strict=True)):
            assert refs == uses, f"block {block} has {refs} references and is in {uses} tables"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        for block, refs in enumerate(self._refs):
            assert (block in free) == (refs == 0), f"block {block} has {refs} references and is {'' if block in free else 'not '}free"
        assert len(self._free) + sum(refs > 0 for refs in self._refs) == self.num_blocks
