"""Clients that go, that read slowly, that come without a key: what they leave behind and what others notice."""

import asyncio
import json
import sys
from typing import Any

import pytest
from tests.engine.test_async_engine import Engine, Watcher, play, turn
from tests.server.asgi import CHAT, COMPLETIONS, Wire, client, settled
from tests.server.scripted import END, ScriptedLLM

from octavo import AsyncLLM
from octavo.core.output import Delta
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings

BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "p"}), (COMPLETIONS, {"prompt": ["p", "q", "r"], "n": 2}), (CHAT, {"messages": [{"role": "user", "content": "p"}]}),
]
LETTERS = [[byte] for byte in b"abcdefgh"] + [[END]]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["before the first news", "in the middle"])
def test_a_client_that_goes_ends_its_requests(path: str, body: dict[str, Any], stream: bool, when: str) -> None:
    async def run() -> None:
        llm = ScriptedLLM(LETTERS)
        llm.hold = asyncio.Event()
        prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
        wire = Wire(create_app(llm, ServerSettings()), path, body | {"stream": stream})
        await settled(lambda: llm.num_open == prompts)
        if when == "in the middle":
            llm.steps = 3
            llm.hold.set()
            await settled(lambda: llm.steps <= 0)
        wire.go()
        await asyncio.wait_for(wire.task, 5)
        assert llm.num_open == 0
        assert len(asyncio.all_tasks()) == 1, "a task is left behind"

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_cancelled_by_the_server(stream: bool) -> None:
    async def run() -> None:
        llm = ScriptedLLM(LETTERS)
        llm.hold = asyncio.Event()
        wire = Wire(create_app(llm, ServerSettings()), COMPLETIONS, {"prompt": ["p", "q"], "stream": stream})
        await settled(lambda: llm.num_open == 2)
        wire.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wire.task
        assert llm.num_open == 0 and len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_slow_reader_holds_nobody_up() -> None:
    async def run() -> None:
        llm = ScriptedLLM(LETTERS)
        app = create_app(llm, ServerSettings())
        slow = Wire(app, COMPLETIONS, {"prompt": "p", "stream": True})
        slow.reading.clear()
        for _ in range(3):
            quick = Wire(app, COMPLETIONS, {"prompt": "p", "stream": True})
            assert b"[DONE]" in b"".join([part async for part in quick.bodies()])
            await quick.task
        assert slow.sent.empty() and not slow.task.done()
        slow.reading.set()
        assert b"[DONE]" in b"".join([part async for part in slow.bodies()])
        await slow.task

    asyncio.run(run())


def test_a_client_that_goes_while_its_body_is_read() -> None:
    async def run() -> None:
        llm = ScriptedLLM(LETTERS)
        wire = Wire(create_app(llm, ServerSettings()), COMPLETIONS, {"prompt": "p"})
        wire._incoming.get_nowait()
        wire._incoming.put_nowait({"type": "http.request", "body": b'{"pro', "more_body": True})
        wire.go()
        await asyncio.wait_for(wire.task, 5)
        assert llm.tokenized == 0 and wire.sent.empty()

    asyncio.run(run())


def test_request_ids() -> None:
    async def run() -> None:
        async with client(create_app(ScriptedLLM(LETTERS), ServerSettings())) as http:
            named = await http.post(COMPLETIONS, json={"prompt": "p"}, headers={"X-Request-Id": "mine-1"})
            assert named.headers["x-request-id"] == "mine-1" and named.json()["id"] == "cmpl-mine-1"
            unnamed = await http.post(COMPLETIONS, json={"prompt": "p"})
            assert unnamed.json()["id"] == f"cmpl-{unnamed.headers['x-request-id']}"
            for bad in ("x" * 129, "a b", ""):
                other = await http.get("/nothing", headers={"X-Request-Id": bad})
                assert len(other.headers["x-request-id"]) == 32
            twice = await asyncio.gather(*(http.post(COMPLETIONS, json={"prompt": "p", "request_id": "same"}) for _ in range(3)))
            assert [response.status_code for response in twice] == [200] * 3

    asyncio.run(run())


class Metrics:
    """Stands in for observe.metrics."""

    def render(self) -> tuple[bytes, str]:
        return b"octavo:things 1\n", "text/plain; version=0.0.4"


def test_api_keys() -> None:
    async def run() -> None:
        app = create_app(ScriptedLLM(LETTERS), ServerSettings(api_keys=("first", "zweiter-schlüssel")), Metrics())
        routes = ["/v1/models", "/v1/models/scripted", "/version", "/load", "/metrics", "/openapi.json", "/nothing"]
        async with client(app) as http:
            for path in ("/health", "/ping"):
                assert (await http.get(path)).status_code == 200
            values = (b"Bearer", b"Bearer firs", b"Bearer first2", b"first", b"Basic first", b"Bearer \xff\xfe")
            for wrong in ({}, {b"X-Api-Key": b"first"}, *({b"Authorization": value} for value in values)):
                for path in routes:
                    response = await http.get(path, headers=wrong)
                    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
                    assert response.json()["error"]["code"] == "invalid_api_key"
                for path in (COMPLETIONS, "/reset_prefix_cache"):
                    assert (await http.post(path, content=b"{", headers=wrong)).status_code == 401
            for key in ("first", "zweiter-schlüssel"):
                for path in routes:
                    found = await http.get(path, headers={b"authorization": f"bearer  {key} ".encode()})
                    assert found.status_code == (404 if path == "/nothing" else 200)
        async with client(create_app(ScriptedLLM(), ServerSettings())) as http:
            assert (await http.get("/v1/models")).status_code == 200 and (await http.get("/metrics")).status_code == 404

    asyncio.run(run())


def test_cors_only_where_asked_for() -> None:
    preflight = {"Origin": "https://a.test", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}

    async def run() -> None:
        async with client(create_app(ScriptedLLM(), ServerSettings(cors_origins=("https://a.test",), api_keys=("k",)))) as http:
            allowed = await http.options(COMPLETIONS, headers=preflight)
            assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://a.test"
            assert "authorization" in allowed.headers["access-control-allow-headers"]
            assert "access-control-allow-origin" not in (await http.options(COMPLETIONS, headers=preflight | {"Origin": "https://b.test"})).headers
            denied = await http.get("/v1/models", headers={"Origin": "https://a.test"})
            assert denied.status_code == 401 and denied.headers["access-control-allow-origin"] == "https://a.test"
        async with client(create_app(ScriptedLLM(), ServerSettings())) as http:
            assert "access-control-allow-origin" not in (await http.get("/ping", headers={"Origin": "https://a.test"})).headers

    asyncio.run(run())


def test_prompts_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")

    async def run() -> None:
        async with client(create_app(ScriptedLLM([[65], RuntimeError("broken")]), ServerSettings())) as http:
            await http.post(COMPLETIONS, json={"prompt": "my secret"})
            await http.post(COMPLETIONS, json={"prompt": "my secret", "stream": True})
            await http.post(COMPLETIONS, json={"prompt": "my secret", "temperature": -1})

    asyncio.run(run())
    assert "broken" in caplog.text and "secret" not in caplog.text


def test_what_large_bodies_hold_is_not_walked_through() -> None:
    """5 MB of each shape, parsed and refused or accepted as far as tokenizing, in a number of calls that does not grow with them."""
    text = json.dumps("word " * 1_000_000).encode()
    shapes = {
        "text": text, "ids": b"[" + b"12345," * 830_000 + b"1]", "lists": b"[" + b"[1]," * 1_250_000 + b"[1]]",
        "empty lists": b"[" + b"[]," * 1_600_000 + b"[]]", "deep": b"[" * 2_500_000 + b"]" * 2_500_000,
    }

    async def run() -> None:
        llm = ScriptedLLM(context=100)
        app = create_app(llm, ServerSettings())
        for name, shape in shapes.items():
            for path, body in ((COMPLETIONS, b'{"prompt":' + shape + b"}"), (CHAT, b'{"messages":[{"role":"user","content":' + shape + b"}]}")):
                calls = 0

                def count(frame: Any, event: str, what: Any) -> None:
                    nonlocal calls
                    calls += event in ("call", "c_call")

                wire = Wire(app, path, body)
                sys.setprofile(count)
                try:
                    await wire.task
                finally:
                    sys.setprofile(None)
                assert (await wire.sent.get())["status"] == 400
                assert calls < 20_000, f"{name} at {path} took {calls} calls"

    asyncio.run(run())


def test_the_first_token_counts_when_it_is_written() -> None:
    async def scene(llm: AsyncLLM, engine: Engine) -> None:
        watcher = Watcher()
        llm.listeners.append(watcher)
        wire = Wire(create_app(llm, ServerSettings()), COMPLETIONS, {"prompt": [97, 98], "stream": True})
        await settled(lambda: engine.ids)
        await settled(lambda: not wire.sent.empty())  # the head
        wire.reading.clear()
        engine.step(Delta(engine.ids[0], [ord("x")]))
        await turn(20)
        assert ("first", 1) not in watcher.heard, "the client's socket takes nothing"
        wire.reading.set()
        await settled(lambda: ("first", 1) in watcher.heard)
        engine.step(Delta(engine.ids[0], [ord("y")], finish_reason="stop"))
        await wire.task
        assert watcher.heard.count(("first", 1)) == 1

        whole = Wire(create_app(llm, ServerSettings()), COMPLETIONS, {"prompt": [97, 98], "n": 2})
        await settled(lambda: len(engine.ids) == 3)
        engine.step(*(Delta(name, [ord("x")]) for name in engine.ids[1:]))
        await settled(lambda: ("first", 2) in watcher.heard)
        engine.step(*(Delta(name, [ord("y")], finish_reason="stop") for name in engine.ids[1:]))
        await whole.task

    play(scene)
