"""AsyncLLM over a scripted engine: who gets which news, what a reader that leaves costs, when there is room, who hears of a death."""

import asyncio
import gc
import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from octavo import AsyncLLM, Cancelled, ConfigError, ContextTooLong, InvalidRequest, QueueFull, RequestOutput, SamplingParams, WorkerDied
from octavo.config import Config, KvConfig, ModelConfig, RunnerConfig, SchedulerConfig
from octavo.core.output import Delta
from octavo.engine import messages as m
from octavo.engine.inputs import Prompt
from octavo.engine.textside import TextSide
from octavo.errors import OctavoError
from octavo.observe.events import Admitted, Event, Preempted
from octavo.runner.memory import Ledger
from octavo.text.chat_template import ChatTemplate

CONTEXT = 100
CONFIG = Config(ModelConfig("a-name"), KvConfig(), SchedulerConfig(max_model_len=CONTEXT), RunnerConfig())


class Spelled:
    """Token i is the letter chr(i)."""

    special_ids = frozenset({1})
    vocab_size = 320
    strip_first_space = False
    special_tokens: dict[str, str] = {}
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode()

    def token_text(self, token: int) -> str:
        return chr(token)

    _backend = type("Backend", (), {"normalizer": None})()


class Engine:
    """Records what it is told; the test says what it answers."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.stopped = 0
        self.hear: Callable[[Any], None] = lambda message: None
        self.die: Callable[[OctavoError], None] = lambda error: None

    def attach(self, on_message: Callable[[Any], None], on_end: Callable[[OctavoError], None]) -> None:
        self.hear, self.die = on_message, on_end
        asyncio.get_running_loop().call_soon(on_message, m.Ready(CONFIG, Ledger(1, 2, 3, 4), "scripted"))

    def send(self, message: Any) -> None:
        self.told.append(message)

    async def stop(self) -> None:
        self.stopped += 1
        self.die(WorkerDied("the engine was shut down"))

    def step(self, *deltas: Delta, events: tuple[Event, ...] = (), stats: m.EngineStats | None = None) -> None:
        self.hear(m.Batch(1.0, 2.0, len(deltas), list(deltas), list(events), stats or m.EngineStats()))

    @property
    def ids(self) -> list[str]:
        return [name for message in self.told if isinstance(message, m.Add) for name in message.ids]

    @property
    def aborted(self) -> list[str]:
        return [name for message in self.told if isinstance(message, m.Abort) for name in message.ids]


class Watcher:
    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.tenants: list[str] = []

    def arrived(self, sequences: Any, num_prompt: int, params: SamplingParams, arrival: float, tenant: str) -> None:
        self.heard.append(("arrived", list(sequences), num_prompt))
        self.tenants.append(tenant)

    def batch(self, batch: m.Batch, now: float) -> None:
        self.heard.append(("batch", [d.request_id for d in batch.deltas]))

    def ended(self, sequence: str, reason: str, now: float) -> None:
        self.heard.append(("ended", sequence, reason))

    def first_tokens(self, count: int, seconds: float) -> None:
        assert seconds >= 0
        self.heard.append(("first", count))


Scene = Callable[[AsyncLLM, Engine], Coroutine[Any, Any, None]]


def play(scene: Scene, most: int | None = None) -> None:
    async def run() -> None:
        engine = Engine()
        template = ChatTemplate("{% for m in messages %}<{{ m.content }}>{% endfor %}")
        llm = AsyncLLM.over(engine, CONFIG, TextSide(Spelled(), (2,), SamplingParams(max_tokens=7), template), 320, max_num_queued_reqs=most)
        async with llm:
            await asyncio.wait_for(scene(llm, engine), 20)

    asyncio.run(run())


def prompt(text: str = "ab") -> Prompt:
    return Prompt(text, [ord(c) for c in text])


async def read(generation: Any) -> list[RequestOutput]:
    return [output async for output in generation]


def texts(outputs: list[RequestOutput]) -> list[str]:
    return ["".join(s.text for s in output.outputs) for output in outputs]


async def turn(times: int = 5) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


def test_news_go_to_their_own_readers() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        tasks = [asyncio.create_task(read(llm.generate(prompt(), SamplingParams()))) for _ in range(2)]
        await turn()
        a, b = engine.ids
        engine.step(Delta(a, [ord("x")]), Delta(b, [ord("y")]))
        await turn()
        engine.step(Delta(b, [ord("z")], finish_reason="length"), Delta(a, [ord("w")]))
        await turn()
        assert tasks[1].done() and not tasks[0].done() and llm.num_open == 1
        engine.step(Delta(a, [2], finish_reason="stop"))
        (first, second) = await asyncio.gather(*tasks)
        assert texts(first) == ["x", "w", ""] and texts(second) == ["y", "z"]
        assert first[-1].finished and first[-1].outputs[0].finish_reason == "stop" and second[-1].outputs[0].finish_reason == "length"
        assert first[0].prompt == "ab" and llm.num_open == 0

    play(scene)


def test_a_slow_reader_gets_fewer_larger_pieces() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        news = llm.generate(prompt(), SamplingParams())
        for c in "abcde":
            engine.step(Delta(engine.ids[0], [ord(c)]))
        assert (await anext(news)).outputs[0].text == "abcde"
        engine.step(Delta(engine.ids[0], [ord("f")]))
        engine.step(Delta(engine.ids[0], [ord("g")], finish_reason="length"))
        rest = await read(news)
        assert texts(rest) == ["fg"] and rest[0].outputs[0].token_ids == [ord("f"), ord("g")] and rest[0].finished

    play(scene)


def test_everything_so_far() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        news = llm.generate(prompt(), SamplingParams(), deltas=False)
        engine.step(Delta(engine.ids[0], [ord("a")]))
        assert (await anext(news)).outputs[0].text == "a"
        engine.step(Delta(engine.ids[0], [ord("b")], finish_reason="length"))
        assert texts(await read(news)) == ["ab"] and await read(news) == []

    play(scene)


def test_a_request_counts_from_the_call_on() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        news = [llm.generate(prompt(), SamplingParams()), llm.generate("text", SamplingParams())]
        assert llm.num_open == 2 and llm.num_waiting == 1 and len(engine.ids) == 1  # the text is tokenized when it is read
        task = asyncio.create_task(anext(news[1]))
        while len(engine.ids) < 2:
            await asyncio.sleep(0.001)
        assert engine.told[-1].prompt == [ord(c) for c in "text"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert engine.aborted == engine.ids[1:] and llm.num_open == 1

    play(scene)


@pytest.mark.parametrize("how", ["close", "drop", "cancel", "break"])
def test_a_reader_that_leaves_takes_its_request_along(how: str) -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        news = llm.generate(prompt(), SamplingParams(n=2))
        engine.step(Delta(engine.ids[0], [ord("x")]))
        if how == "close":
            await news.aclose()
            await news.aclose()
            assert await read(news) == []
        elif how == "drop":
            del news
            await turn()
        elif how == "cancel":
            task = asyncio.create_task(read(news))
            await turn()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            async for _ in news:
                break
            del news
            await turn()
        assert sorted(engine.aborted) == sorted(engine.ids) and len(engine.ids) == 2
        assert llm.num_open == llm.num_waiting == 0 and await llm.drain(1)
        engine.step(*(Delta(name, finish_reason="abort") for name in engine.ids))  # heard by nobody
        assert not llm._board.sequences and not llm._board.flights

    play(scene)


def test_leaving_during_tokenization() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        for leave in (lambda news, task: task.cancel(), lambda news, task: asyncio.ensure_future(news.aclose())):
            news = llm.generate("text", SamplingParams())
            task = asyncio.create_task(read(news))
            await asyncio.sleep(0)
            leave(news, task)
            await asyncio.wait((task,), timeout=5)
            assert task.done()
        assert llm.num_open == 0 and llm._board.preparing == 0
        await asyncio.sleep(0.02)
        assert set(engine.aborted) == set(engine.ids)  # a tokenization that was too late to stop starts nothing that lasts

    play(scene)


def test_a_second_reader_is_refused_and_closing_wakes_the_first() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        news = llm.generate(prompt(), SamplingParams())
        task = asyncio.create_task(read(news))
        await turn()
        with pytest.raises(RuntimeError):
            await anext(news)
        await news.aclose()
        assert await asyncio.wait_for(task, 1) == []

    play(scene)


def test_an_id_is_free_again_at_once_and_old_news_do_not_reach_its_new_owner() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        old = llm.generate(prompt(), SamplingParams(), request_id="same")
        with pytest.raises(InvalidRequest, match="same") as caught:
            llm.generate(prompt(), SamplingParams(), request_id="same")
        assert caught.value.param == "request_id" and llm.num_open == 1
        await old.aclose()
        new = llm.generate(prompt(), SamplingParams(), request_id="same")
        first, second = engine.ids
        assert first != second
        engine.step(Delta(first, [ord("o")], finish_reason="abort"), Delta(second, [ord("n")], finish_reason="length"))
        outputs = await read(new)
        assert texts(outputs) == ["n"] and outputs[-1].request_id == "same"
        assert llm.generate(prompt(), SamplingParams(), request_id="same/0").request_id == "same/0"

    play(scene)


def test_n_that_looks_like_another_request() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        news = [llm.generate(prompt(), SamplingParams(n=2), request_id="a"), llm.generate(prompt(), SamplingParams(), request_id="a/0")]
        assert len(set(engine.ids)) == 3
        engine.step(*(Delta(name, [ord("0") + place], finish_reason="length") for place, name in enumerate(engine.ids)))
        assert texts(await read(news[0])) == ["01"] and texts(await read(news[1])) == ["2"]

    play(scene)


def test_a_stop_string_aborts_its_sequence_only() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        watcher = Watcher()
        llm.listeners.append(watcher)
        news = llm.generate(prompt(), SamplingParams(n=2, stop=["END"]))
        a, b = engine.ids
        engine.step(Delta(a, [ord(c) for c in "okEND"]), Delta(b, [ord("x")]))
        assert engine.aborted == [a] and ("ended", a, "stop") in watcher.heard
        engine.step(Delta(a, finish_reason="abort"), Delta(b, [ord("y")], finish_reason="length"))
        outputs = await read(news)
        ends = {s.index: (s.text, s.finish_reason, s.stop_reason) for s in outputs[-1].outputs}
        assert ends == {0: ("ok", "stop", "END"), 1: ("xy", "length", None)}
        assert [h for h in watcher.heard if h[0] == "ended"] == [("ended", a, "stop"), ("ended", b, "length")]

    play(scene)


def test_abort_by_id() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        news = llm.generate(prompt(), SamplingParams(), request_id="a")
        assert await llm.abort("a") and not await llm.abort("nobody") and engine.aborted == engine.ids
        engine.step(Delta(engine.ids[0], finish_reason="abort"))
        assert (await read(news))[-1].outputs[0].finish_reason == "abort" and not await llm.abort("a")
        text = llm.generate("text", SamplingParams(), request_id="b")
        await llm.abort_all()
        with pytest.raises(Cancelled):
            await read(text)
        assert llm.num_open == 0 and llm._board.preparing == 0

    play(scene)


def test_errors_of_one_request() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        impossible = ((SamplingParams(logprobs=21), "logprobs"), (SamplingParams(stop_token_ids=[999]), "stop_token_ids"), ("no", "sampling_params"))
        for bad, words in impossible:
            with pytest.raises(InvalidRequest, match=words):
                llm.generate(prompt(), bad)  # type: ignore[arg-type]
        for urgency in (2**63, -(2**63) - 1, True, "1", 0.5, 1):  # 1: first come, first served
            with pytest.raises(InvalidRequest) as caught:
                llm.generate(prompt(), SamplingParams(), priority=urgency)  # type: ignore[arg-type]
            assert caught.value.param == "priority"
        for tenant in (None, 5, "x" * 257, "\udc80"):
            with pytest.raises(InvalidRequest) as caught:
                llm.generate(prompt(), SamplingParams(), tenant=tenant)  # type: ignore[arg-type]
            assert caught.value.param == "tenant"
        for name in ("", 5):
            with pytest.raises(InvalidRequest, match="request_id"):
                llm.generate(prompt(), SamplingParams(), request_id=name)  # type: ignore[arg-type]
        for given, kind in (("x" * CONTEXT, ContextTooLong), ([1000], InvalidRequest), ([], InvalidRequest), ({"no": 1}, InvalidRequest)):
            with pytest.raises(kind):
                await read(llm.generate(given, SamplingParams()))
        assert llm.num_open == llm._board.preparing == 0 and not engine.told
        llm.listeners.append(Watcher())
        news = llm.generate(prompt(), SamplingParams(max_tokens=2**31 - 1), priority=0, tenant="team")
        assert [message.tenant for message in engine.told if isinstance(message, m.Add)] == ["team"] and llm.listeners[0].tenants == ["team"]
        engine.step(Delta(engine.ids[0], finish_reason="error", error="why"))
        sample = (await read(news))[-1].outputs[0]
        assert (sample.finish_reason, sample.stop_reason) == ("error", "why")

    play(scene)


def test_text_that_cannot_be_made_ends_one_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        news = [llm.generate(prompt(), SamplingParams()) for _ in range(2)]
        a, b = engine.ids
        engine.step(Delta(a, [-5]), Delta(b, [ord("x")], finish_reason="length"))
        with pytest.raises(WorkerDied, match="text of this answer"):
            await read(news[0])
        assert texts(await read(news[1])) == ["x"] and engine.aborted == [a] and llm.failure is None

    play(scene)


# -- the queue's bound


def room(llm: AsyncLLM, n: int = 1) -> None:
    """Whether so many more may wait."""
    with llm.places() as places:
        places.take(n)


def test_a_full_queue_refuses_before_any_work() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        kept = [llm.generate(prompt(), SamplingParams()), llm.generate("text", SamplingParams())]
        room(llm)
        with pytest.raises(QueueFull) as caught:
            room(llm, 2)
        assert 1 <= caught.value.retry_after <= 60 and "max_num_queued_reqs" in caught.value.message
        kept.append(llm.generate("text", SamplingParams()))
        for given in ("text", prompt()):
            with pytest.raises(QueueFull):
                llm.generate(given, SamplingParams())
        assert llm.num_open == 3
        engine.step(events=(Admitted(engine.ids[0], 0, 0, False),))
        room(llm)
        await kept[1].aclose()
        await kept[2].aclose()
        room(llm, 99)  # nobody waits: a request larger than the whole queue must be served at some time
        assert llm.num_waiting == 0 and llm.num_open == 1

    play(scene, most=3)


def test_a_place_is_held_from_the_look_for_room_until_the_engine_has_admitted_what_it_was_for() -> None:
    """Between rendering, tokenization and the engine's queue too: nobody else finds that room."""
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        def full(n: int = 1) -> None:
            with pytest.raises(QueueFull):
                room(llm, n)

        with llm.places() as places:
            places.take(3)
            full(2)
            await llm.render([{"role": "user", "content": "x"}])
            full(2)
            ready = await llm.tokenize("x")
            full(2)
            first = llm.generate(ready, SamplingParams(n=2), places=places)
            full(2)
            room(llm)  # two wait in the queue, and one is on its way
            for bad, kind in ((SamplingParams(logprobs=21), InvalidRequest), ("no", InvalidRequest)):
                with pytest.raises(kind):
                    llm.generate(ready, bad, places=places)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest, match="in use"):
                llm.generate(ready, SamplingParams(), request_id=first.request_id, places=places)
            assert llm.num_waiting == 2 and llm._board.preparing == 1
        assert llm._board.preparing == 0 and llm.num_waiting == 2
        engine.step(events=tuple(Admitted(name, 0, 0, False) for name in engine.ids))
        room(llm, 99)

    play(scene, most=4)


def test_what_the_engine_cannot_be_given_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise ContextTooLong("it does not fit the pool", "prompt")

        monkeypatch.setattr(llm.inputs, "requests", refuse)
        for given in (prompt(), "text"):
            with pytest.raises(ContextTooLong):
                await read(llm.generate(given, SamplingParams(n=2)))
            assert llm.num_open == llm.num_waiting == llm._board.preparing == 0 and await llm.drain(1)

    play(scene, most=2)


def test_ended_and_left_requests_give_their_place_back() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        for _ in range(5):
            first, second = llm.generate(prompt(), SamplingParams(n=2)), llm.generate(prompt(), SamplingParams())
            with pytest.raises(QueueFull):
                room(llm)
            await first.aclose()
            engine.step(Delta(engine.ids[-1], finish_reason="error", error="refused"))
            await read(second)
            assert llm.num_waiting == 0

    play(scene, most=3)


def test_retry_after_follows_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        kept = [llm.generate(prompt(), SamplingParams()) for _ in range(10)]
        for name in engine.ids[:4]:
            engine.step(events=(Admitted(name, 0, 0, False),))  # at 1.0
        monkeypatch.setattr("octavo.engine.async_engine.time.monotonic", lambda: 9.0)  # 4 in 8 s, and 6 wait
        with pytest.raises(QueueFull) as caught:
            room(llm, 5)
        assert caught.value.retry_after == 12
        assert kept

    play(scene, most=10)


@pytest.mark.parametrize("bound", [0, -1, True, 1.5, "8"])
def test_impossible_bounds(bound: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        AsyncLLM("anything", max_num_queued_reqs=bound)
    assert caught.value.param == "max_num_queued_reqs"


# -- the life of the engine


def test_a_death_reaches_everybody() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        watcher = Watcher()
        llm.listeners.append(watcher)
        news = [llm.generate(prompt(), SamplingParams()) for _ in range(3)]
        waiting, text = asyncio.create_task(read(news[0])), llm.generate("text", SamplingParams())
        await turn()
        engine.step(Delta(engine.ids[1], [ord("x")]), Delta(engine.ids[2], [ord("y")], finish_reason="length"))
        engine.die(WorkerDied("it burnt"))
        assert llm.on_death.is_set() and llm.health() == llm.failure == "it burnt" and llm.num_open == llm.num_waiting == 0
        with pytest.raises(WorkerDied, match="it burnt"):
            await waiting
        assert (await anext(news[1])).outputs[0].text == "x"  # what came before is told
        with pytest.raises(WorkerDied, match="it burnt"):
            await anext(news[1])
        assert texts(await read(news[2])) == ["y"]  # it had ended
        with pytest.raises(WorkerDied, match="it burnt"):
            await read(text)
        for call in (lambda: llm.generate(prompt(), SamplingParams()), llm.places, lambda: llm.generate("x", SamplingParams())):
            with pytest.raises(WorkerDied, match="it burnt"):
                call()
        with pytest.raises(WorkerDied):
            await llm.tokenize("x")
        assert await llm.drain(1)
        assert sorted(h[2] for h in watcher.heard if h[0] == "ended") == ["error", "error", "length"]

    play(scene)


def test_health(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        now = 1000.0
        monkeypatch.setattr("octavo.engine.async_engine.time.monotonic", lambda: now)
        assert llm.health() is None
        now += 500
        assert llm.health() is None, "an idle engine may be silent"
        news = llm.generate(prompt(), SamplingParams())
        now += llm.stall_seconds - 1
        assert llm.health() is None
        other = llm.generate(prompt(), SamplingParams())  # more work is no progress
        now += 2
        assert "61 s" in (llm.health() or "") and "2 sequences" in (llm.health() or "")
        engine.step()
        assert llm.health() is None
        await news.aclose()
        await other.aclose()

    play(scene)


def test_before_the_start_and_after_the_end() -> None:
    async def run() -> None:
        engine = Engine()
        llm = AsyncLLM.over(engine, CONFIG, TextSide(None, (), SamplingParams(), None), 320)
        assert llm.health() == "the engine is starting"
        with pytest.raises(WorkerDied, match="start"):
            llm.generate(prompt(), SamplingParams())
        await asyncio.gather(llm.start(), llm.start())
        await llm.start()
        assert llm.instruction_set == "scripted" and llm.ledger == Ledger(1, 2, 3, 4) and llm.config.model.model == "a-name"
        assert llm.max_model_len == CONTEXT and llm.vocab_size == 320
        with pytest.raises(InvalidRequest, match="tokenizer"):
            await llm.render([])
        with pytest.raises(InvalidRequest, match="tokenizer"):
            await llm.tokenize("text")
        news = llm.generate(prompt(), SamplingParams())
        await llm.shutdown()
        await llm.shutdown()
        with pytest.raises(WorkerDied, match="shut down"):
            await read(news)
        assert llm.health() == "it was shut down" and not llm.on_death.is_set()
        with pytest.raises(WorkerDied, match="shut down"):
            llm.places()

    asyncio.run(run())


def test_drain() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        assert await llm.drain(0.01)
        news = llm.generate(prompt(), SamplingParams())
        assert not await llm.drain(0.01)
        waiter = asyncio.create_task(llm.drain(10))
        await turn()
        engine.step(Delta(engine.ids[0], finish_reason="length"))
        assert await asyncio.wait_for(waiter, 1) and news

    play(scene)


def test_listeners_hear_everything_once_and_cannot_break_it(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        pass

    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        watcher = Watcher()
        llm.listeners += [Broken(), watcher]  # type: ignore[list-item]
        stats = m.EngineStats(running=3, kv_total=9)
        first, second = llm.generate(prompt(), SamplingParams()), llm.generate(prompt("abc"), SamplingParams(n=2))
        a, b, c = engine.ids
        engine.step(Delta(a, [ord("x")], finish_reason="length"), Delta(b, [ord("y")]), stats=stats)
        await second.aclose()
        await read(first)
        assert watcher.heard == [("arrived", [a], 2), ("arrived", [b, c], 3), ("batch", [a, b]), ("ended", a, "length"),
                                 *sorted([("ended", b, "abort"), ("ended", c, "abort")], key=lambda h: watcher.heard.index(h)), ("first", 1)]
        assert llm.stats is stats and llm.num_running == 3

    play(scene)


def test_first_tokens_are_told_when_their_reader_has_dealt_with_them() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        watcher = Watcher()
        llm.listeners.append(watcher)

        def told() -> list[int]:
            return [what[1] for what in watcher.heard if what[0] == "first"]

        news = llm.generate(prompt(), SamplingParams(n=3))
        a, b, c = engine.ids
        engine.step(Delta(a, [ord("x")]), Delta(b, [ord("x")]))
        engine.step(Delta(a, [ord("y")]))
        await anext(news)
        assert told() == []
        waiting = asyncio.ensure_future(anext(news))
        await turn()
        assert told() == [2], "it has come back for more"
        engine.step(Delta(a, [ord("z")], finish_reason="stop"), Delta(b, [ord("z")], finish_reason="stop"))
        await waiting
        engine.step(Delta(c, [ord("x")], finish_reason="stop"))
        await anext(news)
        assert told() == [2]
        await news.aclose()
        assert told() == [2, 1], "it left, and had them"

        unread = llm.generate(prompt(), SamplingParams())
        engine.step(Delta(engine.ids[-1], [ord("x")]))
        await unread.aclose()
        assert told() == [2, 1], "nobody had it"

    play(scene)


def test_times_of_a_request() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        news = llm.generate(prompt(), SamplingParams())
        name = engine.ids[0]
        engine.step(events=(Admitted(name, 0, 0, False),))
        engine.step(events=(Preempted(name, "x", 1, 1), Preempted("nobody", "x", 1, 1)))
        engine.step(Delta(name, [ord("x")], finish_reason="length"), events=(Admitted(name, 0, 0, True),))
        metrics = (await read(news))[-1].metrics
        assert metrics is not None and metrics.first_scheduled == 1.0 and metrics.preemptions == 1 and metrics.finished == metrics.first_token

    play(scene)


# -- texts


def test_a_text_that_cannot_fit_is_refused_untokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        calls: list[int] = []
        monkeypatch.setattr(Spelled, "encode", lambda self, text, add_special_tokens=True: calls.append(len(text)) or [5])
        for fits in ("x" * 2 * CONTEXT, "é" * CONTEXT):  # the longest token has 2 bytes
            await llm.tokenize(fits)
        assert calls == [200, 100]
        for given in ("x" * (2 * CONTEXT + 1), "é" * (CONTEXT + 1), {"prompt": "x" * 10**6}, "\ud800" * 10**5):
            with pytest.raises(ContextTooLong, match=f"{CONTEXT} tokens.*at most {CONTEXT - 1} tokens") as caught:
                await llm.tokenize(given)
            assert caught.value.param == "prompt"
        assert len(calls) == 2
        assert (await llm.tokenize({"prompt": "x" * 10**6, "prompt_token_ids": [7]})).ids == [7]  # the text is for show

    play(scene)


def test_what_normalizers_may_shrink() -> None:
    def longest(normalizer: str) -> float:
        tokenizer = Spelled()
        tokenizer._backend = type("Backend", (), {"normalizer": type(normalizer, (), {})()})()
        return TextSide(tokenizer, (), SamplingParams(), None).longest_token()

    assert TextSide(Spelled(), (), SamplingParams(), None).longest_token() == 2
    assert longest("NFC") == 6 and longest("Strip") == math.inf == longest("Sequence")
    assert TextSide(None, (), SamplingParams(), None).longest_token() == math.inf


def test_templates() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        messages = [{"role": "user", "content": "hi"}]
        assert await llm.render(messages) == "<hi>"
        assert await llm.render(messages, chat_template="{{ messages[0].content }}{{ x }}", variables={"x": 3}) == "hi3"
        with pytest.raises(InvalidRequest):
            await llm.render([{"role": 5}])

    play(scene)


def test_nothing_is_kept_of_what_has_ended() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        async def one(place: int) -> None:
            news = llm.generate(prompt(), SamplingParams(n=1 + place % 3))
            names = engine.told[-1].ids
            if place % 4 == 0:
                await news.aclose()
            else:
                engine.step(*(Delta(name, [ord("x")], finish_reason="length") for name in names))
                await read(news)
            engine.told.clear()

        for place in range(50):
            await one(place)
        gc.collect()
        before = len(gc.get_objects())
        for place in range(400):
            await one(place)
        gc.collect()
        assert len(gc.get_objects()) - before < 40
        assert not llm._board.flights and not llm._board.sequences and not llm._board.queued and llm._board.preparing == 0

    play(scene)


def test_work_in_the_threads_is_given_up() -> None:
    """What has not begun when its caller leaves never runs."""
    import threading

    from octavo.engine.async_engine import TEXT_THREADS

    async def run() -> None:
        llm = AsyncLLM.over(Engine(), CONFIG, TextSide(Spelled(), (), SamplingParams(), None), 320)
        async with llm:
            gate, ran = threading.Event(), []
            busy = [asyncio.ensure_future(llm.in_thread(gate.wait)) for _ in range(TEXT_THREADS)]
            late = asyncio.ensure_future(llm.in_thread(lambda: ran.append(1)))
            await asyncio.sleep(0)
            late.cancel()
            await asyncio.wait([late])
            gate.set()
            await asyncio.gather(*busy)
            await llm.in_thread(lambda: None)
            assert late.cancelled() and not ran

    asyncio.run(run())


def test_a_reset_of_the_cache_is_awaited_until_it_is_done() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        calls = [asyncio.ensure_future(llm.reset_prefix_cache()) for _ in range(3)]
        await turn()
        assert engine.told == [m.ResetCache()] * 3 and not any(call.done() for call in calls)
        calls[0].cancel()
        engine.hear(m.Batch(1.0, 2.0, 0, [], [], m.EngineStats(), 2))
        await turn()
        assert calls[0].cancelled() and calls[1].result() is True and not calls[2].done()
        engine.die(WorkerDied("gone"))
        with pytest.raises(WorkerDied, match="gone"):
            await calls[2]
        with pytest.raises(WorkerDied, match="gone"):
            await llm.reset_prefix_cache()
        assert len(engine.told) == 3

    play(scene)
