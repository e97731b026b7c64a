"""The baselines' accounting: the contiguous allocator against a bitmap, static batching against its rule, both around the real scheduler."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.bench.baselines import ContiguousKv, ContiguousPool, StaticBatching, next_power_of_two
from octavo.config import SchedulerConfig
from octavo.core.request import Request
from octavo.engine.core import EngineCore
from octavo.kv.manager import NO_MATCH
from octavo.scheduler.scheduler import Scheduler
from octavo.simulate.drive import GREEDY, Job, LengthsExecutor, drive
from octavo.simulate.executor import SimExecutor, VirtualClock


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 24), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40))
def test_first_fit_is_that_of_a_bitmap(size: int, actions: list[tuple[bool, int]]) -> None:
    pool, bitmap, held = ContiguousPool(size), "." * size, []
    for taking, number in actions:
        if taking and number:
            place = bitmap.find("." * number)
            taken = pool.take(number)
            assert taken == (None if place < 0 else list(range(place, place + number)))
            if taken:
                held.append(taken)
                bitmap = bitmap[:place] + "#" * number + bitmap[place + number :]
        elif held:
            gone = held.pop(number % len(held))
            assert pool.give_back(gone) == len(gone)
            bitmap = bitmap[: gone[0]] + "." * len(gone) + bitmap[gone[-1] + 1 :]
        pool.check(held)
        assert pool.num_free == bitmap.count(".")
        assert [(first, count) for first, count in pool.holes() if count] == pool.holes()
        assert "".join("." * count for _, count in pool.holes()) == bitmap.replace("#", "")


def test_a_reservation_is_whole_and_in_one_piece() -> None:
    sizes = {"a": 40, "b": 33, "c": 16, "d": 33}
    kv = ContiguousKv(8, sizes.__getitem__)
    assert kv.admit("a", NO_MATCH, 5, 21) == [0, 1, 2] and kv.admit("b", NO_MATCH, 33, 33) == [3, 4, 5] and kv.admit("c", NO_MATCH, 1, 16) == [6]
    assert kv.grow("a", 40) == [] and kv.ledger().reserved_slots == 3 * 16 - 40 + 3 * 16 + 16  # b and c hold nothing yet
    kv.release("a")
    assert kv.admit("d", NO_MATCH, 33) == [0, 1, 2] and (kv.refused, kv.scattered) == (0, 0)
    kv.release("b")
    kv.check()
    assert kv.admit("a", NO_MATCH, 64) is None and (kv.refused, kv.scattered) == (1, 1)  # four free: three and one
    assert kv.holders() == {"c", "d"}
    kv.release("d")
    assert kv.admit("a", NO_MATCH, 97) is None and (kv.refused, kv.scattered) == (2, 2)  # seven blocks are free, six together
    assert kv.admit("a", NO_MATCH, 96) == [0, 1, 2, 3, 4, 5]
    assert kv.admit("b", NO_MATCH, 97) is None and (kv.refused, kv.scattered) == (3, 2)  # one is free
    kv.check()


def test_what_is_asked_for_beyond_the_reservation_is_given_all_the_same() -> None:
    kv = ContiguousKv(8, lambda name: 16)
    assert kv.admit("a", NO_MATCH, 50) == [0, 1, 2, 3]


@pytest.mark.parametrize(("number", "power"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (512, 512), (513, 1024)])
def test_next_power_of_two(number: int, power: int) -> None:
    assert next_power_of_two(number) == power


def make(name: str, job: Job) -> Request:
    return Request(name, list(job.prompt), GREEDY, len(job.prompt) + job.output)


@pytest.mark.parametrize("blocks", [24, 60])
def test_reservations_serve_every_request_of_a_load(blocks: int) -> None:
    """The executor checks that every plan's blocks hold what they should."""
    rng = random.Random(blocks)
    jobs = [Job(0.0, [rng.randrange(9) for _ in range(rng.randint(1, 200))], rng.randint(1, 150)) for _ in range(40)]
    sizes = {f"j{place}": len(job.prompt) + job.output for place, job in enumerate(jobs)}
    kv = ContiguousKv(blocks, sizes.__getitem__)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64), kv)
    clock = VirtualClock()
    core = EngineCore(scheduler, SimExecutor(8, blocks), clock)
    records = drive(core, jobs, make, clock, clock.wait, observe=lambda now, _: scheduler.check())
    assert [len(record.ids) for record in records] == [job.output for job in jobs]
    assert core.counters.preemptions == 0 and kv.pool.num_free == blocks


@pytest.mark.parametrize("size", [1, 3, 8])
def test_static_batches_are_of_those_who_wait_and_nobody_joins_one(size: int) -> None:
    rng = random.Random(size)
    jobs = [Job(0.0, [3] * rng.randint(1, 90), rng.randint(1, 60)) for _ in range(20)]
    static, clock = StaticBatching(size), VirtualClock()
    kv = ContiguousKv(1000, lambda name: 160)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32), kv, admission=[static])
    static.scheduler = scheduler
    executor = LengthsExecutor({f"j{place}": job.output for place, job in enumerate(jobs)}, clock, lambda plan: 1.0)
    records = drive(EngineCore(scheduler, executor, clock), jobs, make, clock, clock.wait)
    batches = [records[first : first + size] for first in range(0, len(records), size)]
    assert static.batches == len(batches)
    for before, after in itertools.pairwise(batches):
        assert min(record.admitted or 0 for record in after) >= max(record.tokens[-1] for record in before)
    assert all(len(record.ids) == record.job.output for record in records)


def test_a_static_batch_takes_only_those_who_had_come() -> None:
    jobs = [Job(0.0, [3] * 4, 10), Job(5.0, [3] * 4, 2), Job(6.0, [3] * 4, 2)]
    static, clock = StaticBatching(8), VirtualClock()
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=8), ContiguousKv(100, lambda name: 16), admission=[static])
    static.scheduler = scheduler
    executor = LengthsExecutor({f"j{place}": job.output for place, job in enumerate(jobs)}, clock, lambda plan: 1.0)
    records = drive(EngineCore(scheduler, executor, clock), jobs, make, clock, clock.wait)
    assert [record.admitted for record in records] == [0.0, 10.0, 10.0] and static.batches == 2
