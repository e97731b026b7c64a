"""The budget for a target inter-token time: its model of step times, and what it lets in."""

import math
import random

import pytest

from octavo.core.request import Request, State
from octavo.core.sampling import SamplingParams
from octavo.scheduler.itl import LEAST, ItlBudget
from octavo.scheduler.times import StepTimes


def decoding(count: int) -> list[Request]:
    return [Request(f"d{i}", [1], SamplingParams(), 100, tokens=[1, 1], num_computed=1, state=State.RUNNING) for i in range(count)]


def prefilling(tokens: int) -> Request:
    return Request("p", [1] * tokens, SamplingParams(), tokens + 9, state=State.RUNNING)


def test_two_sizes_give_the_line() -> None:
    times = StepTimes()
    assert times.fit() is None
    times.add(100, 0.060)
    assert times.fit() == pytest.approx((0.0, 0.0006))  # one size: all of it by the token
    times.add(10, 0.015)
    assert times.fit() == pytest.approx((0.010, 0.0005))


@pytest.mark.parametrize("decodes", [100, 10_000])
def test_a_rare_large_step_is_not_outweighed_by_many_small_ones(decodes: int) -> None:
    times, rng = StepTimes(), random.Random(1)
    for _ in range(20):
        times.add(512, (0.008 + 512 * 0.0004) * rng.uniform(0.9, 1.1))
    for _ in range(decodes):
        tokens = rng.randint(16, 24)
        times.add(tokens, (0.008 + tokens * 0.0004) * rng.uniform(0.9, 1.1))
    fixed, each = times.fit() or (0, 0)
    assert fixed == pytest.approx(0.008, rel=0.25) and each == pytest.approx(0.0004, rel=0.15)


def test_a_machine_that_becomes_slower_is_noticed() -> None:
    times = StepTimes()
    for pace in (1, 3):
        for step in range(200):
            tokens = (512, 20, 60)[step % 3]
            times.add(tokens, pace * (0.008 + tokens * 0.0004))
    assert times.fit() == pytest.approx((0.024, 0.0012), rel=0.01)


def test_times_that_fall_with_size_are_no_line_below_zero() -> None:
    times = StepTimes()
    times.add(10, 0.5)
    times.add(500, 0.1)
    fixed, each = times.fit() or (0, 0)
    assert fixed > 0 and each == 0.0
    times = StepTimes()
    times.add(10, 0.0001)
    times.add(500, 0.5)
    fixed, each = times.fit() or (0, 0)
    assert fixed == pytest.approx(0) and each > 0


def learned(target_ms: float, running: list[Request], most: int = 512) -> ItlBudget:
    times = StepTimes()
    for tokens in (512, 20):
        times.add(tokens, 0.010 + tokens * 0.0005)
    return ItlBudget(target_ms, most, running, times)


def test_the_budget_is_what_fits_the_target() -> None:
    assert learned(50.0001, decoding(5))(0.0) == 80  # 10 ms and 80 times half a millisecond
    assert learned(1000.0, decoding(5))(0.0) == 512
    assert learned(50.0001, [*decoding(5), prefilling(300)])(0.0) == 80


def test_without_decodes_or_knowledge_the_budget_is_whole() -> None:
    assert learned(1.0, [])(0.0) == learned(1.0, [prefilling(300)])(0.0) == 512
    assert ItlBudget(1.0, 512, decoding(4), StepTimes())(0.0) == 512


@pytest.mark.parametrize("target", [0.001, 10.0, 30.0])
@pytest.mark.parametrize("count", [1, 40, 300])
def test_decodes_are_always_served_and_prompts_never_stopped(target: float, count: int) -> None:
    assert learned(target, decoding(count))(0.0) >= count + LEAST


def test_a_model_without_slope() -> None:
    times = StepTimes()
    times.add(10, 0.5)
    times.add(500, 0.1)
    assert ItlBudget(100.0, 512, decoding(4), times)(0.0) == 4 + LEAST  # 300 ms whatever the size: the target cannot be met
    assert not math.isnan(sum(times.fit() or (0,)))
