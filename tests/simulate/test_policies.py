"""What the policies do to a load, in virtual time: who waits, who is starved, how often somebody is preempted, how long a step takes.

The scheduler is the real one and time is counted, not measured, so each figure is the same everywhere.
"""

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from octavo.config import SchedulerConfig
from octavo.kv.manager import KvManager
from octavo.scheduler.scheduler import Scheduler
from octavo.simulate.drive import Job, LinearCost, Outcome, jain, quantile, simulate

COST = LinearCost(0.008, 0.0004)  # about a small model on two cores


def served(outcome: Outcome, tenant: str, until: float) -> float:
    """Weighted tokens that a tenant was served so far."""
    records = outcome.of(tenant)
    return sum((r.admitted is not None and r.admitted < until) * len(r.job.prompt) + 2 * sum(t <= until for t in r.tokens) for r in records)


# -- fair against fcfs


@cache
def two_tenants(policy: str, weights: tuple[tuple[str, float], ...] = ()) -> Outcome:
    """"heavy" asks for four times what the engine can do, "light" for a twentieth of it, over 30 s."""
    rng, jobs = random.Random(7), []
    for tenant, rate in (("heavy", 40.0), ("light", 0.5)):
        now = 0.0
        while (now := now + rng.expovariate(rate)) < 30.0:
            jobs.append(Job(now, [3] * rng.randint(40, 160), rng.randint(20, 80), tenant))
    jobs.sort(key=lambda job: job.arrival)
    return simulate(jobs, SchedulerConfig(max_num_seqs=16, policy=policy, tenant_weights=weights), KvManager(400), COST)


def test_the_light_tenant_does_not_pay_for_the_heavy_one() -> None:
    fcfs, fair = two_tenants("fcfs"), two_tenants("fair")
    before, after = (quantile([r.ttft for r in outcome.of("light")], 0.99) for outcome in (fcfs, fair))
    print(f"light's P99 TTFT: fcfs {before:.2f} s, fair {after:.2f} s")
    assert before > 10 and after < 1.5
    assert fair.seconds == pytest.approx(fcfs.seconds, rel=0.03)  # work-conserving: the same work in the same time
    assert fair.counters.tokens_sampled == fcfs.counters.tokens_sampled


def test_jains_index_of_unequal_loads() -> None:
    """Four tenants that ask for 1, 2, 4 and 8 times an equal share of the engine: all could have theirs."""

    def run(policy: str) -> float:
        rng, jobs = random.Random(9), []
        for times in (1, 2, 4, 8):
            now = 0.0
            while (now := now + rng.expovariate(4.0 * times)) < 20.0:
                jobs.append(Job(now, [3] * rng.randint(40, 160), rng.randint(20, 80), f"x{times}"))
        jobs.sort(key=lambda job: job.arrival)
        outcome = simulate(jobs, SchedulerConfig(max_num_seqs=16, policy=policy), KvManager(400), COST)
        return jain(served(outcome, f"x{times}", 20.0) for times in (1, 2, 4, 8))

    fcfs, fair = run("fcfs"), run("fair")
    print(f"Jain's index: fcfs {fcfs:.3f}, fair {fair:.3f}")
    assert fcfs < 0.75 and fair > 0.98


@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0}, {"a": 3.0, "b": 1.0}])
def test_backlogged_tenants_stay_within_the_bound(weights: dict[str, float]) -> None:
    """Sheng et al. 2024, theorem 4.4: while both wait, what they were served, over their weights, differs by at most
    2 · max(longest prompt, twice the tokens that the pool holds)."""
    rng = random.Random(11)
    blocks, jobs = 60, []
    for tenant, size in (("a", 1), ("b", 3)):
        jobs += [Job(0.0, [3] * rng.randint(10, 60 * size), rng.randint(5, 30 * size), tenant) for _ in range(240 // size)]
    rng.shuffle(jobs)
    config = SchedulerConfig(max_num_seqs=8, policy="fair", tenant_weights=tuple(weights.items()))
    samples: list[tuple[float, bool]] = []

    def watch(scheduler: Scheduler, now: float) -> None:
        samples.append((now, {r.tenant for r in scheduler.waiting} == {"a", "b"}))

    outcome = simulate(jobs, config, KvManager(blocks), COST, observe=watch)
    both = [now for now, backlogged in samples if backlogged]
    assert len(both) > 500
    bound = 2 * max(180, 2 * blocks * 16) / min(weights.values())
    gaps = [served(outcome, "a", now) / weights["a"] - served(outcome, "b", now) / weights["b"] for now in both[::25]]
    print(f"largest difference {max(map(abs, gaps)):.0f}, bound {bound:.0f}, each was served {served(outcome, 'a', both[-1]):.0f}")
    assert max(map(abs, gaps)) <= bound < served(outcome, "a", both[-1]) / 3


def test_a_lone_tenant_has_the_whole_engine() -> None:
    jobs = [Job(0.0, [3] * 50, 40, "one") for _ in range(60)]
    fcfs, fair = (simulate(jobs, SchedulerConfig(max_num_seqs=16, policy=name), KvManager(200), COST) for name in ("fcfs", "fair"))
    assert [r.tokens for r in fair.records] == [r.tokens for r in fcfs.records]


# -- starvation


def stream(first: Job) -> list[Job]:
    """``first``, and for 300 s more of others than one request at a time can serve: each takes 1 s, and one comes every 0.9 s."""
    return [first, *(Job(place * 0.9, [3] * 10, 100) for place in range(334))]


ALONE = SchedulerConfig(max_num_seqs=1, policy="priority")
SLOW = LinearCost(0.01, 0.0)


@pytest.mark.parametrize(("behind", "by"), [(0, 15), (1, 45), (5, 190)])
def test_a_stream_of_urgent_requests_starves_nobody(behind: int, by: float) -> None:
    """Passed by those that come within 30 s a level, it waits for what is queued by then: a tenth more."""
    outcome = simulate(stream(Job(1.0, [3] * 10, 100, priority=behind)), ALONE, KvManager(100), SLOW)
    admitted = outcome.records[0].admitted
    assert admitted is not None and 30 * behind * 0.9 <= admitted <= by


def test_without_aging_it_would_wait_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.scheduler.policy.Priority.rank", lambda self, request: request.priority)
    outcome = simulate(stream(Job(1.0, [3] * 10, 100, priority=1)), ALONE, KvManager(100), SLOW)
    assert (outcome.records[0].admitted or 0) > 330


def test_urgent_requests_do_go_first() -> None:
    jobs = [Job(0.0, [3] * 10, 100, priority=place % 2) for place in range(20)]
    outcome = simulate(jobs, ALONE, KvManager(100), SLOW)
    urgent, others = ([r.ttft for r in outcome.records if r.job.priority == level] for level in (0, 1))
    assert max(urgent) < min(others[1:])


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm", "fair"])
@pytest.mark.parametrize("admission", ["optimistic", "predicted"])
def test_under_overload_every_request_ends_and_the_worst_wait_is_bounded(policy: str, admission: str) -> None:
    """Three times what the engine can do for 20 s, in a pool of a tenth of what the requests need side by side."""
    rng, jobs, now = random.Random(13), [], 0.0
    while (now := now + rng.expovariate(30.0)) < 20.0:
        jobs.append(Job(now, [3] * rng.randint(5, 150), rng.randint(1, 120), rng.choice("abc"), rng.randint(0, 2), most=200))
    config = SchedulerConfig(max_num_seqs=64, policy=policy, admission=admission)
    outcome = simulate(jobs, config, KvManager(70), COST)
    assert all(len(r.tokens) == r.job.output for r in outcome.records)
    assert max(r.ttft for r in outcome.records) <= outcome.seconds
    assert outcome.counters.preemptions <= sum(-(-(len(job.prompt) + job.output) // 16) for job in jobs)


# -- longest prefix first


def test_lpm_serves_those_together_that_share_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three families of prompts, mixed; the cache holds the prefix of whoever was admitted last."""
    rng = random.Random(17)
    jobs = [Job(place * 0.01, [rng.randint(1, 3)] * 160, 10) for place in range(120)]

    def changes(policy: str) -> int:
        families: list[int] = []

        def watch(scheduler: Scheduler, now: float) -> None:
            families.extend(request.prompt[0] for request in scheduler.running)

        monkeypatch.setattr(Scheduler, "cached_tokens", lambda self, request: 144 * (request.prompt[0] in families[-1:]))
        simulate(jobs, SchedulerConfig(max_num_seqs=1, policy=policy), KvManager(100), SLOW, observe=watch)
        return sum(before != after for before, after in pairwise(families))

    fcfs, lpm = changes("fcfs"), changes("lpm")
    print(f"changes of family: fcfs {fcfs}, lpm {lpm}")
    assert fcfs > 60 and lpm < fcfs / 4


@pytest.mark.parametrize(("cached", "by"), [(0, 15), (640, 25), (6400, 120)])
def test_a_stream_of_cached_prefixes_starves_nobody(monkeypatch: pytest.MonkeyPatch, cached: int, by: float) -> None:
    """Passed by those that come within cached / 64 seconds, and no others."""
    monkeypatch.setattr(Scheduler, "cached_tokens", lambda self, request: cached if request.prompt[0] == 3 else 0)
    jobs = stream(Job(1.0, [4] * 10, 100))
    admitted = simulate(jobs, replace(ALONE, policy="lpm"), KvManager(100), SLOW).records[0].admitted
    assert admitted is not None and cached / 64 * 0.9 <= admitted <= by


# -- predicted admission


@cache
def tight(admission: str, part: float) -> Outcome:
    """Requests that may all be 1,000 tokens long and mostly are not, in a part of the pool that 64 of them would take."""
    rng, jobs, now = random.Random(19), [], 0.0
    for _ in range(250):
        now += rng.expovariate(50.0)
        jobs.append(Job(now, [3] * rng.randint(10, 200), max(1, min(600, int(rng.lognormvariate(4.6, 0.8)))), most=1000))
    need = sum(-(-(len(job.prompt) + job.output) // 16) for job in jobs[:64])
    return simulate(jobs, SchedulerConfig(max_num_seqs=64, admission=admission), KvManager(int(need * part)), COST)


@pytest.mark.parametrize("part", [0.1, 0.2, 0.3])
def test_predicted_admission_hardly_ever_preempts(part: float) -> None:
    optimistic, predicted = tight("optimistic", part), tight("predicted", part)
    print(f"{part}: preemptions {optimistic.counters.preemptions} and {predicted.counters.preemptions}, "
          f"seconds {optimistic.seconds:.1f} and {predicted.seconds:.1f}")
    assert optimistic.counters.preemptions > 100 and predicted.counters.preemptions <= optimistic.counters.preemptions / 15
    assert predicted.seconds <= optimistic.seconds  # what is not computed twice outweighs blocks kept back
    assert predicted.counters.tokens_sampled == optimistic.counters.tokens_sampled


def test_in_a_pool_that_holds_all_predicted_admission_holds_nobody_back() -> None:
    jobs = [Job(0.0, [3] * 50, 40, most=60) for _ in range(60)]
    runs = [simulate(jobs, SchedulerConfig(max_num_seqs=64, admission=name), KvManager(1000), COST) for name in ("optimistic", "predicted")]
    assert [r.tokens for r in runs[0].records] == [r.tokens for r in runs[1].records]


# -- the target for the time between tokens


@cache
def chatting(target_ms: float | None) -> Outcome:
    """Eight streams of 400 tokens, and a prompt of 1,500 tokens every second."""
    jobs = [Job(0.0, [3] * 20, 400, "chat") for _ in range(8)] + [Job(1.0 + place, [3] * 1500, 5, "long") for place in range(6)]
    return simulate(jobs, SchedulerConfig(max_num_seqs=64, target_itl_ms=target_ms), KvManager(2000), COST)


@pytest.mark.parametrize("target", [30.0, 60.0])
def test_a_target_bounds_the_time_between_tokens(target: float) -> None:
    free, bound = chatting(None), chatting(target)
    before, after = (quantile([gap for r in out.of("chat") for gap in r.gaps], 0.99) for out in (free, bound))
    waits = [max(r.ttft for r in out.of("long")) for out in (free, bound)]
    print(f"P99 between tokens {before * 1000:.0f} and {after * 1000:.0f} ms; long prompts' worst TTFT {waits[0]:.1f} and {waits[1]:.1f} s")
    assert before > 0.2 and after <= target / 1000 * 1.001
    steps = [gap for r in bound.of("chat") for gap in r.gaps if gap > 0.02]
    assert quantile(steps, 0.5) > target / 1000 * 0.95  # and uses what the target leaves
    assert [len(r.tokens) for r in bound.records] == [len(r.tokens) for r in free.records]


def test_a_target_that_cannot_be_met_stops_no_prompt() -> None:
    """Nine who decode take 11.6 ms; with a block of a prompt, 18."""
    out = chatting(5.0)
    gaps = [gap for r in out.of("chat") for gap in r.gaps]
    assert quantile(gaps, 0.97) == pytest.approx(0.018) and all(len(r.tokens) == 5 for r in out.of("long"))
