"""Streamed text equals the whole text, wherever characters and stop strings are cut between tokens, and no chunk is empty."""

import asyncio
import itertools
import random
from typing import Any

import pytest
from tests.server.asgi import CHAT, COMPLETIONS, client, events, joined
from tests.server.scripted import END, ScriptedLLM

from octavo.server.app import create_app
from octavo.server.settings import ServerSettings

TEXT = "añ 한😀e\u0301 STOP→tail"
DATA = TEXT.encode()
STOPS: list[tuple[list[str], str]] = [
    ([], TEXT), (["STOP"], "añ 한😀e\u0301 "), (["😀"], "añ 한"), (["→t", "OPQ"], "añ 한😀e\u0301 STOP"), (["tailor", "ail!"], TEXT),
    (["\u0301 S"], "añ 한😀e"),
]


def partitions() -> list[list[list[int]]]:
    """Every cut into three, single bytes, everything at once, and some at random."""
    size, draw = len(DATA), random.Random(5)
    cuts = [list(pair) for pair in itertools.combinations(range(1, size), 2)]
    cuts += [[], list(range(1, size))] + [sorted(draw.sample(range(1, size), draw.randrange(3, 9))) for _ in range(40)]
    return [[list(DATA[a:b]) for a, b in itertools.pairwise([0, *cut, size])] + [[END]] for cut in cuts]


def body(path: str, **more: Any) -> dict[str, Any]:
    return ({"prompt": "p"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "p"}]}) | {"max_tokens": 100} | more


def told(path: str, chunk: dict[str, Any]) -> str:
    choice = chunk["choices"][0]
    return choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("stop", "want"), STOPS, ids=[",".join(stop) or "none" for stop, _ in STOPS])
def test_every_cut(path: str, stop: list[str], want: str) -> None:
    llm = ScriptedLLM()
    app = create_app(llm, ServerSettings())

    async def run() -> None:
        async with client(app) as http:
            for script in partitions():
                llm.script = script
                chunks = events(await http.post(path, json=body(path, stop=stop, stream=True)))
                assert chunks.pop() == "[DONE]"
                assert joined(chunks) == want, script
                news = chunks[1:] if path == CHAT else chunks
                assert all(told(path, chunk) for chunk in news[:-1]), "an empty chunk before the last"
                ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
                assert ends == [None] * (len(chunks) - 1) + ["stop"]
                found = news[-1]["choices"][0]["stop_reason"]
                assert found in stop if want != TEXT else found is None
            llm.script = partitions()[-1]
            whole = (await http.post(path, json=body(path, stop=stop))).json()["choices"][0]
            assert (whole["text"] if path == COMPLETIONS else whole["message"]["content"]) == want
        assert llm.num_open == 0

    asyncio.run(run())


@pytest.mark.parametrize("interval", [1, 3, 7, 100])
def test_interval_gathers_tokens_after_the_first_text(interval: int) -> None:
    llm = ScriptedLLM([[byte] for byte in b"abcdefghijklmnop"] + [[END]])

    async def run() -> list[Any]:
        async with client(create_app(llm, ServerSettings(stream_interval=interval))) as http:
            return events(await http.post(COMPLETIONS, json=body(COMPLETIONS, stream=True, return_token_ids=True)))

    chunks = asyncio.run(run())[:-1]
    assert joined(chunks) == "abcdefghijklmnop"
    sizes = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
    assert sum(sizes) == 17 and sizes[0] == 1 and set(sizes[1:-1]) <= {interval}
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [ord("p")] and "prompt_token_ids" not in chunks[-1]["choices"][0]


def test_a_prompt_that_ends_inside_a_character_leaks_nothing() -> None:
    begun, rest = "é".encode()[:1], "é".encode()[1:]
    for script, text in (([list(rest + b"!")], "é!"), ([list(b"x!")], "x!")):
        llm = ScriptedLLM([*script, [END]])

        async def run(llm: ScriptedLLM = llm) -> tuple[list[Any], Any, Any]:
            async with client(create_app(llm, ServerSettings())) as http:
                given = {"prompt": list(b"ab" + begun), "max_tokens": 9}
                streamed = events(await http.post(COMPLETIONS, json=given | {"stream": True}))
                plain = (await http.post(COMPLETIONS, json=given)).json()
                echoed = (await http.post(COMPLETIONS, json=given | {"echo": True})).json()
                return streamed, plain["choices"][0]["text"], echoed["choices"][0]["text"]

        streamed, plain, echoed = asyncio.run(run())
        assert joined(streamed) == plain == text and echoed == "ab" + text
