"""KvManager: which blocks hold the K and V of which request. It is the only writer of block tables.

    tokens   0 ........ cached ........ used ........ capacity of the table
             | matched   | computed or   | reserved:    |
             | blocks    | in this step  | not yet used |

A request's table covers its whole known context from admission on, so a prefill never asks for more in the middle.
Exhaustion is a value (None), never an exception: what to do about it is the scheduler's decision.
"""

from collections.abc import Sequence
from typing import NamedTuple

from octavo.config import BLOCK_SIZE
from octavo.errors import ConfigError
from octavo.kv.pool import BlockPool
from octavo.kv.prefix import NoPrefixIndex, PrefixIndex


class Match(NamedTuple):
    """The part of a sequence that needs no computing: ``num_tokens`` leading tokens, held by ``blocks`` (full ones)."""

    num_tokens: int
    blocks: list[int]


NO_MATCH = Match(0, [])


class Ledger(NamedTuple):
    """Where the pool's blocks are, and how many token slots of the live tables are not used yet."""

    live: int
    cached: int
    free: int
    reserved_slots: int

    @property
    def total(self) -> int:
        """Blocks of the pool."""
        return self.live + self.cached + self.free


class KvManager:
    """Block tables over a pool of ``num_blocks`` blocks of ``block_size`` tokens."""

    def __init__(self, num_blocks: int, block_size: int = BLOCK_SIZE, index: PrefixIndex | None = None) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size must be at least 1, not {block_size}", "block_size")
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._index = index or NoPrefixIndex()
        self._tables: dict[str, list[int]] = {}
        self._used: dict[str, int] = {}  # leading token slots that are, or are about to be, filled

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return self.pool.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_size)

    def match(self, tokens: Sequence[int]) -> Match:
        """The leading tokens that are in the cache: full blocks, at most ``len(tokens) - 1`` tokens.

        The last token is always computed: its row is the one that is sampled.
        """
        blocks = self._index.find(tokens)[: (len(tokens) - 1) // self.block_size]
        return Match(len(blocks) * self.block_size, blocks) if blocks else NO_MATCH

    def admit(self, request_id: str, match: Match, num_tokens: int, room: int | None = None) -> list[int] | None:
        """Give a request a table for ``num_tokens`` tokens that begins with the matched blocks. Returns the table.

        None, and nothing taken, unless the blocks for ``room`` (at least ``num_tokens``) tokens are there: what is
        between the two is asked for but not reserved.
        """
        assert request_id not in self._tables, f"{request_id} has a table already"
        shared = len(match.blocks)
        room = num_tokens if room is None else room
        assert num_tokens <= room and match.num_tokens < num_tokens, (match.num_tokens, num_tokens, room)
        if self.blocks_for(room) - shared > self.pool.num_free:
            return None
        taken = self.pool.take(self.blocks_for(num_tokens) - shared)
        assert taken is not None  # room was there
        self.pool.share(match.blocks)
        table = [*match.blocks, *taken]
        self._tables[request_id] = table
        self._used[request_id] = match.num_tokens
        return list(table)

    def grow(self, request_id: str, used: int, reserve: int = 0) -> list[int] | None:
        """Make the table cover ``used`` tokens, and ``reserve`` if that is more. Returns the new blocks, mostly none.

        None, and nothing changed, when the pool has too few.
        """
        table = self._tables[request_id]
        need = used if used > reserve else reserve
        if need > len(table) * self.block_size:
            taken = self.pool.take(self.blocks_for(need) - len(table))
            if taken is None:
                return None
            table.extend(taken)
            self._used[request_id] = used
            return taken
        self._used[request_id] = used
        return []

    def release(self, request_id: str) -> int:
        """Give up a request's table. Returns how many blocks became free."""
        del self._used[request_id]
        return self.pool.give_back(self._tables.pop(request_id))

    def table(self, request_id: str) -> list[int]:
        """A copy of a request's table; empty when it has none."""
        return list(self._tables.get(request_id, ()))

    def holders(self) -> set[str]:
        """The requests that have a table."""
        return set(self._tables)

    def ledger(self) -> Ledger:
        """Where the blocks are now. Cost: one pass over the tables."""
        free = self.pool.num_free
        reserved = sum(len(table) * self.block_size - self._used[request_id] for request_id, table in self._tables.items())
        return Ledger(self.pool.num_blocks - free, 0, free, reserved)

    def check(self) -> None:
        """Restate every invariant from nothing: each block is exactly one of free and live (none is merely cached in
        this version), references equal the tables, and what is used lies inside its table.

        Raises: AssertionError, saying what is wrong.
        """
        self.pool.check(self._tables.values())
        assert self._used.keys() == self._tables.keys(), "a request has a table without a count, or a count without a table"
        for request_id, table in self._tables.items():
            assert table, f"{request_id} has an empty table"
            assert 0 <= self._used[request_id] <= len(table) * self.block_size, f"{request_id} uses more than its table"
        ledger = self.ledger()
        live = len({block for table in self._tables.values() for block in table})
        assert ledger.live == live, f"{live} blocks are in tables, the ledger says {ledger.live}"
        assert ledger.live + ledger.cached + ledger.free == self.pool.num_blocks
        assert min(ledger) >= 0, ledger
