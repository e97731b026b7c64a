"""The bound of the queue (max_num_queued_reqs) under bursts, over the real AsyncLLM and a scripted engine."""

import asyncio
import json
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.engine.test_async_engine import CONFIG, Engine, Spelled
from tests.server.asgi import CHAT, COMPLETIONS, Wire, client, settled

from octavo import AsyncLLM, SamplingParams
from octavo.core.output import Delta
from octavo.engine.textside import TextSide
from octavo.observe.events import Admitted
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings
from octavo.text.chat_template import ChatTemplate

BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "text"}, CHAT: {"messages": [{"role": "user", "content": "text"}]}, "/tokenize": {"prompt": "text"},
}
Scene = Callable[[AsyncLLM, Engine, Any], Coroutine[Any, Any, None]]


class Tokenizer(Spelled):
    """For the server, which asks for a little more."""

    prefix = suffix = ()


def play(scene: Scene, most: int) -> None:
    async def run() -> None:
        engine = Engine()
        text = TextSide(Tokenizer(), (2,), SamplingParams(max_tokens=7), ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}"))
        async with AsyncLLM.over(engine, CONFIG, text, 320, max_num_queued_reqs=most) as llm:
            await asyncio.wait_for(scene(llm, engine, create_app(llm, ServerSettings())), 60)
            assert llm.num_open == llm.num_waiting == llm._board.preparing == 0

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_burst_leaves_no_more_waiting_than_the_bound(path: str, stream: bool) -> None:
    """Whenever its requests come: some while the first ones are on their way from the tokenizer to the engine."""
    async def scene(llm: AsyncLLM, engine: Engine, app: Any) -> None:
        async with client(app) as http:
            for _ in range(3):
                engine.told.clear()
                burst = []
                for turns in (0, 1, 2, 3) * 25:
                    burst.append(asyncio.ensure_future(http.post(path, json=BODIES[path] | {"stream": stream})))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    assert llm.num_waiting + llm._board.preparing <= 2
                await settled(lambda burst=burst: sum(each.done() for each in burst) == 98)
                await settled(lambda: llm.num_waiting == 2)
                assert len(engine.ids) == 2 and llm._board.preparing == 0
                engine.step(*(Delta(name, [ord("x")], finish_reason="length") for name in engine.ids),
                            events=tuple(Admitted(name, 0, 0, False) for name in engine.ids))
                answers = await asyncio.gather(*burst)
                assert sorted(each.status_code for each in answers) == [200] * 2 + [429] * 98

    play(scene, most=2)


@pytest.mark.parametrize(("path", "body"), [
    (COMPLETIONS, {"prompt": ["a", "b"]}), (COMPLETIONS, {"prompt": "a", "n": 2}), (CHAT, {"n": 2}),
    (COMPLETIONS, {"prompt": ["a", "b"], "echo": True, "max_tokens": 0, "logprobs": 1}),
])
def test_every_answer_of_a_request_holds_a_place(path: str, body: dict[str, Any]) -> None:
    async def scene(llm: AsyncLLM, engine: Engine, app: Any) -> None:
        wires = [Wire(app, path, BODIES[path] | body) for _ in range(20)]
        await settled(lambda: sum(wire.task.done() for wire in wires) == 18)
        await settled(lambda: llm.num_waiting == 4)
        assert len(engine.ids) == 4
        for wire in wires:
            wire.go()
        await asyncio.gather(*(wire.task for wire in wires))

    play(scene, most=5)


def test_no_place_is_lost_whatever_ends_a_request() -> None:
    """Clients that go at any moment, texts that cannot be tokenized, fields that are wrong, aborts."""
    draw = random.Random(5)
    spoiled = (
        {}, {}, {"prompt": "x" * 150}, {"prompt": ["fine", "x" * 150]}, {"max_tokens": 99}, {"temperature": -1}, {"n": 3},
        {"echo": True, "max_tokens": 0},
    )

    async def scene(llm: AsyncLLM, engine: Engine, app: Any) -> None:
        wires, most = [], 0
        for place in range(300):
            path = draw.choice(list(BODIES))
            body = BODIES[path] | (draw.choice(spoiled) if path == COMPLETIONS else {})
            wires.append(Wire(app, path, json.dumps(body | ({"stream": draw.random() < 0.5} if path != "/tokenize" else {})).encode()))
            for _ in range(draw.randint(0, 6)):
                await asyncio.sleep(draw.choice((0, 0, 0.001)))
                most = max(most, llm.num_waiting + llm._board.preparing)
            if draw.random() < 0.6:
                draw.choice(wires).go()
            if place % 50 == 49:
                await llm.abort_all()
                engine.step(*(Delta(name, finish_reason="abort") for name in engine.ids))
        for wire in wires:
            wire.go()
        await asyncio.gather(*(wire.task for wire in wires))
        await settled(lambda: llm.num_open == 0)
        assert most == 6

    play(scene, most=6)
