"""What is hot can be kept and adopted: parents before their children, the most recently used first."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kv.test_manager import filled, found

from octavo.kv.manager import KvManager
from octavo.kv.prefix import block_key, root_key

SIZE = 4


def text(kind: int, length: int) -> list[int]:
    """Texts of which any two share a beginning: the bits of ``kind`` say where they part."""
    tokens: list[int] = []
    for place in range(length):
        if place % 6 == 0:
            prefix = kind & ((1 << place // 6 + 1) - 1)
        tokens.append(1000 * prefix + place)
    return tokens


def parents(length: int, kinds: int) -> dict[bytes, bytes]:
    """Key → parent's key of every block of every text."""
    found = {}
    for kind in range(kinds):
        key, tokens = root_key("", ""), text(kind, length)
        for start in range(0, length - SIZE + 1, SIZE):
            parent, key = key, block_key(key, tokens[start : start + SIZE])
            found[key] = parent
    return found


PARENTS, ROOT = parents(40, 16), root_key("", "")


def check_order(keys: list[bytes]) -> None:
    seen = {ROOT}
    for key in keys:
        assert PARENTS[key] in seen, "a key comes before its parent, or without it"
        seen.add(key)


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 15), st.integers(1, 40), st.integers(0, 3)), max_size=40), blocks=st.integers(4, 24),
    room=st.integers(1, 30),
)
def test_a_kept_cache_is_closed_under_parents_and_finds_the_same(steps: list[tuple[int, int, int]], blocks: int, room: int) -> None:
    kv = KvManager(blocks, SIZE, prefix_caching=True)
    running: list[str] = []
    for number, (kind, length, wait) in enumerate(steps):
        tokens, keys = text(kind, length), kv.root("", "")
        while kv.admit(f"{number}", kv.match(tokens, keys), length, keys=keys) is None:
            if not running:
                break
            kv.release(running.pop(0))
        else:
            kv.grow(f"{number}", length)
            kv.seal(f"{number}", tokens, length)
            running.append(f"{number}")
        while len(running) > wait:
            kv.release(running.pop(number % len(running)))
        check_order([key for key, _ in kv.hot(99)])
        assert len(kv.hot(99)) == len(kv._index.all_keys())  # type: ignore[union-attr]
        assert kv.hot(number % 5) == kv.hot(99)[: number % 5]
    hot = [key for key, _ in kv.hot(99)]
    before = [found(kv, text(kind, 40)).num_tokens for kind in range(16)]  # a table given up may yet give its own blocks a key
    later = KvManager(room, SIZE, prefix_caching=True)
    adopted = later.adopt(hot)
    later.check()
    assert len(adopted) == min(room, len(hot)) == later.ledger().cached
    assert [key for key, _ in later.hot(99)] == hot[:room], "the order is kept, too"
    for kind in range(16):
        old, new = before[kind], found(later, text(kind, 40))
        assert new.num_tokens <= old and (new.num_tokens == old or room < len(hot))
        assert new.blocks == [adopted[hot.index(key)] for key, _ in zip(_keys(kind), new.blocks)]


def _keys(kind: int) -> list[bytes]:
    found, key, tokens = [], ROOT, text(kind, 40)
    for start in range(0, 40, SIZE):
        key = block_key(key, tokens[start : start + SIZE])
        found.append(key)
    return found


def test_the_last_used_chain_comes_first_and_is_evicted_last() -> None:
    kv = KvManager(12, SIZE, prefix_caching=True)
    for name, kind in (("a", 0), ("b", 1), ("a again", 0)):
        filled(kv, name, text(kind, 13))
        kv.release(name)
    assert [key for key, _ in kv.hot(99)] == _keys(0)[:3] + _keys(1)[:3]
    later = KvManager(6, SIZE, prefix_caching=True)
    assert later.adopt([key for key, _ in kv.hot(99)]) == [0, 1, 2, 3, 4, 5]
    filled(later, "c", [5] * 5)
    assert found(later, text(0, 13)).num_tokens == 12 and found(later, text(1, 13)).num_tokens == 4


def test_without_a_cache_nothing_is_hot() -> None:
    assert KvManager(4, 4).hot(9) == []
