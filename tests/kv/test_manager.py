import pytest

from octavo.errors import ConfigError
from octavo.kv.manager import NO_MATCH, KvManager, Ledger, Match


def filled(kv: KvManager, name: str, tokens: list[int], salt: str = "", adapter: str = "") -> list[bytes] | None:
    """Admit and compute a request as the scheduler does."""
    keys = kv.root(salt, adapter)
    assert kv.admit(name, kv.match(tokens, keys), len(tokens), keys=keys) is not None
    kv.grow(name, len(tokens))
    kv.seal(name, tokens, len(tokens))
    kv.check()
    return keys


def found(kv: KvManager, tokens: list[int], salt: str = "", adapter: str = "") -> Match:
    return kv.match(tokens, kv.root(salt, adapter))


def test_without_caching_nothing_is_found_or_kept() -> None:
    kv = KvManager(4, 4)
    assert filled(kv, "a", list(range(10))) is None and found(kv, list(range(10))) == NO_MATCH
    kv.release("a")
    assert kv.ledger() == Ledger(0, 0, 0, 4, 0, 0, 0) and kv.reset_cache() == 0


@pytest.mark.parametrize(("length", "tokens"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32), (64, 32)])
def test_match_leaves_at_least_one_token_to_compute(length: int, tokens: int) -> None:
    kv = KvManager(8, 16, prefix_caching=True)
    filled(kv, "a", list(range(33)))
    match = found(kv, list(range(length)))
    assert match.num_tokens == tokens <= length - 1 and match.blocks == [0, 1][: tokens // 16]


def test_only_full_blocks_of_the_same_beginning_salt_and_adapter_are_found() -> None:
    kv = KvManager(8, 4, prefix_caching=True)
    filled(kv, "a", list(range(11)), salt="s", adapter="x")
    assert found(kv, list(range(20)), "s", "x") == Match(8, [0, 1])
    assert found(kv, [0, 1, 2, 3, 9, 9, 9, 9, 9], "s", "x") == Match(4, [0])
    assert found(kv, list(range(4, 12)), "s", "x") == NO_MATCH  # the same block elsewhere is another one
    for salt, adapter in (("", ""), ("s", ""), ("", "x"), ("x", "s"), ("sx", ""), ("", "sx"), ("\ud800", "x")):
        assert found(kv, list(range(20)), salt, adapter) == NO_MATCH


def test_blocks_are_found_as_they_fill_and_after_their_request_is_gone() -> None:
    kv, tokens = KvManager(8, 4, prefix_caching=True), list(range(12))
    keys = kv.root("", "")
    kv.admit("a", NO_MATCH, 12, keys=keys)
    for computed, blocks in ((3, []), (4, [0]), (7, [0]), (11, [0, 1])):
        kv.grow("a", computed)
        kv.seal("a", tokens, computed)
        assert found(kv, [*tokens, 7]).blocks == blocks
    kv.grow("a", 14)
    kv.seal("a", [*tokens, 50, 51], 14)
    assert kv.release("a") == 4
    kv.check()
    assert kv.ledger() == Ledger(live=0, shared=0, cached=3, free=5, logical=0, live_slots=0, reserved_slots=0)
    assert found(kv, [*tokens, 50]).blocks == [0, 1, 2]


def test_admission_shares_matched_blocks_and_release_keeps_them_for_the_other() -> None:
    kv = KvManager(6, 4, prefix_caching=True)
    filled(kv, "a", list(range(10)))
    filled(kv, "b", [*range(8), 90, 91, 92])
    assert (kv.table("a"), kv.table("b")) == ([0, 1, 2], [0, 1, 3])
    assert kv.ledger() == Ledger(live=4, shared=2, cached=0, free=2, logical=6, live_slots=16, reserved_slots=2 + 1)
    assert kv.ledger().utilization == 13 / 16
    assert kv.release("a") == 1
    kv.check()
    assert kv.release("b") == 3
    kv.check()
    assert kv.ledger() == Ledger(0, 0, 2, 4, 0, 0, 0) and kv.ledger().utilization == 1


def test_cached_blocks_are_there_for_the_asking_but_for_those_just_matched() -> None:
    kv = KvManager(6, 4, prefix_caching=True)
    filled(kv, "a", list(range(16)))
    kv.release("a")
    assert (kv.ledger().cached, kv.ledger().free) == (4, 2)
    keys = kv.root("", "")
    long = [*range(8), *[99] * 17]  # 7 blocks, 2 of them matched: 5 needed, of 4
    match = kv.match(long, keys)
    assert match.blocks == [0, 1] and kv.admit("b", match, 25, keys=keys) is None
    assert (kv.ledger().cached, kv.ledger().free) == (4, 2)
    kv.check()
    table = kv.admit("b", match, 24, keys=keys)
    assert table is not None and table[:2] == [0, 1] and sorted(table) == list(range(6))
    kv.check()
    assert found(kv, list(range(17))).blocks == [0, 1]  # what came after them was evicted


def test_the_least_recently_used_goes_first_and_no_beginning_before_its_end() -> None:
    kv = KvManager(9, 2, prefix_caching=True)
    for name, tokens in (("a", [0, 0, 1, 1, 2, 2]), ("b", [0, 0, 5, 5]), ("c", [7, 7, 8, 8])):
        filled(kv, name, tokens)
        kv.release(name)
    assert kv.pool.eviction_order() == [2, 1, 3, 0, 5, 4]
    filled(kv, "d", [0, 0, 1, 1, 2])  # uses the first of a's again
    kv.release("d")
    texts = {"0": [0, 0], "01": [0, 0, 1, 1], "012": [0, 0, 1, 1, 2, 2], "05": [0, 0, 5, 5], "7": [7, 7], "78": [7, 7, 8, 8]}
    gone = []
    for count in range(4, 10):  # the 3 free blocks, then the cached ones, one by one
        kv.admit("x", NO_MATCH, 2 * count)
        kv.check()
        gone += [name for name, text in texts.items() if name not in gone and len(found(kv, [*text, 3]).blocks) < len(text) // 2]
        kv.release("x")
    assert gone == ["012", "05", "78", "7", "01", "0"]


def test_of_two_blocks_with_one_content_the_first_keeps_the_key() -> None:
    kv, tokens = KvManager(8, 4, prefix_caching=True), list(range(8))
    for name in "ab":  # both were admitted before either was computed
        kv.admit(name, NO_MATCH, 8, keys=kv.root("", ""))
    for name in "ab":
        kv.grow(name, 8)
        kv.seal(name, tokens, 8)
        kv.check()
    assert found(kv, [*tokens, 1]).blocks == [0, 1]
    kv.release("b")
    assert (kv.ledger().cached, kv.ledger().free) == (0, 6)
    kv.release("a")
    assert (kv.ledger().cached, kv.ledger().free) == (2, 6)
    kv.check()


def test_a_double_takes_the_key_over_when_the_first_was_evicted() -> None:
    kv, tokens = KvManager(4, 4, prefix_caching=True), list(range(8))
    kv.admit("a", NO_MATCH, 4, keys=kv.root("", ""))
    kv.admit("b", NO_MATCH, 8, keys=kv.root("", ""))
    for name, count in (("a", 4), ("b", 8)):
        kv.grow(name, count)
        kv.seal(name, tokens, count)
    kv.release("a")
    kv.admit("c", NO_MATCH, 8)  # evicts a's
    assert found(kv, [*tokens, 1]) == NO_MATCH
    kv.release("b")
    kv.check()
    assert found(kv, [*tokens, 1]).blocks == [1, 2]


def test_a_broken_promise_is_taken_back() -> None:
    kv, tokens = KvManager(8, 4, prefix_caching=True), list(range(12))
    keys = kv.root("", "")
    kv.admit("a", NO_MATCH, 12, keys=keys)
    kv.grow("a", 4)
    kv.seal("a", tokens, 4)
    kv.grow("a", 12)
    new = kv.seal("a", tokens, 12)
    assert len(new) == 2
    filled(kv, "b", [*tokens, 1])
    assert kv.forget(new) == {1, 2} and kv.forget(new) == set()
    assert found(kv, [*tokens, 1]).blocks == [0]
    kv.check()
    kv.release("a")  # must not be found again by the way
    kv.release("b")
    kv.check()
    assert found(kv, [*tokens, 1]).num_tokens <= 4


def test_reset_forgets_everything_and_takes_nothing_from_anybody() -> None:
    kv, tokens = KvManager(8, 4, prefix_caching=True), list(range(12))
    filled(kv, "gone", [9] * 8)
    kv.release("gone")
    filled(kv, "a", tokens)
    assert kv.reset_cache() == 2
    kv.check()
    assert kv.table("a") and found(kv, [*tokens, 1]) == NO_MATCH == found(kv, [9] * 9)
    kv.release("a")
    kv.check()
    assert kv.ledger().free == 8


def test_what_was_computed_before_a_reset_is_not_found_after_it_even_if_its_block_was_not_full() -> None:
    kv, tokens = KvManager(8, 4, prefix_caching=True), list(range(12))
    filled(kv, "a", tokens[:3])
    kv.reset_cache()
    kv.grow("a", 12)
    assert kv.seal("a", tokens, 12) == []
    kv.release("a")
    kv.check()
    assert found(kv, [*tokens, 1]) == NO_MATCH and kv.ledger().free == 8


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(("tokens", "shared", "copied"), [(1, 0, 1), (3, 0, 1), (4, 1, 0), (5, 1, 1), (8, 2, 0), (10, 2, 1)])
def test_a_fork_shares_full_blocks_and_names_the_one_to_be_copied(caching: bool, tokens: int, shared: int, copied: int) -> None:
    kv, text = KvManager(9, 4, prefix_caching=caching), list(range(20))
    filled(kv, "a", text[:10])
    before = kv.table("a")
    fork = kv.fork("a", tokens)
    assert fork == Match(tokens, before[:shared], before[shared] if copied else None)
    own = [*text[:tokens], *[90] * 20]
    table = kv.admit("b", fork, tokens + 1, keys=kv.root("", ""))
    assert table is not None and table[:shared] == before[:shared] and set(table[shared:]).isdisjoint(before)
    kv.check()
    assert (kv.ledger().shared, kv.ledger().logical) == (shared, 3 + shared + 1)
    assert kv.grow("b", 20) is not None
    kv.seal("b", own, 20)
    kv.check()
    if caching:
        assert found(kv, text[:10]).num_tokens == 8 and found(kv, own).num_tokens == 20
    kv.release("a")  # the parent may go first
    kv.check()
    kv.release("b")
    kv.check()
    assert kv.ledger().live == 0


def test_a_fork_is_of_what_is_computed() -> None:
    kv = KvManager(3, 4)
    filled(kv, "a", list(range(10)))
    with pytest.raises(AssertionError, match="a fork of 11 tokens of a, which has 10"):
        kv.fork("a", 11)
    assert kv.admit("b", kv.fork("a", 9), 10) is None and kv.holders() == {"a"}  # no block for the copy
    kv.check()


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
    def damaged(caching: bool = False) -> KvManager:
        kv = KvManager(4, 4, prefix_caching=caching)
        filled(kv, "a", list(range(8)))
        return kv

    kv = damaged()
    kv._tables["a"].blocks.pop()
    with pytest.raises(AssertionError, match="1 references and is in 0 tables"):
        kv.check()
    kv = damaged()
    kv._tables["a"].used = 9
    with pytest.raises(AssertionError, match="uses more"):
        kv.check()
    kv = damaged()
    kv._tables["b"] = kv._tables["a"]
    with pytest.raises(AssertionError, match="1 references and is in 2 tables"):
        kv.check()
    kv = damaged(True)
    kv._tables["a"].used = 7
    with pytest.raises(AssertionError, match="has sealed what it has not computed"):
        kv.check()
    kv = damaged(True)
    kv.pool.drop(1)
    with pytest.raises(AssertionError, match=r"keeps the blocks \[0\], the index has keys of \[0, 1\]"):
        kv.check()
    kv = damaged(True)
    kv._index._blocks[b"another"] = 1  # type: ignore[union-attr]
    with pytest.raises(AssertionError, match="a block two keys"):
        kv.check()
    kv = damaged()
    kv.admit("b", NO_MATCH, 4)
    kv.pool.share([1])
    kv._tables["b"].blocks.append(1)
    kv._tables["a"].used = 7
    with pytest.raises(AssertionError, match="shares a block that is not full"):
        kv.check()


@pytest.mark.parametrize("sound", [True, False])
def test_the_double_of_an_evicted_block_is_found_only_if_it_is_sound(sound: bool) -> None:
    kv = KvManager(4, 2, prefix_caching=True)
    tokens = [1, 2, 3]
    for name in ("a", "b"):
        keys = kv.root("", "")
        assert kv.admit(name, NO_MATCH, 3, None, keys)
        kv.grow(name, 3)
        kv.seal(name, tokens, 3)
        if name == "a":
            kv.release("a")
    assert kv.admit("c", NO_MATCH, 4) and kv.match(tokens, kv.root("", "")) == NO_MATCH  # what a left was evicted
    kv.release("b", sound)
    kv.check()
    assert kv.match(tokens, kv.root("", "")).num_tokens == (2 if sound else 0)
