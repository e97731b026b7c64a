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


def test_check_notices_each_kind_of_damage() -> None:
    pool = BlockPool(4)
    table = pool.take(2) or []
    pool.check([table])
    for tables in ([], [table, table], [[0, 0, 1]], [[0, 2]]):
        with pytest.raises(AssertionError):
            pool.check(tables)
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
