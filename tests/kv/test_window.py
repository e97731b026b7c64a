"""Blocks behind a sliding window are given up, and what the cache must still have is what the window shows: against brute force."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kv.test_manager import filled, found

from octavo.config import NO_BLOCK
from octavo.kv.manager import NO_MATCH, KvManager, Match

SIZE = 4


def seen(start: int, window: int) -> range:
    """Positions before ``start`` that a row there sees."""
    return range(max(0, start - window + 1), start)


@given(window=st.integers(1, 30), start=st.integers(0, 60), tokens=st.integers(1, 60), caching=st.booleans())
def test_what_slides_away_is_exactly_what_no_later_row_sees(window: int, start: int, tokens: int, caching: bool) -> None:
    start = min(start, tokens)
    kv = KvManager(20, SIZE, prefix_caching=caching, window=window)
    filled(kv, "a", list(range(tokens)))
    before = kv.table("a")
    first = min(seen(start, window), default=start)
    unseen = [number for number in range(len(before)) if SIZE * number + SIZE - 1 < first]
    assert kv.slide("a", start) == len(unseen)
    kv.check()
    after = kv.table("a")
    assert [number for number, block in enumerate(after) if block == NO_BLOCK] == unseen
    assert [block for block in after if block != NO_BLOCK] == before[len(unseen) :]
    ledger = kv.ledger()
    assert ledger.live == ledger.logical == len(before) - len(unseen) and ledger.cached == (len(unseen) if caching else 0)
    assert ledger.reserved_slots == len(before) * SIZE - tokens, "only the last blocks have room"
    assert kv.slide("a", start) == kv.slide("a", 0) == 0
    kv.release("a")
    kv.check()
    assert kv.ledger().live == 0 and kv.ledger().cached == (tokens // SIZE if caching else 0)


def test_without_a_window_nothing_slides() -> None:
    kv = KvManager(8, SIZE, prefix_caching=True)
    filled(kv, "a", list(range(20)))
    assert kv.slide("a", 20) == 0 and NO_BLOCK not in kv.table("a") and kv.reaches("a", 1)


@settings(max_examples=300)
@given(window=st.integers(1, 25), there=st.lists(st.booleans(), min_size=10, max_size=10), length=st.integers(1, 41))
def test_a_match_needs_what_its_window_shows_and_no_more(window: int, there: list[bool], length: int) -> None:
    kv, tokens = KvManager(20, SIZE, prefix_caching=True, window=window), list(range(41))
    filled(kv, "a", tokens)
    blocks = kv.table("a")
    kv.release("a")
    for number, stays in enumerate(there):
        if not stays:
            kv.forget([kv._index.key_of(blocks[number])])  # type: ignore[union-attr]
    kv.check()
    best = max(n for n in range((length - 1) // SIZE + 1) if n == 0 or (there[n - 1] and all(there[at // SIZE] for at in seen(n * SIZE, window))))
    match = found(kv, tokens[:length])
    assert match.num_tokens == best * SIZE and match.tail is None
    shown = {at // SIZE for at in seen(best * SIZE, window)}
    assert match.blocks == [blocks[number] if number in shown else NO_BLOCK for number in range(best)], "a window of 1 shows none"
    live = kv.ledger().free
    table = kv.admit("b", match, length, keys=kv.root("", ""))
    assert table is not None and table[:best] == match.blocks and NO_BLOCK not in table[best:]
    kv.check()
    assert kv.ledger().free <= live and kv.ledger().live == len(table) - table.count(NO_BLOCK)
    kv.grow("b", length)
    kv.seal("b", tokens, length)
    kv.slide("b", length)
    kv.check()
    kv.release("b")
    kv.check()


def test_a_fork_must_still_be_within_its_parents_window() -> None:
    kv = KvManager(20, SIZE, window=6)
    filled(kv, "a", list(range(24)))
    kv.slide("a", 17)
    assert kv.table("a")[:4] == [NO_BLOCK] * 3 + [3]
    assert kv.reaches("a", 17) and kv.reaches("a", 20) and not kv.reaches("a", 16)
    fork = kv.fork("a", 18)
    assert fork == Match(18, [NO_BLOCK] * 3 + [3], 4)
    table = kv.admit("b", fork, 19)
    assert table is not None and table[:4] == fork.blocks and kv.ledger().shared == 1
    kv.check()
    kv.grow("b", 23)
    kv.slide("b", 22)
    assert kv.table("b")[:5] == [NO_BLOCK] * 4 + [table[4]] and kv.ledger().shared == 0
    kv.check()
    with pytest.raises(AssertionError, match="has given up what a row at 16 sees"):
        kv.fork("a", 16)


def test_a_double_behind_the_window_leaves_the_key_to_the_first() -> None:
    kv, tokens = KvManager(20, SIZE, prefix_caching=True, window=5), list(range(12))
    for name in "ab":  # both computed it: neither was sealed when the other was admitted
        kv.admit(name, NO_MATCH, 12, keys=kv.root("", ""))
        kv.grow(name, 12)
    kv.seal("a", tokens, 12)
    kv.seal("b", tokens, 12)
    kv.slide("b", 12)
    kv.check()
    assert kv.ledger().cached == 0 and found(kv, [*tokens, 1]).blocks == [NO_BLOCK, NO_BLOCK, 2]
    kv.release("a")
    kv.release("b")
    kv.check()
    assert kv.ledger().cached == 3


def test_what_the_window_left_is_kept_and_adopted_without_its_beginning() -> None:
    kv, tokens = KvManager(20, SIZE, prefix_caching=True, window=5), list(range(41))
    filled(kv, "a", tokens)
    kv.slide("a", 41)
    kv.release("a")
    hot = [key for key, _ in kv.hot(3)]
    later = KvManager(20, SIZE, prefix_caching=True, window=5)
    later.adopt(hot)
    later.check()
    assert found(later, tokens).num_tokens > 0 and len(hot) == 3
