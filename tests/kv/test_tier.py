"""SwapTier against a model that remembers who holds what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.kv.tier import SwapTier


def test_a_tier_has_room_for_a_block() -> None:
    with pytest.raises(ConfigError, match="at least 1 block, not 0") as caught:
        SwapTier(0)
    assert caught.value.param == "kv_swap_bytes"


def test_what_does_not_fit_takes_nothing() -> None:
    tier = SwapTier(3)
    assert tier.put("a", 5, [None, None], 1) == [0, 1]
    assert tier.put("b", 8, [None, None], 1) is None and tier.num_used == 2 and tier.get("b") is None
    assert tier.put("b", 6, [0, None], 1) == [0, 2] and (tier.num_used, tier.num_requests) == (3, 2)
    tier.check(4)
    assert tier.drop("a") and not tier.drop("a") and tier.num_used == 2  # b still holds what they shared
    assert tier.put("c", 4, [None], 2) == [1]
    tier.check(4)


@pytest.mark.parametrize("wrong", ["lost", "doubled", "counted"])
def test_check_finds_what_is_wrong(wrong: str) -> None:
    tier = SwapTier(3)
    tier.put("a", 5, [None, None], 1)
    if wrong == "lost":
        tier._free.pop()
    elif wrong == "doubled":
        tier._free.append(0)
    else:
        tier._refs[0] += 1
    with pytest.raises(AssertionError):
        tier.check(4)


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12), st.booleans()), max_size=40))
def test_slots_are_free_or_held(slots: int, actions: list[tuple[int, int, bool]]) -> None:
    tier, held = SwapTier(slots), {}
    for place, (name, tokens, shares) in enumerate(actions):
        who = f"r{name}"
        if who in held:
            assert tier.drop(who)
            del held[who]
        else:
            need = -(-tokens // 4)
            others = sorted({slot for its in held.values() for slot in its})[: need - 1] if shares else []
            wanted = [*others, *[None] * (need - len(others))]
            used = {slot for its in held.values() for slot in its}
            given = tier.put(who, tokens, wanted, place)
            assert (given is None) == (need - len(others) > slots - len(used))
            if given is not None:
                assert given[: len(others)] == others and used.isdisjoint(given[len(others) :]) and len(set(given)) == need
                assert tier.get(who) == (tokens, given, place)
                held[who] = given
        tier.check(4)
        assert tier.num_used == len({slot for its in held.values() for slot in its}) and set(tier.requests()) == set(held)
