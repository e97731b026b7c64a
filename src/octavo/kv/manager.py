"""KvManager: which blocks hold the K and V of which request. It is the only writer of block tables.

    tokens   0 ........ cached ........ used ........ capacity of the table
             | matched   | computed or   | reserved:    |
             | blocks    | in this step  | not yet used |

A request's table covers its whole known context from admission on, so a prefill never asks for more in the middle.
Exhaustion is a value (None), never an exception: what to do about it is the scheduler's decision.

With prefix caching, full blocks of known tokens are *sealed*: they get a key and can be matched by others from then on. A block
is sealed when the step that completes it is planned, not when that has run: a step writes all of its K and V (layer by
layer) before it reads any, and steps run in their order. So requests that are admitted in one step share, too, and a
block given up before its step ran is still written before whoever finds it reads it. A step that fails takes the keys
that it promised back (``forget``).

Where every layer looks back over a window only, ``window`` is the widest. Then the blocks that no row to come can see are given up
as a request gets on (``slide``), and its table has NO_BLOCK in their places; and to go on after some tokens of the cache, only what the window
shows of them must still be there.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from octavo.config import BLOCK_SIZE, NO_BLOCK
from octavo.errors import ConfigError
from octavo.kv.pool import BlockPool
from octavo.kv.prefix import PrefixIndex, root_key


class Match(NamedTuple):
    """The part of a sequence that needs no computing: ``num_tokens`` leading tokens, held by ``blocks`` (full ones, or NO_BLOCK), and the
    rest of them by ``tail``, which must be copied to the table's next block, because its owner goes on writing to it."""

    num_tokens: int
    blocks: list[int]
    tail: int | None = None


NO_MATCH = Match(0, [])


class Ledger(NamedTuple):
    """Where the pool's blocks are: each is exactly one of live, cached and free."""

    live: int
    shared: int  # of the live ones: in more than one table
    cached: int
    free: int
    logical: int  # blocks that the live tables would take without sharing
    live_slots: int  # token slots of the live blocks
    reserved_slots: int  # of them: not used yet

    @property
    def total(self) -> int:
        """Blocks of the pool."""
        return self.live + self.cached + self.free

    @property
    def utilization(self) -> float:
        """Live tokens over allocated token slots, 0 to 1; 1 when nothing is allocated."""
        return 1 - self.reserved_slots / self.live_slots if self.live_slots else 1.0


class _Table:
    """The blocks of one request."""

    __slots__ = ("blocks", "closed", "gone", "keys", "sealed", "used")

    def __init__(self, blocks: list[int], used: int, sealed: int, keys: list[bytes] | None) -> None:
        self.blocks = blocks
        self.gone = 0  # leading places that the window has left behind
        self.used = used  # leading token slots that are, or are about to be, filled
        self.sealed = sealed  # leading blocks whose keys were put into the index, by this request or another
        self.keys = keys  # the request's memo (kv/prefix.py); None: its blocks are not for others
        self.closed = False  # no more blocks are sealed

    def close(self, sealed: int) -> None:
        """No block but the first ``sealed`` is for others, now or later."""
        self.sealed = min(self.sealed, sealed)
        self.closed = True


class KvManager:
    """Block tables over a pool of ``num_blocks`` blocks of ``block_size`` tokens. ``window``: tokens that a row sees, its own the last
    of them; None: all."""

    def __init__(self, num_blocks: int, block_size: int = BLOCK_SIZE, *, prefix_caching: bool = False, window: int | None = None) -> None:
        assert window is None or window > 0, window
        if block_size < 1:
            raise ConfigError(f"block_size must be at least 1, not {block_size}", "block_size")
        self.block_size = block_size
        self.window = window
        self._index = PrefixIndex(block_size) if prefix_caching else None
        self.pool = BlockPool(num_blocks, None if self._index is None else self._index.remove)
        self._tables: dict[str, _Table] = {}

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return self.pool.num_blocks * self.block_size

    @property
    def prefix_caching(self) -> bool:
        """Whether blocks are kept and found again."""
        return self._index is not None

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_size)

    def root(self, salt: str, adapter: str) -> list[bytes] | None:
        """A new sequence's memo of keys, to be given to ``match`` and ``admit``; None without prefix caching."""
        return None if self._index is None else [root_key(salt, adapter)]

    def match(self, tokens: Sequence[int], keys: list[bytes] | None) -> Match:
        """The leading tokens that are in the cache: full blocks, at most ``len(tokens) - 1`` tokens.

        The last token is always computed: its row is the one that is sampled.
        """
        if self._index is None or keys is None:
            return NO_MATCH
        most = (len(tokens) - 1) // self.block_size
        blocks = self._index.find(tokens, keys, most) if self.window is None else self._find_window(self._index, tokens, keys, most)
        return Match(len(blocks) * self.block_size, blocks) if blocks else NO_MATCH

    def _find_window(self, index: PrefixIndex, tokens: Sequence[int], keys: list[bytes], most: int) -> list[int]:
        """The most leading blocks of which those are there that the next row sees, and NO_BLOCK for those before them."""
        there: list[int] = []
        best, run = 0, 0  # ``run``: how many of the last ones are there
        for number in range(1, most + 1):
            block = index.holder(index.key(tokens, keys, number))
            there.append(NO_BLOCK if block is None else block)
            run = 0 if block is None else run + 1
            if run and run >= number - self.unseen(number * self.block_size):
                best = number
        first = self.unseen(best * self.block_size)
        return [NO_BLOCK] * first + there[first:best]

    def unseen(self, start: int) -> int:
        """How many leading blocks no row from position ``start`` on can see."""
        return 0 if self.window is None else max(0, start - self.window + 1) // self.block_size

    def admit(
        self, request_id: str, match: Match, num_tokens: int, room: int | None = None, keys: list[bytes] | None = None
    ) -> list[int] | None:
        """Give a request a table for ``num_tokens`` tokens that begins with the matched blocks. Returns the table.

        None, and nothing taken, unless the blocks for ``room`` (at least ``num_tokens``) tokens are there: what is
        between the two is asked for but not reserved. Cached blocks count as there, but for the matched ones.
        """
        assert request_id not in self._tables, f"{request_id} has a table already"
        shared = len(match.blocks)
        room = num_tokens if room is None else room
        assert match.num_tokens <= num_tokens <= room, (match.num_tokens, num_tokens, room)
        if self.blocks_for(room) - shared > self.pool.num_available - self.pool.num_idle(match.blocks):
            return None
        self.pool.share(match.blocks)  # first: what is shared cannot be evicted for the others
        taken = self.pool.take(self.blocks_for(num_tokens) - shared)
        assert taken is not None  # room was there
        table = [*match.blocks, *taken]
        made = self._tables[request_id] = _Table(table, match.num_tokens, shared, keys)
        made.gone = match.blocks.count(NO_BLOCK)
        return list(table)

    def fork(self, parent_id: str, num_tokens: int) -> Match:
        """The first ``num_tokens`` tokens of another request's table, for a request that begins alike to be admitted with.

        They must be computed by the steps before the one that is planned. Unlike ``match`` it needs no cache, finds a block
        that is only begun, too, and works at any point of the parent's life.
        """
        parent = self._tables[parent_id]
        assert 0 < num_tokens <= parent.used, f"a fork of {num_tokens} tokens of {parent_id}, which has {parent.used}"
        assert self.reaches(parent_id, num_tokens), f"{parent_id} has given up what a row at {num_tokens} sees"
        full, begun = divmod(num_tokens, self.block_size)
        return Match(num_tokens, parent.blocks[:full], parent.blocks[full] if begun else None)

    def reaches(self, request_id: str, start: int) -> bool:
        """Whether a request's table still holds what a row at position ``start`` sees: its window may have moved on."""
        return self._tables[request_id].gone <= self.unseen(start)

    def slide(self, request_id: str, start: int) -> int:
        """Give up the blocks that no row from position ``start`` on can see. The planned steps before may read them, and run before whoever
        is given them writes. Returns how many blocks are in no table any more."""
        table = self._tables[request_id]
        first, end = table.gone, self.unseen(start)
        if end <= first:
            return 0
        freed = self._give_up(table, first, end)
        table.blocks[first:end] = [NO_BLOCK] * (end - first)
        table.gone = end
        return freed

    def grow(self, request_id: str, used: int, reserve: int = 0) -> list[int] | None:
        """Make the table cover ``used`` tokens, and ``reserve`` if that is more. Returns the new blocks, mostly none.

        None, and nothing changed, when the pool has too few.
        """
        table = self._tables[request_id]
        need = used if used > reserve else reserve
        if need > len(table.blocks) * self.block_size:
            taken = self.pool.take(self.blocks_for(need) - len(table.blocks))
            if taken is None:
                return None
            table.blocks.extend(taken)
            table.used = used
            return taken
        table.used = used
        return []

    def seal(self, request_id: str, tokens: Sequence[int], num_tokens: int) -> list[bytes]:
        """Let others find the full blocks among the first ``num_tokens`` tokens, which are computed or in a planned step.

        Of two blocks with the same content the one that was sealed first keeps the key. Returns the new keys.
        """
        table = self._tables[request_id]
        if (full := num_tokens // self.block_size) <= table.sealed or table.keys is None or table.closed:
            return []
        index, new = self._index, []
        assert index is not None
        for number in range(table.sealed, full):
            key, block = index.key(tokens, table.keys, number + 1), table.blocks[number]
            if block != NO_BLOCK and index.put(key, block):
                self.pool.keep(block)
                new.append(key)
        table.sealed = full
        return new

    def forget(self, keys: Iterable[bytes]) -> set[int]:
        """Nobody finds these keys any more. Returns their blocks; of tables that still hold one only what comes before it is for others."""
        blocks = set()
        for key in keys if self._index is not None else ():
            assert self._index is not None
            if (block := self._index.holder(key)) is not None:
                self._index.remove(block)
                self.pool.drop(block)
                blocks.add(block)
        for table in self._tables.values() if blocks else ():
            if (first := next((number for number, block in enumerate(table.blocks) if block in blocks), None)) is not None:
                table.close(first)
        return blocks

    def reset_cache(self) -> int:
        """Forget everything that is cached; tables keep what they have, and nobody finds it. Returns how many blocks became free."""
        free = self.pool.num_free
        if self._index is not None:
            self.forget(self._index.all_keys())
            for table in self._tables.values():
                table.keys = None
        return self.pool.num_free - free

    def hot(self, most: int) -> list[tuple[bytes, int]]:
        """At most ``most`` keys that can be found, with their blocks: the most recently used first, none before its parent (unless it is
        behind the window). All planned steps must have run."""
        index, found = self._index, dict[bytes, int]()
        if index is None:
            return []
        for table in self._tables.values():
            for key in (table.keys or [])[1 : table.sealed + 1]:
                if (block := index.holder(key)) is not None:
                    found[key] = block
                elif self.window is None:
                    break  # what follows in the sequence cannot be found either
        for block in reversed(self.pool.eviction_order()):  # of a sequence, the end goes first: so read backwards, parents come first
            found.setdefault(index.key_of(block), block)
        return list(found.items())[:most]

    def adopt(self, keys: Sequence[bytes]) -> list[int]:
        """Let what an earlier engine kept be found: ``keys`` in the order of ``hot``, the first of them, as many as blocks are free. Returns
        their blocks, which must be filled before anything runs. To be called when nothing is cached."""
        index = self._index
        assert index is not None and not self.pool.num_cached
        blocks = self.pool.take(min(len(keys), self.pool.num_free)) or []
        for key, block in zip(keys, blocks):
            new = index.put(key, block)
            assert new, "a key is given twice"
            self.pool.keep(block)
        self.pool.give_back(blocks)  # the first is the last to be evicted
        return blocks

    def release(self, request_id: str, sound: bool = True) -> int:
        """Give up a request's table. Returns how many blocks are in no table any more: sealed ones are cached now, those of
        others' keys too, unless it is not ``sound``: what it was to compute may be missing."""
        table = self._tables.pop(request_id)
        return self._give_up(table, 0, len(table.blocks), sound)

    def _give_up(self, table: _Table, first: int, end: int, sound: bool = True) -> int:
        """Take a table's reference off its blocks ``first`` to ``end``. Returns how many are in no table any more."""
        index, keys, blocks = self._index, table.keys, table.blocks[first:end]
        if index is None or keys is None or table.sealed <= first:
            return self.pool.give_back(blocks)
        # Some of its blocks may be doubles of others' that have the keys. Where such a one was evicted meanwhile, its own takes the key;
        # where not, that one counts as just used, too. So what follows in the sequence never outlives what comes before it.
        holders, sealed = [], 0
        for key, block in zip(keys[first + 1 : table.sealed + 1], blocks):
            if block == NO_BLOCK:
                continue
            if sound and index.put(key, block):
                self.pool.keep(block)
            holders.append(index.holder(key))
            sealed += holders[-1] == block
        gone = self.pool.give_back(blocks)
        if sealed < len(holders):
            for holder in reversed(holders):
                if holder is not None:
                    self.pool.touch(holder)
        return gone

    def table(self, request_id: str) -> list[int]:
        """A copy of a request's table, with NO_BLOCK behind its window; empty when it has none."""
        table = self._tables.get(request_id)
        return [] if table is None else list(table.blocks)

    def holders(self) -> set[str]:
        """The requests that have a table."""
        return set(self._tables)

    def ledger(self) -> Ledger:
        """Where the blocks are now. Cost: one pass over the tables."""
        pool, size = self.pool, self.block_size
        live = pool.num_blocks - pool.num_available
        logical = reserved = 0
        for table in self._tables.values():
            logical += len(table.blocks) - table.blocks.count(NO_BLOCK)
            reserved += len(table.blocks) * size - table.used  # only full blocks are shared: no unused slot is counted twice
        return Ledger(live, pool.num_shared, pool.num_cached, pool.num_free, logical, live * size, reserved)

    def check(self) -> None:
        """Restate every invariant from nothing: each block is exactly one of free, cached and live, references equal the
        tables, what is used lies inside its table, and keys are of full blocks only.

        Raises: AssertionError, saying what is wrong.
        """
        self.pool.check([table.blocks for table in self._tables.values()])
        uses: dict[int, int] = {}
        for request_id, table in self._tables.items():
            assert table.blocks, f"{request_id} has an empty table"
            assert 0 <= table.used <= len(table.blocks) * self.block_size, f"{request_id} uses more than its table"
            assert table.sealed * self.block_size <= table.used, f"{request_id} has sealed what it has not computed"
            unseen = self.unseen(table.used)
            assert all(block == NO_BLOCK for block in table.blocks[: table.gone]), f"{request_id} holds what its window has left behind"
            assert NO_BLOCK not in table.blocks[unseen:], f"{request_id} lacks what its window shows"
            for number, block in enumerate(table.blocks):
                if block == NO_BLOCK:
                    continue
                uses[block] = uses.get(block, 0) + 1
                assert uses[block] == 1 or (number + 1) * self.block_size <= table.used, f"{request_id} shares a block that is not full"
        if self._index is not None:
            self._index.check(self.pool.kept())
        ledger = self.ledger()
        assert ledger.live == len(uses), f"{len(uses)} blocks are in tables, the ledger says {ledger.live}"
        assert ledger.total == self.pool.num_blocks and ledger.logical == sum(uses.values())
        assert min(ledger) >= 0, ledger
