from collections.abc import Sequence

import pytest

from octavo.errors import ConfigError, UnsupportedError
from octavo.kv.manager import NO_MATCH, KvManager, Ledger, Match
from octavo.kv.prefix import NoPrefixIndex, make_prefix_index


class FixedIndex:
    """Says of every sequence that these blocks hold its beginning."""

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks

    def find(self, tokens: Sequence[int]) -> list[int]:
        return self.blocks


def test_asking_for_prefix_caching_is_unsupported() -> None:
    with pytest.raises(UnsupportedError) as error:
        make_prefix_index(True)
    assert error.value.param == "enable_prefix_caching"
    assert isinstance(make_prefix_index(False), NoPrefixIndex)
    assert KvManager(4).match(list(range(64))) == Match(0, [])


@pytest.mark.parametrize(("length", "tokens"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (64, 32)])
def test_match_leaves_at_least_one_token_to_compute(length: int, tokens: int) -> None:
    kv = KvManager(8, 16, FixedIndex([5, 6]))
    match = kv.match(list(range(length)))
    assert match.num_tokens == tokens <= length - 1
    assert match.blocks == [5, 6][: tokens // 16]


def test_admission_shares_matched_blocks_and_release_keeps_them_for_the_other() -> None:
    index = FixedIndex([])
    kv = KvManager(6, 4, index)
    assert kv.admit("a", kv.match([1] * 10), 10) == [0, 1, 2]
    index.blocks = [0, 1]
    match = kv.match([1] * 10)
    assert kv.admit("b", match, 10) == [0, 1, 3]
    kv.check()
    assert kv.ledger() == Ledger(live=4, cached=0, free=2, reserved_slots=12 + 4)
    assert kv.release("a") == 1
    kv.check()
    assert kv.release("b") == 3
    kv.check()
    assert kv.ledger() == Ledger(0, 0, 6, 0)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_tables_cover_exactly_the_blocks_that_the_tokens_take(length: int) -> None:
    kv = KvManager(8)
    blocks = {15: 1, 16: 1, 17: 2, 31: 2, 32: 2, 33: 3}[length]
    assert kv.admit("a", NO_MATCH, length) == list(range(blocks))
    assert kv.grow("a", length) == []
    assert kv.ledger().reserved_slots == blocks * 16 - length
    assert kv.grow("a", blocks * 16) == []
    assert kv.grow("a", blocks * 16 + 1) == [blocks]
    assert kv.grow("a", blocks * 16 + 1, reserve=blocks * 16 + 20) == [blocks + 1]
    assert kv.table("a") == list(range(blocks + 2)) and kv.table("b") == []
    kv.check()


def test_exhaustion_is_a_value_and_changes_nothing() -> None:
    kv = KvManager(4, 4)
    assert kv.admit("a", NO_MATCH, 8) == [0, 1]
    before = kv.ledger()
    assert kv.admit("b", NO_MATCH, 12) is None  # 3 blocks, 2 free
    assert kv.admit("b", NO_MATCH, 8, room=9) is None  # the room is asked for ...
    assert kv.grow("a", 17) is None
    assert kv.ledger() == before and kv.holders() == {"a"}
    assert kv.admit("b", NO_MATCH, 4, room=8) == [2]  # ... and not reserved
    kv.check()


def test_a_returned_table_is_a_copy() -> None:
    kv = KvManager(4, 4)
    table = kv.admit("a", NO_MATCH, 4)
    assert table == [0]
    table.append(3)
    kv.table("a").append(2)
    kv.check()


def test_misuse_is_refused() -> None:
    kv = KvManager(4, 4)
    kv.admit("a", NO_MATCH, 4)
    with pytest.raises(AssertionError, match="has a table already"):
        kv.admit("a", NO_MATCH, 4)
    kv.release("a")
    for call in (lambda: kv.release("a"), lambda: kv.grow("a", 4)):
        with pytest.raises(KeyError):
            call()
    with pytest.raises(ConfigError, match="block_size must be at least 1, not 0"):
        KvManager(4, 0)


def test_check_notices_each_kind_of_damage() -> None:
    def damaged() -> KvManager:
        kv = KvManager(4, 4)
        kv.admit("a", NO_MATCH, 8)
        kv.check()
        return kv

    kv = damaged()
    kv._tables["a"].pop()
    with pytest.raises(AssertionError, match="1 references and is in 0 tables"):
        kv.check()
    kv = damaged()
    kv._used["a"] = 9
    with pytest.raises(AssertionError, match="uses more"):
        kv.check()
    kv = damaged()
    del kv._used["a"]
    with pytest.raises(AssertionError, match="without a count"):
        kv.check()
    kv = damaged()
    kv._tables["b"] = [1]
    kv._used["b"] = 0
    with pytest.raises(AssertionError):
        kv.check()
