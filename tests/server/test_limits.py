"""Bodies that would cost seconds are refused by their counts, before anything is built of them."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from tests.server.asgi import CHAT, COMPLETIONS, Wire, client, settled
from tests.server.scripted import END, ScriptedLLM
from tests.server.test_errors import USER, post, refused

from octavo.errors import QueueFull
from octavo.server import body, fields, prompts
from octavo.server.app import create_app
from octavo.server.errors import ApiError
from octavo.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from octavo.server.settings import ServerSettings

SETTINGS = ServerSettings()
VALUES, BYTES = fields.MOST_FREE_VALUES, fields.MOST_FREE_BYTES


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": USER, "tool_choice": "none"} | more


@pytest.mark.parametrize("field", ["tools", "documents"])
def test_free_lists(field: str) -> None:
    many: Any = [{"a": [[]] * VALUES}]
    refused(post(CHAT, chat(**{field: many}), settings=SETTINGS), 400, field, "values", f"at most {VALUES}")
    refused(post(CHAT, chat(**{field: [{"a": "x" * BYTES}]}), settings=SETTINGS), 400, field, "bytes", f"at most {BYTES}")
    fits = [{"a": ",[{" * VALUES, "b": '\\",' * 1000, "c": [0] * (VALUES - 10)}]  # marks in strings are no values
    assert post(CHAT, chat(**{field: fits}), settings=SETTINGS).status_code == 200


def test_free_objects() -> None:
    refused(post(CHAT, chat(chat_template_kwargs={"x": [{}] * VALUES}), settings=SETTINGS), 400, "chat_template_kwargs", f"at most {VALUES}")
    refused(post("/tokenize", {"prompt": "a", "tools": [{}] * VALUES}, settings=SETTINGS), 400, "tools", f"at most {VALUES}")


def test_tool_calls_of_one_message_and_of_all() -> None:
    refused(post(CHAT, {"messages": [*USER, {"role": "assistant", "tool_calls": [{}] * VALUES}]}, settings=SETTINGS), 400,
            "messages[1].tool_calls", f"at most {VALUES}")
    half = {"role": "assistant", "tool_calls": [{}] * (VALUES * 2 // 5)}  # each object counts twice: itself, and the comma before it
    refused(post(CHAT, {"messages": [half, half]}, settings=SETTINGS), 400, "messages", "of all messages", f"at most {VALUES}")
    long = {"role": "assistant", "tool_calls": [{"a": "x" * (BYTES // 2)}]}
    refused(post(CHAT, {"messages": [long, long]}, settings=SETTINGS), 400, "messages", f"at most {BYTES} are")


def test_messages_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MOST_MESSAGES", 10)
    monkeypatch.setattr(fields, "MOST_MESSAGES", 10)
    monkeypatch.setattr(fields, "_MOST_PARTS", 6)
    for large in (0, 2**20):
        monkeypatch.setattr(body, "_LARGE", large)
        response = post(CHAT, {"messages": USER * 10}, settings=SETTINGS, llm=ScriptedLLM([[65], [END]]))
        assert response.status_code == 200, response.text
        refused(post(CHAT, {"messages": USER * 11}, settings=SETTINGS), 400, "messages", "at most 10" if large else "more than 10")
        part = {"type": "text", "text": "{{{{{{{{{{{{"}
        for parts in ([6], [3, 3]):
            messages = [{"role": "user", "content": [part] * count} for count in parts]
            assert post(CHAT, {"messages": messages}, settings=SETTINGS, llm=ScriptedLLM([[65], [END]])).status_code == 200
        refused(post(CHAT, {"messages": [{"role": "user", "content": [part] * 7}]}, settings=SETTINGS), 400, "messages[0].content", "more than 6")
        several = [{"role": "user", "content": [part] * 4}] * 2
        refused(post(CHAT, {"messages": several}, settings=SETTINGS), 400, "messages[1].content", "more than 6")


def test_decoding_ends_at_the_first_message_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is built of the rest, nor of what a field that is repeated held before."""
    monkeypatch.setattr(body, "MOST_MESSAGES", 10)
    text = b'{"messages":[' + b",".join([b'{"role":""}'] * 1000) + b"]}"
    with pytest.raises(ApiError):
        body.decode_measured(text, ChatRequest)
    assert body._Counted.made == 11
    again = b'{"messages":[' + b",".join([b'{"role":""}'] * 1000) + b'],"messages":[{"role":"user","content":"x"}]}'
    assert len(body.decode_measured(again, ChatRequest).messages) == 1 and body._Counted.made == 1


def test_other_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "_LARGE", 0)
    monkeypatch.setattr(body, "_MOST_ENTRIES", 5)
    many = {"stop_token_ids": [1] * 6, "allowed_token_ids": [1] * 6, "bad_words": ["a"] * 6, "logit_bias": dict.fromkeys(range(6), 1)}
    for field, value in many.items():
        refused(post(COMPLETIONS, {"prompt": "p", field: value}, settings=SETTINGS), 400, field, "6 entries", "at most 5")
    refused(post("/detokenize", {"tokens": [1] * 6}, settings=SETTINGS), 400, "tokens", "6 entries", "at most 5")


@pytest.mark.parametrize(("kind", "given"), [
    (CompletionRequest, {"prompt": "p", "stop_token_ids": [1], "logit_bias": {"1": 2.0}, "bad_words": ["a"], "max_tokens": 3, "stream_options": {}}),
    (ChatRequest, {"messages": USER, "allowed_token_ids": None, "tools": [{}]}), (TokenizeRequest, {"messages": USER}),
    (TokenizeRequest, {"prompt": "x"}), (DetokenizeRequest, {"tokens": [1, 2]}),
])
@pytest.mark.parametrize("relaxed", [False, True])
def test_large_bodies_are_decoded_like_small_ones(kind: Any, given: dict[str, Any], relaxed: bool) -> None:
    wrong = {name: [{"role": 5}] for name in ("messages", "tokens", "stop_token_ids") if name in kind.__struct_fields__}
    kind = body.RELAXED[kind] if relaxed else kind
    for value in (given, given | {"zz": [1]}, given | {"model": 5}, given | wrong, {}):
        text = json.dumps(value).encode()
        try:
            wanted: Any = msgspec.json.encode(body.decode(text, kind))
        except ApiError as error:
            wanted = error.info
        try:
            found: Any = msgspec.json.encode(body.decode_measured(text, kind))
        except ApiError as error:
            found = error.info
        assert found == wanted


def parse(text: str, context: int = 100) -> Any:
    return prompts.parse_prompts(msgspec.Raw(text.encode()), context, ServerSettings(max_choices=6))


def test_prompts_are_counted_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_SMALL", 0)
    fine = [["a,[", 'b\\"],', "\\\\", '"'], ["x"] * 6, [[1, 2], "a", [3]] * 2, [[1]] * 6, ["x" * 1000 + "," * 1000]]
    for given in fine:
        assert parse(json.dumps(given)) == given
    seen: list[Any] = []
    monkeypatch.setattr(prompts, "decode", lambda *args: seen.append(args))
    for given in (["a", *[[1]] * 6], ["a"] * 7, ['\\"'] * 7, ["\\"] * 7, [[1]] * 7, [*[[1]] * 6, "a"]):
        for text in (json.dumps(given), json.dumps(given, indent=80)):
            with pytest.raises(ApiError, match=r"prompt has 7 prompts; at most 6"):
                parse(text)
    monkeypatch.setattr(prompts, "_MOST_IDS", 10)
    with pytest.raises(ApiError, match="21 token ids in all; at most 20"):
        parse(json.dumps([[1] * 11, [1] * 10]), context=20)
    with pytest.raises(Exception, match="101 tokens"):
        parse("[" + "1," * 100 + '"a"]')
    assert not seen


def test_a_prompt_of_several_is_named() -> None:
    for bad in ("", [], [999], [1] * 64, "x" * 64, 5):
        refused(post(COMPLETIONS, {"prompt": ["a", [1], bad], "max_tokens": 1}), 400, "prompt[2]", "" if bad == 5 else "prompt[2]")


def test_the_usual_length_of_a_completion_gives_way_to_the_context() -> None:
    for length in (10, 60, 63):
        assert post(COMPLETIONS, {"prompt": "x" * length}).status_code == 200
    refused(post(COMPLETIONS, {"prompt": "x" * 60, "max_tokens": 16}), 400, "max_tokens", "max_tokens is 16", "at most 4")
    llm = ScriptedLLM([[65]] * 20 + [[END]], context=64)
    params: list[Any] = []
    generate = llm.generate
    llm.generate = lambda prompt, given, **more: params.append(given) or generate(prompt, given, **more)  # type: ignore[method-assign,func-returns-value]
    assert post(COMPLETIONS, {"prompt": "x" * 10}, llm=llm).status_code == 200 and params[0].max_tokens == 16


def test_detokenize_is_bounded_by_the_context() -> None:
    assert post("/detokenize", {"tokens": [65] * 256}).json() == {"prompt": "A" * 256}
    refused(post("/detokenize", {"tokens": [65] * 257}), 400, "tokens", "257 entries", "at most 256")
    for bad in (-1, 257, 10**30):
        refused(post("/detokenize", {"tokens": [1, bad]}), 400, "tokens", "tokens[1] is", "0 to 256")


@pytest.mark.parametrize(("path", "given"), [("/tokenize", {"prompt": "p"}), ("/tokenize", {"messages": USER}), ("/detokenize", {"tokens": [1]})])
def test_tokenizing_counts_as_waiting(path: str, given: dict[str, Any]) -> None:
    llm = ScriptedLLM()
    llm.refusal = QueueFull("2 requests wait; the queue holds 2", None, 7)
    refused(post(path, given, llm=llm), 429, None, "queue holds 2")
    assert llm.worked == 0


@pytest.mark.parametrize(("path", "given"), [
    ("/tokenize", {"prompt": "p"}), ("/detokenize", {"tokens": [1]}), (COMPLETIONS, {"prompt": ["p", "q"], "truncate_prompt_tokens": 1}),
    (CHAT, {"messages": USER, "truncate_prompt_tokens": 1}),
])
def test_work_on_text_ends_with_its_client(path: str, given: dict[str, Any]) -> None:
    async def run() -> None:
        llm = ScriptedLLM([[65], [END]])
        llm.thread = asyncio.Event()  # never set: the threads are busy
        app = create_app(llm, SETTINGS)  # type: ignore[arg-type]
        wire = Wire(app, path, given)
        await settled(lambda: llm.worked)
        wire.go()
        await asyncio.wait_for(wire.task, 5)
        assert llm.num_open == 0 and not llm.tenants
        async with client(app) as http:
            assert (await http.get("/health")).status_code == 200

    asyncio.run(run())
