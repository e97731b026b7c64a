from collections.abc import Callable

import pytest

from octavo.config import SchedulerConfig
from octavo.core.output import Delta
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.core.step import SlotResult, StepPlan, StepResult
from octavo.engine.core import EngineCore
from octavo.errors import ContextTooLong, InvalidRequest, RequestError, WorkerDied
from octavo.kv.manager import KvManager
from octavo.observe.events import Admitted, Event, Finished
from octavo.scheduler.scheduler import Scheduler
from octavo.simulate.executor import SimExecutor, VirtualClock


class Faulty:
    """A SimExecutor that does something else at one step."""

    def __init__(self, inner: SimExecutor) -> None:
        self.inner = inner
        self.faults: dict[int, Callable[[StepPlan], StepResult]] = {}
        self.down = 0

    def execute(self, plan: StepPlan) -> StepResult:
        return self.faults.get(plan.number, self.inner.execute)(plan)

    def shutdown(self) -> None:
        self.down += 1


def raising(error: BaseException) -> Callable[..., StepResult]:
    def fault(*_: object) -> StepResult:
        raise error

    return fault


def make(blocks: int = 32, seqs: int = 2, tokens: int = 32) -> tuple[EngineCore, Faulty, Scheduler]:
    clock = VirtualClock()
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=400), KvManager(blocks))
    executor = Faulty(SimExecutor(seqs, blocks, max_tokens=tokens, clock=clock, cost=lambda plan: 1.0))
    return EngineCore(scheduler, executor, clock), executor, scheduler


def make_request(name: str, prompt: int = 5, output: int = 4) -> Request:
    return Request(name, list(range(1, prompt + 1)), SamplingParams(max_tokens=output), prompt + output)


def run(core: EngineCore, most: int = 1000) -> list[Delta]:
    deltas: list[Delta] = []
    for _ in range(most):
        if not core.has_work:
            return deltas
        deltas += core.step()
    raise AssertionError("not drained")


def ends(deltas: list[Delta]) -> dict[str, str]:
    """Request → how it ended; fails if one ended twice or had news after its end."""
    found: dict[str, str] = {}
    for delta in deltas:
        assert delta.request_id not in found, f"news of {delta.request_id} after its end"
        if delta.finish_reason:
            found[delta.request_id] = delta.finish_reason
    return found


def test_every_request_ends_once() -> None:
    core, _, scheduler = make()
    assert not core.has_work and core.step() == []
    for name in "abcd":
        core.add(make_request(name))
    deltas = run(core)
    assert ends(deltas) == dict.fromkeys("abcd", "length")
    assert sum(len(d.tokens) for d in deltas) == 16 == core.counters.tokens_sampled
    assert scheduler.kv.ledger().free == 32 and core.step() == []


def test_a_refused_request_gets_no_delta_and_harms_nobody() -> None:
    core, _, _ = make(blocks=4)
    core.add(make_request("a"))
    with pytest.raises(ContextTooLong):
        core.add(make_request("b", 65))
    with pytest.raises(InvalidRequest, match="in use"):
        core.add(make_request("a"))
    assert ends(run(core)) == {"a": "length"}
    core.add(make_request("a"))
    assert ends(run(core)) == {"a": "length"}


def test_abort_gives_one_last_delta_with_the_next_step() -> None:
    core, _, _ = make(seqs=1)
    core.add(make_request("a"))
    core.add(make_request("b"))
    deltas = core.step()
    assert core.abort("a") and core.abort("b")
    assert not core.abort("a") and not core.abort("unknown")
    assert core.has_work
    deltas += run(core)
    assert ends(deltas) == {"a": "abort", "b": "abort"}
    assert not core.abort("a")


def test_an_aborted_id_may_be_used_again_at_once() -> None:
    core, _, _ = make()
    core.add(make_request("a"))
    core.step()
    core.abort("a")
    core.add(make_request("a", output=2))
    deltas = run(core)
    assert [(d.finish_reason, len(d.tokens)) for d in deltas] == [("abort", 0), (None, 1), ("length", 1)]


@pytest.mark.parametrize("number", [1, 3])
def test_an_executors_exception_ends_everybody_and_the_engine(number: int) -> None:
    core, executor, _ = make(seqs=2)
    executor.faults[number] = raising(RuntimeError("out of rope"))
    events: list[Event] = []
    core.observers.append(lambda event, now: events.append(event))
    for name in "abc":
        core.add(make_request(name, output=9))
    deltas = run(core)
    assert ends(deltas) == dict.fromkeys("abc", "error")
    assert all(d.error == "the engine stopped in a step: RuntimeError: out of rope" for d in deltas if d.finish_reason)
    assert core.failure == "RuntimeError: out of rope"
    assert {e.request_id for e in events if isinstance(e, Finished)} == set("abc")
    for use in (core.step, lambda: core.add(make_request("d"))):
        with pytest.raises(WorkerDied, match="out of rope"):
            use()
    assert not core.abort("a") and not core.has_work
    core.shutdown()
    core.shutdown()
    assert executor.down == 2


def test_those_who_ended_before_the_break_are_not_answered_twice() -> None:
    core, executor, _ = make(seqs=3)
    executor.faults[3] = raising(OSError("gone"))
    core.add(make_request("a", output=1))
    core.add(make_request("b", output=9))
    core.add(make_request("c", output=9))
    core.step()
    core.step()
    core.abort("c")
    assert ends(run(core)) == {"c": "abort", "b": "error"}


def test_a_result_that_does_not_answer_the_plan_ends_the_engine() -> None:
    core, executor, _ = make()
    executor.faults[2] = lambda plan: StepResult(plan.number, [SlotResult(9, 9, [1])] * len(plan.items))
    core.add(make_request("a"))
    deltas = run(core)
    assert ends(deltas) == {"a": "error"} and "slot 9" in (deltas[-1].error or "")
    with pytest.raises(WorkerDied):
        core.step()


def test_a_request_error_ends_the_steps_requests_and_the_others_go_on() -> None:
    core, executor, _ = make(seqs=2)
    executor.faults[2] = raising(RequestError("no such grammar"))
    for name in "abcd":
        core.add(make_request(name))
    deltas = run(core)
    assert ends(deltas) == {"a": "error", "b": "error", "c": "length", "d": "length"}
    assert [d.error for d in deltas if d.error] == ["no such grammar"] * 2
    assert core.failure is None


def test_one_sick_slot_ends_one_request() -> None:
    core, executor, _ = make(seqs=2)

    def sick(plan: StepPlan) -> StepResult:
        found = executor.inner.execute(plan)
        return StepResult(found.number, [SlotResult(found.slots[0].slot, found.slots[0].epoch, error="NaN"), *found.slots[1:]])

    executor.faults[2] = sick
    for name in "abc":
        core.add(make_request(name))
    assert ends(run(core)) == {"a": "error", "b": "length", "c": "length"}


def test_an_interrupt_reaches_the_caller_and_the_answers_wait() -> None:
    core, executor, _ = make()
    executor.faults[2] = raising(KeyboardInterrupt())
    heard: list[Event] = []
    core.observers.append(lambda event, now: heard.append(event))
    core.add(make_request("a"))
    core.step()
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert core.has_work and heard[-1] == Finished("a", "error")
    assert ends(core.step()) == {"a": "error"} and not core.has_work
    with pytest.raises(WorkerDied, match="KeyboardInterrupt"):
        core.step()


def test_a_fault_of_the_scheduler_itself_answers_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    core, _, scheduler = make(seqs=3)
    for name, output in (("a", 2), ("b", 2), ("c", 9)):
        core.add(make_request(name, output=output))
    core.step()
    release = scheduler.kv.release

    def breaks_at_b(request_id: str) -> int:
        assert request_id != "b", "bookkeeping is broken"
        return release(request_id)

    monkeypatch.setattr(scheduler.kv, "release", breaks_at_b)
    assert ends(run(core)) == dict.fromkeys("abc", "error")  # a's end came out of the commit that broke


def test_a_fault_in_an_abort_answers_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    core, _, scheduler = make()
    core.add(make_request("a"))
    core.add(make_request("b"))
    deltas = core.step()
    monkeypatch.setattr(scheduler.kv, "release", raising(AssertionError("bookkeeping is broken")))
    assert core.abort("a") and core.failure == "AssertionError: bookkeeping is broken"
    assert ends(deltas + run(core)) == dict.fromkeys("ab", "error")


def test_observers_hear_events_with_the_time_of_their_step() -> None:
    core, _, _ = make(seqs=1)
    heard: list[tuple[Event, float]] = []
    core.observers.append(lambda event, now: heard.append((event, now)))
    core.add(make_request("a", output=2))
    core.add(make_request("b", output=2))
    core.add(make_request("c", output=2))
    core.step()
    core.abort("c")
    assert heard == [(Admitted("a", 0, 0, False), 0.0), (Finished("c", "abort"), 1.0)]
    run(core)
    assert heard[2:] == [(Finished("a", "length"), 1.0), (Admitted("b", 0, 0, False), 2.0), (Finished("b", "length"), 3.0)]


def test_an_observers_exception_costs_no_delta() -> None:
    core, _, _ = make()

    def observer(event: Event, now: float) -> None:
        if isinstance(event, Finished):
            raise ValueError("the dashboard fell over")

    heard: list[Event] = []
    core.observers += [observer, lambda event, now: heard.append(event)]
    core.add(make_request("a", output=1))
    core.add(make_request("b", output=3))
    with pytest.raises(ValueError, match="dashboard"):
        core.step()
    assert heard == [Admitted("a", 0, 0, False), Admitted("b", 1, 0, False), Finished("a", "length")]  # nor the others an event
    core.observers.clear()
    assert ends(run(core)) == {"a": "length", "b": "length"}


def test_shutdown_answers_those_that_are_left() -> None:
    core, executor, _ = make(seqs=1)
    core.add(make_request("a"))
    core.add(make_request("b"))
    core.step()
    core.shutdown()
    assert executor.down == 1 and ends(run(core)) == {"a": "abort", "b": "abort"}
    with pytest.raises(WorkerDied, match="shut down"):
        core.add(make_request("c"))


def test_nothing_is_lost_while_nobody_can_get_on() -> None:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=1), KvManager(8), admission=[lambda request: allowed])
    core = EngineCore(scheduler, SimExecutor(1, 8))
    allowed = False
    core.add(make_request("a"))
    assert core.step() == [] and core.has_work
    allowed = True
    assert ends(run(core)) == {"a": "length"}
