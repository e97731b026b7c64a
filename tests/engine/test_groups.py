import random

from octavo.engine.groups import MASK, child_id, child_seed, engine_seed, mix


def test_mix_is_the_published_function() -> None:
    """First outputs of SplitMix64 from state 0 and 1234567, as its reference implementation prints them."""
    golden = 0x9E3779B97F4A7C15
    assert mix(golden) == 0xE220A8397B1DCDAF and mix(2 * golden) == 0x6E789E6AA1B965F4
    assert mix(1234567 + golden) == 6457827717110365317


def test_children_differ_and_are_reproducible() -> None:
    for seed in (0, 1, 2**63, MASK):
        seeds = [child_seed(seed, i) for i in range(5000)]
        assert len(set(seeds)) == 5000 and seeds[0] == seed and all(0 <= s <= MASK for s in seeds)
        assert seeds == [child_seed(seed, i) for i in range(5000)]


def test_neighbouring_seeds_share_no_children() -> None:
    assert len({child_seed(seed, i) for seed in range(300) for i in range(300)}) == 300 * 300


def test_bits_are_balanced() -> None:
    rng = random.Random(1)
    flips = [bin(child_seed(s, i) ^ child_seed(s, i + 1)).count("1") for s, i in ((rng.getrandbits(64), rng.randint(1, 99)) for _ in range(500))]
    assert 31 < sum(flips) / len(flips) < 33


def test_engine_seeds() -> None:
    assert len({engine_seed(seed, n) for seed in range(-20, 20) for n in range(500)}) == 40 * 500
    assert engine_seed(-1, 3) == engine_seed(MASK, 3)


def test_ids() -> None:
    assert child_id("7", 0, 1) == "7" and child_id("7", 1, 2) == "7/1"
