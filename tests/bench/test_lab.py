"""The laboratory on a tiny model: arms differ in what they are to differ in, and in nothing else."""

from collections.abc import Iterator
from random import Random

import pytest
from tests.bench.test_experiments import Quiet
from tests.checkpoints import make_tiny

from octavo.bench.baselines import ContiguousKv, StaticBatching
from octavo.bench.lab import Averages, Lab, jobs_of
from octavo.core.sampling import SamplingParams
from octavo.kv.manager import KvManager, Ledger
from octavo.runner.tier import MemoryTier
from octavo.simulate.drive import Job

LENGTHS = [(20, 9), (33, 4), (5, 17), (48, 1), (16, 12), (40, 6)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(str(make_tiny(tmp_path_factory.mktemp("lab") / "tiny")), repeats=3, num_threads=2, report=Quiet())
    yield made
    made.close()


def test_arms_take_turns_with_equal_prompts_that_are_fresh_in_each_round(lab: Lab) -> None:
    order: list[str] = []

    def arm(name: str) -> object:
        return lambda draw: (order.append(name), tuple(lab.ids(draw, 8)))[1]

    found = lab.rounds({"a": arm("a"), "b": arm("b")})
    assert order == ["a", "b", "b", "a", "a", "b"] and found["a"] == found["b"] and len(set(found["a"])) == 3
    again = lab.rounds({"a": arm("a")}, repeats=1)["a"]
    assert not set(again) & set(found["a"])


def test_every_arm_gives_the_same_tokens(lab: Lab) -> None:
    jobs = jobs_of(lab, Random(1), LENGTHS)
    jobs[1] = Job(0.0, jobs[1].prompt, 4, params=SamplingParams(temperature=1.0, seed=5, ignore_eos=True))
    static = StaticBatching(2)
    tier = MemoryTier(8, lab.block_bytes)
    arms = {
        "pages": lambda: lab.arm(prefix_caching=False), "cache": lambda: lab.arm(), "budget": lambda: lab.arm(max_num_batched_tokens=16),
        "tight": lambda: lab.arm(num_kv_blocks=5, prefix_caching=False), "contiguous": lambda: lab.arm(kv=ContiguousKv(12, lambda name: 64)),
        "static": lambda: lab.arm(max_num_seqs=2, predicates=[static]),
        "swap": lambda: lab.arm(num_kv_blocks=5, prefix_caching=False, tier=tier, preemption_mode="swap"),
    }
    answers = {}
    for name, make in arms.items():
        arm = make()
        static.scheduler = arm.scheduler
        run = arm.run(jobs)
        answers[name] = [record.ids for record in run.records]
        arm.scheduler.check()
        assert arm.scheduler.kv.ledger().live == 0 and run.counters.tokens_sampled == sum(job.output for job in jobs)
        assert (run.counters.preemptions > 0) == (name in ("tight", "swap")) and (run.counters.blocks_out > 0) == (name == "swap")
    assert all(answer == answers["pages"] for answer in answers.values())
    assert [len(ids) for ids in answers["pages"]] == [job.output for job in jobs] and static.batches == 3


def test_who_asks_for_more_than_it_takes_ends_where_it_ends(lab: Lab) -> None:
    arm = lab.arm()
    first = arm.run(jobs_of(lab, Random(2), LENGTHS, most=64))
    assert [len(record.ids) for record in first.records] == [output for _, output in LENGTHS]
    assert all(record.finish_reason == "abort" for record in first.records)
    second = arm.run(jobs_of(lab, Random(2), LENGTHS))  # of one arm: what it has cached is found, and only this run is counted
    assert [record.ids for record in second.records] == [record.ids for record in first.records]
    assert second.counters.cache_hits > 0 and second.counters.tokens_sampled == first.counters.tokens_sampled
    assert first.counters.cache_hits == 0 and second.counters.tokens_planned < first.counters.tokens_planned


def test_averages_are_over_slots_and_seconds() -> None:
    averages = Averages()
    averages.add(1.0, Ledger(live=2, shared=0, cached=0, free=8, logical=4, live_slots=32, reserved_slots=8), 1)
    averages.add(3.0, Ledger(live=4, shared=0, cached=0, free=6, logical=4, live_slots=64, reserved_slots=32), 3)
    assert averages.utilization == 1 - (8 + 3 * 32) / (32 + 3 * 64)
    assert averages.unique == (2 + 12) / (4 + 12) and averages.resident == (1 + 9) / 4


def test_the_processor_time_of_planning_is_a_part_of_the_whole(lab: Lab) -> None:
    arm = lab.arm(kv=KvManager(64))
    times = arm.run(jobs_of(lab, Random(3), LENGTHS)).times
    assert 0 < times.planning < times.all
    assert "plan" not in vars(arm.scheduler)  # the stop-watch is gone
