"""Predicted admission: its expectation and its peak against brute force, and that it blocks nobody for ever."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import SchedulerConfig
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.kv.manager import NO_MATCH, KvManager, Match
from octavo.scheduler.admission import FEW, PRIOR, OutputLengths, Predicted
from octavo.scheduler.scheduler import Scheduler
from octavo.simulate.executor import SimExecutor


def request(name: str, prompt: int, output: int, most: int) -> Request:
    """One that has ``output`` tokens so far and may have ``most``."""
    return Request(name, [1] * prompt, SamplingParams(), prompt + most, limit=prompt + most, tokens=[1] * (prompt + output))


def learned(*lengths: int, quantile: float = 0.5) -> OutputLengths:
    found = OutputLengths(quantile=quantile)
    for length in lengths:
        found.add(length)
    return found


def test_before_anything_is_known_a_prior_is_expected() -> None:
    assert learned().expect(0) == PRIOR and learned().expect(200) == 400
    assert learned(*[5] * (FEW - 1)).expect(0) == PRIOR and learned(*[5] * FEW).expect(0) == 5


def test_the_median_of_what_is_longer() -> None:
    lengths = learned(*range(10, 110, 5))  # 10, 15 … 105
    assert lengths.expect(0) == 60 and lengths.expect(12) == 60 and lengths.expect(60) == 85 and lengths.expect(100) == 105
    assert lengths.expect(105) == 210  # longer than all: it may double


def test_only_recent_lengths_count() -> None:
    lengths = OutputLengths(window=20)
    for length in [500] * 30 + [7] * 20:
        lengths.add(length)
    assert lengths.expect(0) == 7 and lengths._sorted == [7] * 20


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=80), st.integers(0, 70), st.sampled_from([0.25, 0.5, 0.9]))
def test_the_expectation_is_the_quantile_by_brute_force(ended: list[int], so_far: int, part: float) -> None:
    lengths = OutputLengths(32, part)
    for length in ended:
        lengths.add(length)
    recent = ended[-32:]
    longer = sorted(length for length in recent if length > so_far)
    if longer:
        expected = next(v for i, v in enumerate(longer) if i + 1 > part * len(longer) or i + 1 == len(longer))
    else:
        expected = max(2 * so_far, so_far + 1)
    assert lengths.expect(so_far) == (expected if len(recent) >= FEW else max(expected, PRIOR))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=6), st.integers(1, 50))
def test_the_peak_bounds_what_a_run_of_the_expectation_uses(cases: list[tuple[int, int, int]], length: int) -> None:
    """Step by step: everybody samples a token, and leaves when it has what is expected."""
    kv, size = KvManager(10_000, 16), 16
    lengths = learned(*[length] * FEW)
    requests = [request(f"r{i}", prompt, output, output + more) for i, (prompt, output, more) in enumerate(cases)]
    predicted = Predicted([], kv, lengths)
    ends = {r.id: min(r.num_prompt + lengths.expect(r.num_output), r.max_total) for r in requests}
    held, tokens, most, blocks = {r.id: len(r.tokens) for r in requests}, 0, 0, 0
    while held:
        tokens = sum(held.values())
        most = max(most, tokens)
        blocks = max(blocks, sum(-(-count // size) for count in held.values()))
        held = {name: count + 1 for name, count in held.items() if count + 1 < ends[name]}
    peak = predicted.peak(requests)
    assert blocks * size <= peak <= most + len(requests) * (size - 1)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 150), st.integers(0, 60), st.integers(1, 120), st.booleans()), min_size=1, max_size=6), st.integers(1, 90),
       st.integers(1, 100))
def test_the_peak_with_a_window(cases: list[tuple[int, int, int, bool]], length: int, window: int) -> None:
    """Blocks step by step: who has computed its prompt holds what the next row sees; who has not holds all of it until then."""
    kv, size = KvManager(10_000, 16, window=window), 16
    lengths = learned(*[length] * FEW)
    requests = []
    for i, (prompt, output, more, computed) in enumerate(cases):
        requests.append(request(f"r{i}", prompt, output, output + more))
        requests[-1].num_computed = prompt + output - 1 if computed else 0
    left = {r.id: min(r.num_prompt + lengths.expect(r.num_output), r.limit) - 1 - len(r.tokens) for r in requests}

    def holds(r: Request, step: int) -> int:
        now = len(r.tokens) + step
        seen = -(-now // size) - max(0, now - window) // size
        return seen if r.num_computed else max(seen, -(-len(r.tokens) // size))

    blocks = max(sum(holds(r, step) for r in requests if step <= max(left[r.id], 0)) for step in range(max(0, *left.values()) + 1))
    peak = Predicted([], kv, lengths).peak(requests)
    whole = Predicted([], KvManager(10_000, 16), lengths).peak(requests)
    assert blocks * size <= peak <= min(whole, blocks * size + 2 * len(requests) * (size - 1))


def test_what_is_shared_is_counted_once() -> None:
    kv = KvManager(100, 16)
    running = [request(f"r{i}", 160, 1, 40) for i in range(2)]
    first = kv.admit("r0", NO_MATCH, 161)
    assert first is not None
    plain = Predicted(running, kv).peak(running)
    kv.admit("r1", Match(160, first[:10]), 161)
    assert Predicted(running, kv).peak(running) == plain - 160


def test_a_lone_request_is_let_in_whatever_is_expected() -> None:
    kv = KvManager(4, 16)
    running: list[Request] = []
    predicted = Predicted(running, kv)
    big = request("a", 10, 0, 1000)
    assert predicted(big)
    running.append(big)
    kv.admit("a", NO_MATCH, 10)
    assert not predicted(request("b", 1, 0, 1000))


def test_ends_are_learned_from_but_errors_are_not() -> None:
    lengths = OutputLengths()
    predicted = Predicted([], KvManager(4), lengths)
    for reason, output in (("stop", 3), ("length", 5), ("abort", 4), ("abort", 0), ("error", 9)):
        predicted.ended(request("a", 1, output, 20), reason)
    assert lengths._sorted == [3, 4, 5]


def test_everybody_ends_in_a_pool_of_any_size() -> None:
    """No deadlock: from the pool that holds one request on, with outputs far from what was expected."""
    rng = random.Random(3)
    for blocks in (3, 4, 7, 20):
        scheduler = Scheduler(SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, admission="predicted"), KvManager(blocks, 16))
        executor = SimExecutor(8, blocks, 16, max_tokens=32)
        for i in range(40):
            prompt = rng.randint(1, 40)
            scheduler.add(Request(f"r{i}", [i] * prompt, SamplingParams(), prompt + rng.choice([1, 3, 100])))
        steps = 0
        while scheduler.has_unfinished:
            plan = scheduler.plan()
            assert plan is not None, "nobody can get on"
            scheduler.commit(plan, executor.execute(plan))
            scheduler.check()
            steps += 1
        assert steps < 10_000
