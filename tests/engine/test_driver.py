"""Driver and outputs over a scripted core: which delta goes where, what a stop string ends, what an interrupt costs."""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from octavo import SamplingParams, WorkerDied
from octavo.core.output import Delta, Logprob, LogprobRow
from octavo.core.request import Request
from octavo.engine.driver import Driver
from octavo.engine.inputs import Prompt
from octavo.engine.outputs import Answer, logprob_dict
from octavo.errors import ContextTooLong
from octavo.observe.events import Admitted, Preempted


class Spelled:
    """Token i is the letter chr(i)."""

    special_ids = frozenset({1})
    strip_first_space = False

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def token_text(self, token: int) -> str:
        return chr(token)


@dataclass
class Counters:
    steps: int = 0


@dataclass
class FakeCore:
    """Hands out the scripted steps; an entry that is a function is called first."""

    script: list[Any]
    refuse: str = ""
    observers: list[Any] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    failure: str | None = None
    cause: BaseException | None = None
    stuck: bool = False

    @property
    def has_work(self) -> bool:
        return bool(self.script)

    def add(self, request: Request) -> None:
        if request.id == self.refuse:
            raise ContextTooLong("no", "prompt")
        self.added.append(request.id)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def step(self) -> list[Delta]:
        self.counters.steps += not self.stuck
        now = self.script.pop(0) if self.script else []
        return now(self) if callable(now) else now

    def shutdown(self) -> None:
        self.failure = "the engine was shut down"


def submit(driver: Driver, name: str, **kw: Any) -> Answer:
    params = SamplingParams(**kw)
    prompt = Prompt("p", [65])
    answer = Answer(name, prompt, params, Spelled(), 1.0)
    driver.submit([(answer, [Request(f"{name}/{i}", prompt.ids, params, 99) for i in range(params.n)])])
    return answer


def test_deltas_find_their_answers() -> None:
    core = FakeCore([
        [Delta("a/0", [72]), Delta("b/1", [89])], [Delta("b/0", [88], finish_reason="length"), Delta("gone", [1])],
        [Delta("a/0", [105], num_cached=3, finish_reason="stop", stop_reason=105), Delta("b/1", [], finish_reason="abort")],
    ])
    ticks = iter(range(10, 20))
    driver = Driver(core, lambda: float(next(ticks)))
    a, b = submit(driver, "a"), submit(driver, "b", n=2)
    driver.step()
    assert not a.finished and [s.text for s in b.output().outputs] == ["", "Y"]
    for name, event in (("a/0", Admitted("a/0", 0, 0, False)), ("b/0", Preempted("b/0", "x", 1, 1)), ("a/0", Admitted("a/0", 0, 0, True))):
        core.observers[0](event, 5.0 if not getattr(event, "resumed", False) else 7.0)
        assert event.request_id == name
    driver.step()
    driver.step()
    one, two = a.output(), b.output()
    assert (one.outputs[0].text, one.outputs[0].token_ids, one.outputs[0].stop_reason, one.num_cached_tokens) == ("H", [72, 105], 105, 3)
    assert [(s.text, s.finish_reason) for s in two.outputs] == [("X", "length"), ("Y", "abort")] and two.finished and one.prompt == "p"
    m = one.metrics
    assert (m.arrival, m.first_scheduled, m.first_token, m.last_token, m.finished, m.preemptions) == (1.0, 5.0, 10.0, 12.0, 12.0, 0)
    assert two.metrics.preemptions == 1 and two.metrics.last_token == 11.0 and not driver._open and core.aborted == []


def test_a_stop_string_aborts_the_request_once() -> None:
    core = FakeCore([[Delta("a/0", [ord(c)])] for c in "abcd"] + [[Delta("a/0", [], finish_reason="abort")]])
    driver = Driver(core)
    answer = submit(driver, "a", stop="bc")
    for _ in range(3):
        driver.step()
    sample = answer.output().outputs[0]
    assert (sample.text, sample.token_ids, sample.finish_reason, sample.stop_reason) == ("a", [97, 98, 99], "stop", "bc")
    driver.step()
    driver.step()
    assert core.aborted == ["a/0"] and answer.output().outputs[0] == sample


def test_a_stop_string_in_the_last_token_needs_no_abort() -> None:
    core = FakeCore([[Delta("a/0", [97])], [Delta("a/0", [98], finish_reason="length")]])
    driver = Driver(core)
    answer = submit(driver, "a", stop="b")
    driver.step()
    driver.step()
    sample = answer.output().outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason, core.aborted) == ("a", "stop", "b", [])


def test_held_text_comes_out_at_the_end() -> None:
    core = FakeCore([[Delta("a/0", [97])], [Delta("a/0", [98], finish_reason="length")]])
    driver = Driver(core)
    answer = submit(driver, "a", stop="abc")
    driver.step()
    assert answer.news().outputs[0].text == ""  # a token, whose text could still begin a stop string
    driver.step()
    assert (answer.news().outputs[0].text, answer.news(), answer.output().outputs[0].text) == ("ab", None, "ab")


def test_an_error_of_one_request_is_told() -> None:
    core = FakeCore([[Delta("a/0", [97]), Delta("b/0", [97])], [Delta("a/0", finish_reason="error", error="bad luck"), Delta("b/0", [98])]])
    driver = Driver(core)
    a, b = submit(driver, "a"), submit(driver, "b")
    driver.step()
    driver.step()
    assert (a.output().outputs[0].finish_reason, a.output().outputs[0].stop_reason) == ("error", "bad luck") and not b.finished


def test_all_or_none_is_submitted() -> None:
    core = FakeCore([], refuse="a/1")
    driver = Driver(core)
    with pytest.raises(ContextTooLong):
        submit(driver, "a", n=3)
    assert core.added == ["a/0"] and core.aborted == ["a/0"] and not driver._open


def test_a_dead_core_answers_and_raises_with_the_cause() -> None:
    def die(core: FakeCore) -> list[Delta]:
        core.failure, core.cause = "ValueError: x", ValueError("x")
        return [Delta("a/0", finish_reason="error", error="the engine stopped")]

    driver = Driver(FakeCore([die]))
    answer = submit(driver, "a")
    with pytest.raises(WorkerDied, match="ValueError: x") as caught:
        driver.step()
    assert isinstance(caught.value.__cause__, ValueError) and answer.finished


def test_no_progress_is_an_error_and_no_hang() -> None:
    core = FakeCore([])
    driver = Driver(core)
    submit(driver, "a")
    driver.step()  # a chunk of a prefill: a step without news
    core.stuck = True
    with pytest.raises(WorkerDied, match="1 requests are unfinished"):
        driver.step()


def test_shutdown_ends_every_answer() -> None:
    core = FakeCore([[Delta("a/0", finish_reason="abort")]])
    driver = Driver(core)
    answer = submit(driver, "a")
    driver.shutdown()
    assert answer.output().outputs[0].finish_reason == "abort"


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Python's own handler, also where the tests were started in the background, which ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_the_end_of_the_step() -> None:
    done = []

    def slow(core: FakeCore) -> list[Delta]:
        os.kill(os.getpid(), signal.SIGINT)
        done.append("step")
        return [Delta("a/0", [97])]

    driver = Driver(FakeCore([slow]))
    answer = submit(driver, "a")
    with pytest.raises(KeyboardInterrupt):
        driver.step()
    assert done == ["step"] and answer.output().outputs[0].token_ids == [97]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_comes_at_once() -> None:
    def hangs(core: FakeCore) -> list[Delta]:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")

    driver = Driver(FakeCore([hangs]))
    submit(driver, "a")
    with pytest.raises(KeyboardInterrupt):
        driver.step()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupted(deltas: list[Delta]) -> Any:
    """A step in which Ctrl-C is pressed."""
    def step(core: FakeCore) -> list[Delta]:
        os.kill(os.getpid(), signal.SIGINT)
        return deltas
    return step


def test_a_run_is_interrupted_between_steps_only() -> None:
    core = FakeCore([[Delta("a/0", [97])], interrupted([Delta("a/0", [98])]), [Delta("a/0", [99], finish_reason="length")]])
    driver = Driver(core)
    answer, ticks = submit(driver, "a"), []
    with pytest.raises(KeyboardInterrupt):
        driver.run([answer], lambda: ticks.append(len(answer.samples[0].tokens)))
    assert answer.samples[0].tokens == [97, 98] and ticks == [1], "the second step is whole, and nothing comes after it"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    driver.run([answer], lambda: ticks.append(3))
    assert answer.finished and ticks == [1, 3], "nothing of the interrupt is left"


def test_an_interrupt_behind_the_last_step_of_a_run_is_not_lost() -> None:
    driver = Driver(FakeCore([[Delta("a/0", [97], finish_reason="length")]]))
    with pytest.raises(KeyboardInterrupt):
        driver.run([submit(driver, "a")], lambda: os.kill(os.getpid(), signal.SIGINT))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_of_a_run_comes_at_once() -> None:
    def hangs(core: FakeCore) -> list[Delta]:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")

    driver = Driver(FakeCore([hangs]))
    with pytest.raises(KeyboardInterrupt):
        driver.run([submit(driver, "a")], lambda: None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_is_the_main_threads() -> None:
    """Another thread that steps while the main one runs is not the one that ends."""
    began, seen = threading.Event(), []

    def other() -> None:
        began.wait(10)
        try:
            driver.step()
        except BaseException as error:
            seen.append(error)

    def waits(core: FakeCore) -> list[Delta]:
        began.set()
        return interrupted([Delta("a/0", [97])])(core)

    driver = Driver(FakeCore([waits, [Delta("a/0", [98])], [Delta("a/0", [99])]]))
    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        driver.run([submit(driver, "a")], lambda: None)
    thread.join(10)
    assert not thread.is_alive() and seen == []


def test_a_run_waits_for_all_its_answers_and_touches_the_signal_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = signal.signal
    monkeypatch.setattr(signal, "signal", lambda *args: calls.append(args) or real(*args))
    steps = [[Delta("b/0", [98], finish_reason="length")], [Delta("a/0", [97])], [Delta("a/0", [97], finish_reason="length")]]
    driver = Driver(FakeCore(steps))
    answers = [submit(driver, "a"), submit(driver, "b")]
    driver.run(answers, lambda: None)
    assert all(answer.finished for answer in answers) and not steps and len(calls) == 2
    driver.run([], lambda: None)


def test_an_applications_own_handler_stays() -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        def step(core: FakeCore) -> list[Delta]:
            os.kill(os.getpid(), signal.SIGINT)
            return []

        driver = Driver(FakeCore([step]))
        submit(driver, "a")
        driver.step()
        assert seen == [1]
    finally:
        signal.signal(signal.SIGINT, before)


def test_logprob_shape() -> None:
    row = LogprobRow(67, -3.0, 9, [65, 66], [-1.0, -2.0])
    assert list(logprob_dict(row, Spelled()).items()) == [(67, Logprob(-3.0, 9, "C")), (65, Logprob(-1.0, 1, "A")), (66, Logprob(-2.0, 2, "B"))]
    top = logprob_dict(LogprobRow(66, -2.0, 2, [65, 66], [-1.0, -2.0]), None)
    assert list(top.items()) == [(66, Logprob(-2.0, 2, None)), (65, Logprob(-1.0, 1, None))]


def test_logprobs_gather() -> None:
    rows = [LogprobRow(97, -0.5, 1, [97], [-0.5])], [LogprobRow(98, -0.25, 1, [98], [-0.25])]
    core = FakeCore([
        [Delta("a/0", prompt_logprobs=[LogprobRow(65, -2.0, 3, [], [])])],
        [Delta("a/0", [97], rows[0], [LogprobRow(66, -4.0, 5, [], [])])], [Delta("a/0", [98], rows[1], finish_reason="length")],
    ])
    driver = Driver(core)
    answer = submit(driver, "a", logprobs=1, prompt_logprobs=0)
    driver.step()
    assert answer.news() is None
    driver.step()
    news = answer.news()
    assert [row and list(row) for row in news.prompt_logprobs] == [None, [65], [66]] and news.outputs[0].cumulative_logprob == -0.5
    driver.step()
    last = answer.news()
    assert last.prompt_logprobs is None and [list(row) for row in last.outputs[0].logprobs] == [[98]] and last.outputs[0].cumulative_logprob == -0.75
    assert [list(row) for row in answer.output().outputs[0].logprobs] == [[97], [98]]


def test_the_progress_bar_draws_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    from octavo.engine.console import progress_bar

    driver = Driver(FakeCore([[Delta("a/0", [97], finish_reason="length")]]))
    answer = submit(driver, "a")
    driver.step()
    for terminal, wanted in ((False, True), (True, False), (True, True)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with progress_bar([answer], wanted) as tick:
            tick()
        assert ("1/1" in capsys.readouterr().err) == (terminal and wanted)
