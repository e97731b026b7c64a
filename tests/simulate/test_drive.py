"""The driver of loads in virtual time: its times by hand."""

import pytest

from octavo.config import SchedulerConfig
from octavo.kv.manager import KvManager
from octavo.simulate.drive import Job, LinearCost, jain, quantile, simulate

COST = LinearCost(1.0, 0.25, 0.5)


def test_times_by_hand() -> None:
    """Steps of a: 4 tokens from 0 (2 s), then one token at 4 (3.25 s), at 5 (3.75 s). b comes in the first step."""
    jobs = [Job(10.0, [5] * 4, 3), Job(11.0, [5] * 2, 1)]
    out = simulate(jobs, SchedulerConfig(), KvManager(10), COST)
    a, b = out.records
    assert a.tokens == [12.0, 12.0 + 1 + 0.25 * 3 + 0.5 * 4, 15.75 + 1 + 0.25 + 0.5 * 5] and b.tokens == [15.75]
    assert (a.admitted, b.admitted, a.ttft, b.ttft) == (10.0, 12.0, 2.0, 4.75) and a.gaps == [3.75, 3.75]
    assert (a.finish_reason, b.finish_reason, out.seconds, out.counters.steps) == ("stop", "stop", 19.5, 3)


def test_an_output_ends_at_its_length_and_at_what_it_asked_for() -> None:
    jobs = [Job(0.0, [5] * 4, 3, most=100), Job(0.0, [5] * 4, 30, most=7), Job(500.0, [5], 2, tenant="x")]
    out = simulate(jobs, SchedulerConfig(), KvManager(10), COST)
    assert [(len(r.tokens), r.finish_reason) for r in out.records] == [(3, "stop"), (7, "length"), (2, "stop")]
    assert out.of("x") == out.records[2:] and out.records[2].admitted == 500.0


def test_preempted_requests_keep_their_lengths() -> None:
    jobs = [Job(0.0, [5] * 15, 30, most=60) for _ in range(4)]
    out = simulate(jobs, SchedulerConfig(max_num_seqs=4), KvManager(5), COST)
    assert out.counters.preemptions == sum(r.preemptions for r in out.records) > 0
    assert all(len(r.tokens) == 30 and r.finish_reason == "stop" for r in out.records)


def test_an_engine_that_does_not_get_on_is_noticed() -> None:
    with pytest.raises(AssertionError, match="nothing could be planned"):
        simulate([Job(0.0, [5], 3)], SchedulerConfig(target_itl_ms=1.0), KvManager(4), COST, observe=_refuse)


def _refuse(scheduler: object, now: float) -> None:
    scheduler._budget = lambda now: 0  # type: ignore[attr-defined]


def test_jain_and_quantiles() -> None:
    assert jain([3, 3, 3]) == pytest.approx(1) and jain([1, 0, 0, 0]) == 0.25 and jain([0, 0]) == 1
    assert [quantile(range(1, 101), part) for part in (0.0, 0.01, 0.5, 0.99, 0.995, 1.0)] == [1, 1, 50, 99, 100, 100]
    assert quantile([7], 0.99) == 7
