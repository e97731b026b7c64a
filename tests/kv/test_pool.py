import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.kv.pool import BlockPool


def test_gives_the_lowest_untouched_blocks_first_and_reuses_the_last_freed() -> None:
    pool = BlockPool(8)
    first, second = pool.take(2), pool.take(3)
    assert (first, second) == ([0, 1], [2, 3, 4])
    assert pool.give_back(second or []) == 3
    assert pool.take(2) == [2, 3]  # block 5 stays untouched
    assert pool.take(3) == [4, 5, 6]


def test_exhaustion_is_a_value_and_changes_nothing() -> None:
    pool = BlockPool(3)
    assert pool.take(2) == [0, 1]
    assert pool.take(2) is None
    assert pool.num_free == 1
    assert pool.take(1) == [2] and pool.take(0) == []


def test_a_shared_block_is_free_only_when_its_last_table_is_gone() -> None:
    pool = BlockPool(2)
    table = pool.take(2) or []
    pool.share(table[:1])
    pool.check([table, table[:1]])
    assert pool.give_back(table) == 1
    assert pool.give_back(table[:1]) == 1
    assert pool.num_free == 2


def test_giving_back_twice_and_sharing_a_free_block_are_refused() -> None:
    pool = BlockPool(2)
    table = pool.take(1) or []
    pool.give_back(table)
    with pytest.raises(AssertionError, match="once too often"):
        pool.give_back(table)
    with pytest.raises(AssertionError, match="is free"):
        pool.share(table)


def test_a_kept_block_is_cached_and_may_be_shared_again_until_it_is_evicted() -> None:
    gone: list[int] = []
    pool = BlockPool(4, gone.append)
    table = pool.take(3) or []
    for block in table[:2]:
        pool.keep(block)
    assert pool.give_back(table) == 3
    pool.check([])
    assert (pool.num_free, pool.num_cached, pool.num_available, pool.eviction_order()) == (2, 2, 4, [1, 0])
    assert pool.num_idle([0, 1]) == 2
    pool.share([1])
    pool.check([[1]])
    assert pool.num_idle([0, 1]) == 1 and pool.num_available == 3
    assert pool.take(4) is None and not gone
    assert sorted(pool.take(3) or []) == [0, 2, 3] and gone == [0]
    pool.check([[1], [0, 2, 3]])
    pool.give_back([1])
    assert pool.eviction_order() == [1]
    pool.drop(1)
    pool.check([[0, 2, 3]])
    assert (pool.num_cached, pool.num_free) == (0, 1)
    pool.drop(0)  # live: given back as any other
    pool.give_back([0])
    assert pool.num_free == 2


def test_a_touched_block_goes_last() -> None:
    pool = BlockPool(3)
    table = pool.take(3) or []
    for block in table:
        pool.keep(block)
    pool.give_back(table)
    pool.touch(2)
    assert pool.eviction_order() == [1, 0, 2]
    pool.take(1)
    pool.touch(1)  # live: nothing to do
    pool.check([[1]])


def test_what_is_in_several_tables_is_counted_once() -> None:
    pool = BlockPool(3)
    table = pool.take(2) or []
    for shared in (table, table[:1]):
        pool.share(shared)
    assert pool.num_shared == 2
    pool.give_back(table)
    assert pool.num_shared == 1
    pool.give_back(table[:1])
    assert pool.num_shared == 0
    pool.check([table])


def test_check_notices_each_kind_of_damage() -> None:
    pool = BlockPool(4)
    table = pool.take(2) or []
    pool.check([table])
    for tables in ([], [table, table], [[0, 0, 1]], [[0, 2]]):
        with pytest.raises(AssertionError):
            pool.check(tables)
    pool.num_shared = 1
    with pytest.raises(AssertionError, match="0 blocks are in several tables, the count is 1"):
        pool.check([table])
    pool.num_shared = 0
    pool._kept[3] = 1
    with pytest.raises(AssertionError, match="block 3 is to be kept"):
        pool.check([table])
    pool._kept[3] = 0
    pool._free.append(3)
    with pytest.raises(AssertionError, match="twice in the free list"):
        pool.check([table])
    pool._free[-1] = 0
    with pytest.raises(AssertionError):
        pool.check([table])


def test_an_empty_pool_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="at least 1, not 0") as error:
        BlockPool(0)
    assert error.value.param == "num_kv_blocks"


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_any_sequence_of_takes_and_returns_loses_nothing(total: int, actions: list[tuple[bool, int]]) -> None:
    pool, tables, highest = BlockPool(total), [], 0
    for take, number in actions:
        if take:
            table = pool.take(number)
            assert (table is None) == (number > total - sum(map(len, tables)))
            tables += [table] if table else []
        elif tables:
            table = tables.pop(number % len(tables))
            assert pool.give_back(table) == len(table)
        highest = max(highest, sum(map(len, tables)))
        pool.check(tables)
        assert all(block < highest for table in tables for block in table), "an untouched block was given before a used one"
