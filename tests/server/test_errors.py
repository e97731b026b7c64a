"""Bad requests: a 4xx in OpenAI's shape that names the field, before anything was tokenized or run."""

import asyncio
import json
from functools import cache
from typing import Any

import pytest
from tests.server.asgi import CHAT, COMPLETIONS, client, events
from tests.server.scripted import END, ScriptedLLM

from octavo.engine.inputs import Inputs
from octavo.errors import QueueFull, WorkerDied
from octavo.server.app import create_app
from octavo.server.schema import ChatRequest, CompletionRequest
from octavo.server.settings import ServerSettings

CONTEXT = 64
SMALL = ServerSettings(max_body_bytes=10_000, max_n=4, max_choices=6, max_stop=3, max_stop_chars=5, max_logit_bias=2, max_bad_words=2,
                       max_bad_word_chars=5)
JSON = {"content-type": "application/json"}
USER = [{"role": "user", "content": "hi"}]
DEEP = b"[" * 4000 + b"]" * 4000


@cache
def shared(settings: ServerSettings) -> tuple[ScriptedLLM, Any]:
    llm = ScriptedLLM([[65], [END]], context=CONTEXT)
    return llm, create_app(llm, settings)  # type: ignore[arg-type]


def post(path: str, body: Any, *, llm: Any = None, settings: ServerSettings = SMALL, headers: dict[str, str] = JSON) -> Any:
    app = shared(settings)[1] if llm is None else create_app(llm, settings)

    async def run() -> Any:
        async with client(app) as http:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await http.post(path, content=content, headers=headers)

    return asyncio.run(run())


def refused(response: Any, status: int, param: str | None, *parts: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"] and response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["param"] == param, error
    for part in parts:
        assert part in error["message"], error
    return error


# field, value, what the message says: for both APIs
SHARED: list[tuple[str, Any, str]] = [
    ("model", 7, "str"), ("temperature", "0.5", "expected float"), ("temperature", -0.1, "-0.1"), ("temperature", True, "bool"),
    ("temperature", [1], "array"), ("top_p", 0, "above 0"), ("top_p", 1.01, "1.01"), ("top_k", -2, "-2"), ("top_k", 1.5, "float"),
    ("top_k", 2**40, str(2**31 - 1)), ("top_k", 10**400, "between -1 and"), ("priority", -(2**63) - 1, "64 bits"),
    ("min_p", -1, "-1"), ("min_p", 2, "2"), ("n", 0, "0"), ("n", -3, "-3"), ("n", 5, "at most 4"), ("n", "1", "int"),
    ("n", 10**30, "at most 4"), ("presence_penalty", 2.5, "2.5"), ("frequency_penalty", -2.5, "-2.5"), ("repetition_penalty", 0, "above 0"),
    ("seed", 2**64, str(2**64)), ("seed", 1.0, "float"), ("seed", "1", "str"), ("max_tokens", -1, "-1"), ("max_tokens", 2**31, str(2**31 - 1)),
    ("max_tokens", "5", "str"), ("max_tokens", 64, "most"), ("min_tokens", -1, "-1"), ("min_tokens", 11, "above max_tokens"),
    ("min_tokens", 2**33, "between 0 and"),
    ("stop", 5, "array"), ("stop", ["a", 5], "str"), ("stop", ["a", "b", "c", "d"], "at most 3"), ("stop", "abcdef", "at most 5"),
    ("stop", "", "empty"),
    ("stop", ["a", ""], "stop[1] is empty"), ("stop_token_ids", [257], "0 to 256"), ("stop_token_ids", [-1], "-1"), ("stop_token_ids", 5, "array"),
    ("bad_words", [""], "non-empty"), ("bad_words", ["a"] * 3, "at most 2"), ("bad_words", ["abcdef"], "at most 5"),
    ("stop_token_ids", [1] * 258, "at most 257"), ("allowed_token_ids", [1] * 258, "at most 257"), ("stop", "x" * 300, "302 bytes"),
    ("bad_words", "ab", "array"), ("logit_bias", {"257": 1}, "0 to 256"), ("logit_bias", {"-1": 1}, "-1"),
    ("logit_bias", {"x": 1}, "int"), ("logit_bias", {"1": 101}, "101"), ("logit_bias", {"1": "1"}, "float"),
    ("logit_bias", {"1": 1, "2": 1, "3": 1}, "at most 2"), ("logit_bias", [1], "object"), ("allowed_token_ids", [], "empty"),
    ("allowed_token_ids", [999], "999"), ("prompt_logprobs", -2, "-2"), ("prompt_logprobs", 21, "20"), ("prompt_logprobs", 2**70, "between -1 and"),
    ("ignore_eos", "yes", "bool"), ("ignore_eos", 1, "bool"), ("stream", "true", "bool"), ("stream_options", True, "object"),
    ("truncate_prompt_tokens", 0, "0"), ("truncate_prompt_tokens", -2, "-2"), ("truncate_prompt_tokens", 64, "room"),
    ("priority", "high", "int"), ("priority", 2**63, "priority"), ("priority", 1, "scheduling policy fcfs"),
    ("priority", -(2**40), "priority"), ("request_id", "a b", "ASCII"),
    ("request_id", "x" * 129, "128"),
    ("best_of", 2, "not served"), ("best_of", 0, "between 1"), ("use_beam_search", "yes", "bool"), ("length_penalty", 2, "needs use_beam_search"),
    ("early_stopping", True, "needs use_beam_search"), ("early_stopping", "always", "never"), ("length_penalty", 51, "at most 50"),
    ("response_format", {"type": "json_object"}, "not served"), ("structured_outputs", {"regex": "a"}, "not served"),
    ("guided_json", {}, "not served"),
    ("guided_regex", "a", "not served"), ("guided_choice", ["a"], "not served"), ("guided_grammar", "a", "not served"),
    ("logits_processors", ["a"], "not served"), ("kv_transfer_params", {}, "not served"), ("lora_request", {"x": 1}, "not served"),
]
COMPLETION_ONLY: list[tuple[str, Any, str]] = [
    ("prompt", None, "text"), ("prompt", 5, "text"), ("prompt", {}, "text"), ("prompt", "", "empty"), ("prompt", [], "empty"),
    ("prompt", [[]], "empty"),
    ("prompt", ["a", ""], "prompt[1] is empty"), ("prompt", [257], "0 to 256"), ("prompt", [-1], "-1"), ("prompt", [[1], [2, 999]], "999"),
    ("prompt", [1] * CONTEXT, f"has {CONTEXT} tokens"), ("prompt", "x" * CONTEXT, f"at most {CONTEXT - 1}"), ("prompt", ["a"] * 7, "at most 6"),
    ("prompt", [[1]] * 7, "at most 6"), ("prompt", [1, "a"], "str"), ("prompt", [1, [2]], "array"), ("prompt", ["a", 1], "int"),
    ("prompt", [1.5], "float"),
    ("prompt", [True], "bool"), ("prompt", [10**30], "0 to 256"), ("prompt", [[[1]]], "array"), ("prompt", [None], "null"),
    ("logprobs", True, "bool"), ("logprobs", 21, "20"), ("logprobs", -2, "-2"), ("suffix", "x", "not served"), ("prompt_embeds", "x", "not served"),
    ("max_tokens", 0, "echo"), ("max_tokens", 64, "at most 63"),
]
CHAT_ONLY: list[tuple[str, Any, str]] = [
    ("messages", [], "empty"), ("messages", USER * (CONTEXT + 1), "65 entries"), ("messages", "hi", "array"), ("messages", None, "array"),
    ("messages", [5], "object"),
    ("logprobs", 1, "bool"), ("top_logprobs", 2, "logprobs"), ("max_tokens", 0, "between 1"), ("max_completion_tokens", 0, "between 1"),
    ("max_completion_tokens", 64, "at most"), ("max_completion_tokens", 2**31, str(2**31 - 1)),
    ("tools", [{"type": "function"}], "tool_choice"), ("tools", 5, "array"),
    ("tool_choice", "auto", "not served"),
    ("tool_choice", "required", "not served"), ("tool_choice", {"type": "function"}, "not served"), ("functions", [{"name": "f"}], "not served"),
    ("function_call", "auto", "not served"), ("audio", {"voice": "a"}, "not served"), ("modalities", ["text", "audio"], "not served"),
    ("prediction", {"type": "content"}, "not served"), ("web_search_options", {}, "not served"), ("reasoning_effort", "high", "not served"),
    ("verbosity", "low", "not served"), ("chat_template", "{{ 1 }}", "not served"), ("chat_template_kwargs", [1], "object"),
    ("chat_template_kwargs", {"messages": 1}, "messages"), ("documents", {"a": 1}, "array"), ("store", "yes", "bool"), ("user", 5, "str"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": {"x": "y" * 2000}}}, "not served"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_shared_fields(path: str, stream: bool) -> None:
    for field, value, part in SHARED:
        ask(path, field, value, part, stream)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_stream_options_need_a_stream(path: str) -> None:
    for options in ({"include_usage": True}, {}):
        ask(path, "stream_options", options, "stream is not true", False)


def test_fields_of_completions() -> None:
    for field, value, part in COMPLETION_ONLY:
        ask(COMPLETIONS, field, value, part, False)


def test_fields_of_chat() -> None:
    for field, value, part in CHAT_ONLY:
        ask(CHAT, field, value, part, False)


def ask(path: str, field: str, value: Any, part: str, stream: bool) -> None:
    llm = shared(SMALL)[0]
    llm.tokenized = 0
    base: dict[str, Any] = {"prompt": "p", "stream": stream} if path == COMPLETIONS else {"messages": USER, "stream": stream}
    if field != "max_completion_tokens":
        base["max_tokens"] = 10
    error = refused(post(path, base | {field: value}), 400, place(field, value), part)
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 500
    assert llm.num_open == 0
    if field not in ("prompt", "max_tokens", "max_completion_tokens", "truncate_prompt_tokens", "chat_template_kwargs"):
        assert llm.tokenized == 0


def place(field: str, value: Any) -> str:
    """The place inside the field, where the types tell it."""
    places: dict[tuple[str, str], str] = {
        ("stop", '["a", 5]'): "stop[1]", ("prompt", '[1, "a"]'): "prompt[1]", ("prompt", "[1, [2]]"): "prompt[1]",
        ("prompt", '["a", 1]'): "prompt[1]",
        ("prompt", "[[]]"): "prompt[0]", ("prompt", '["a", ""]'): "prompt[1]", ("prompt", "[[1], [2, 999]]"): "prompt[1]",
        ("prompt", "[1.5]"): "prompt[0]", ("prompt", "[true]"): "prompt[0]", ("prompt", "[[[1]]]"): "prompt[0][0]", ("prompt", "[null]"): "prompt[0]",
        ("messages", "[5]"): "messages[0]", ("logit_bias", '{"1": "1"}'): "logit_bias[...]",
    }
    return places.get((field, json.dumps(value)), field)


MESSAGES: list[tuple[dict[str, Any], str, str]] = [
    ({"content": "x"}, ".role", "missing"), ({"role": "bot", "content": "x"}, ".role", "system, developer, user, assistant, tool"),
    ({"role": "function", "content": "x"}, ".role", "function"), ({"role": 5, "content": "x"}, ".role", "str"),
    ({"role": "user"}, ".content", "missing"), ({"role": "user", "content": None}, ".content", "missing"),
    ({"role": "user", "content": 5}, ".content", "int"),
    ({"role": "user", "content": {"a": 1}}, ".content", "object"), ({"role": "user", "content": [5]}, ".content[0]", "object"),
    ({"role": "user", "content": [{"text": "x"}]}, ".content[0].type", "missing"),
    ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text", "missing"),
    ({"role": "user", "content": [{"type": "text", "text": 5}]}, ".content[0].text", "str"),
    ({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}]}, ".content[1].type", "image_url"),
    ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, ".content[0].type", "input_audio"),
    ({"role": "user", "content": [{"type": "text", "text": "x", "colour": 1}]}, ".content[0].colour", "unknown field"),
    ({"role": "user", "content": "x", "colour": 1}, ".colour", "unknown field"), ({"role": "user", "content": "x", "name": 5}, ".name", "str"),
    ({"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}, ".tool_calls", "assistant"),
    ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, ".function_call", "not served"),
    ({"role": "assistant", "audio": {"id": "a"}}, ".audio", "not served"),
    ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}, ".tool_calls[0].function.arguments", "JSON"),
]


@pytest.mark.parametrize(("message", "inside", "part"), MESSAGES, ids=[f"{inside}-{part}" for _, inside, part in MESSAGES])
def test_messages(message: dict[str, Any], inside: str, part: str) -> None:
    refused(post(CHAT, {"messages": [*USER, message]}), 400, f"messages[1]{inside}", part)


RAW: list[tuple[bytes, str | None, str]] = [
    (b"", None, "JSON"), (b"{", None, "JSON"), (b"nonsense", None, "JSON"), (b'{"prompt":"a"}x', None, "JSON"), (b"[]", None, "object"),
    (b"null", None, "object"),
    (b'"a"', None, "object"), (b'{"prompt":"a","temperature":NaN}', "temperature", "NaN"),
    (b'{"prompt":"a","top_p":-Infinity}', "top_p", "-Infinity"),
    (b'{"prompt":"a","logit_bias":{"5":NaN}}', "logit_bias.5", "NaN"), (b'{"prompt":["a",NaN]}', "prompt[1]", "NaN"),
    (b'{"prompt":"a","temperature":1e999}', "temperature", "out of range"), (b'{"prompt":"\\ud800"}', "prompt", "surrogate"),
    (b'{"prompt":"a","stop":["\\udc00"]}', "stop[0]", "surrogate"), (b'{"prompt":"a","\\ud800":1}', None, "surrogate"),
    (b'{"prompt":"\xff"}', "prompt", "UTF-8"), (b'{"prompt":"a","user":"\xff"}', None, "UTF-8"), (b'{"prompt":"a","zz":1}', "zz", "zz"),
    (b'{"prompt":"a","stream_options":{"zz":1}}', "stream_options.zz", "zz"), (b'{"prompt":' + DEEP + b"}", None, "deeply"),
    (b'{"prompt":"a","response_format":' + DEEP + b"}", None, "deeply"), (b'{"prompt":"a","zz":' + DEEP + b"}", "zz", "zz"),
    (b'{"max_tokens":1}', "prompt", "missing"), (b'{"prompt":"a","prompt":5}', "prompt", "text"), (b"\xef\xbb\xbf{}", None, "JSON"),
]


@pytest.mark.parametrize(("body", "param", "part"), RAW, ids=[repr(body[:40]) for body, _, _ in RAW])
def test_raw_bodies(body: bytes, param: str | None, part: str) -> None:
    refused(post(COMPLETIONS, body), 400, param, part)


def test_every_unserved_field_accepts_null_and_what_asks_for_nothing() -> None:
    from octavo.server.fields import UNSERVED

    for path, kind, base in ((COMPLETIONS, CompletionRequest, {"prompt": "p"}), (CHAT, ChatRequest, {"messages": USER})):
        assert len(UNSERVED[kind]) > 10
        for field, harmless in UNSERVED[kind].items():
            assert harmless[0] is None
            for value in harmless:
                response = post(path, base | {field: value})
                assert response.status_code == 200, (field, value, response.text)
            refused(post(path, base | {field: {"asks": "much"}}), 400, field, field)


def test_fields_without_effect_are_accepted() -> None:
    options = {"stream": True, "stream_options": {"include_obfuscation": False}}
    shared = {"user": "u", "best_of": 1, "spaces_between_special_tokens": False, **options}
    assert post(COMPLETIONS, {"prompt": "p"} | shared).status_code == 200
    chat = {"messages": USER, "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x", "prompt_cache_key": "k",
            "prompt_cache_retention": "24h", "parallel_tool_calls": True, "tools": [], "tool_choice": "none"}
    assert post(CHAT, chat | shared).status_code == 200


def test_a_cache_salt_is_a_text_and_reaches_the_engine() -> None:
    seen: list[str] = []

    class Salted(ScriptedLLM):
        def generate(self, prompt: Any, *args: Any, **more: Any) -> Any:
            seen.append(prompt.cache_salt)
            return super().generate(prompt, *args, **more)

    for path, base in ((COMPLETIONS, {"prompt": ["p", "q"]}), (CHAT, {"messages": USER})):
        assert post(path, base | {"cache_salt": "s"}, llm=Salted([[65]])).status_code == 200
        assert post(path, base, llm=Salted([[65]])).status_code == 200
        refused(post(path, base | {"cache_salt": ""}), 400, "cache_salt", "empty")
    assert seen == ["s", "s", "", "", "s", ""]


def test_null_is_the_default_of_every_optional_field() -> None:
    for path, kind, base in ((COMPLETIONS, CompletionRequest, {"prompt": "p"}), (CHAT, ChatRequest, {"messages": USER})):
        fields = [name for name in kind.__struct_fields__ if name not in base]
        assert post(path, dict.fromkeys(fields) | base).status_code == 200


def test_a_conversation_that_is_too_long_names_messages() -> None:
    for more in ({}, {"truncate_prompt_tokens": 5}):
        text = "x" * (CONTEXT if not more else 5000)
        settings = SMALL if not more else ServerSettings(max_tokenize_bytes=4000)
        refused(post(CHAT, {"messages": [{"role": "user", "content": text}]} | more, settings=settings), 400, "messages", "at most")


@pytest.mark.parametrize(("name", "says"), [
    ("temprature", "unknown field 'temprature': did you mean 'temperature'?"), ("max_token", "did you mean 'max_tokens'?"),
    ("zzz", "unknown field 'zzz'"), ("temperature" * 9, "unknown field"),
])
def test_an_unknown_field_s_likely_name_is_told(name: str, says: str) -> None:
    async def run() -> None:
        async with client(create_app(ScriptedLLM([]), ServerSettings())) as http:
            answer = await http.post("/v1/completions", json={"prompt": "a", name: 1})
            error = answer.json()["error"]
            assert answer.status_code == 400 and says in error["message"] and ("did you mean" in error["message"]) == ("did you mean" in says)

    asyncio.run(run())


def test_unknown_fields_may_be_allowed() -> None:
    relaxed = ServerSettings(allow_unknown_fields=True)
    assert post(COMPLETIONS, {"prompt": "p", "zz": 1}, settings=relaxed).status_code == 200
    assert post(CHAT, {"messages": USER, "zz": 1}, settings=relaxed).status_code == 200
    refused(post(COMPLETIONS, {"prompt": "p", "suffix": "x"}, settings=relaxed), 400, "suffix")
    refused(post(COMPLETIONS, {"prompt": "p", "temperature": "x"}, settings=relaxed), 400, "temperature")


def test_models_and_routes() -> None:
    for path, body in ((COMPLETIONS, {"prompt": "p", "model": "gpt"}), (CHAT, {"messages": USER, "model": "gpt"}),
    ("/tokenize", {"prompt": "p", "model": "gpt"})):
        error = refused(post(path, body), 404, "model", "gpt", "scripted")
        assert error["code"] == "model_not_found"

    async def run() -> None:
        async with client(create_app(ScriptedLLM(), SMALL)) as http:
            refused(await http.get("/v1/nothing"), 404, None, "/v1/nothing")
            refused(await http.get("/v1/models/gpt"), 404, "model", "gpt")
            wrong = await http.get(COMPLETIONS)
            refused(wrong, 405, None, "GET")
            assert wrong.headers["allow"] == "POST"
            refused(await http.delete("/health"), 405, None, "DELETE")

    asyncio.run(run())


def test_content_types() -> None:
    for given in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx"):
        refused(post(COMPLETIONS, {"prompt": "p"}, headers={"content-type": given}), 415, "content-type", given)
    refused(post(COMPLETIONS, {"prompt": "p"}, headers={}), 415, "content-type", "missing")
    refused(post(COMPLETIONS, {"prompt": "p"}, headers=JSON | {"content-encoding": "gzip"}), 415, "content-encoding", "gzip")
    assert post(COMPLETIONS, {"prompt": "p"}, headers={"content-type": "Application/JSON; charset=utf-8"}).status_code == 200


def test_large_bodies_by_length_and_while_reading() -> None:
    refused(post(COMPLETIONS, b'{"prompt":"' + b"x" * 10_000 + b'"}'), 413, None, "10000")

    async def run() -> None:
        read = 0

        async def endless() -> Any:
            nonlocal read
            yield b'{"prompt":"'
            for _ in range(100):
                read += 1
                yield b"x" * 1000

        async with client(create_app(ScriptedLLM(), SMALL)) as http:
            response = await http.post(COMPLETIONS, content=endless(), headers=JSON)
            refused(response, 413, None, "10000")
            assert response.headers["connection"] == "close"

    asyncio.run(run())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_full_queue_is_told_before_tokenizing(path: str) -> None:
    llm = ScriptedLLM([[65], [END]])
    llm.refusal = QueueFull("2 requests wait; the queue holds 2", None, 7)
    response = post(path, {"prompt": "p"} if path == COMPLETIONS else {"messages": USER}, llm=llm)
    error = refused(response, 429, None, "queue holds 2")
    assert error["code"] == "rate_limit_exceeded" and response.headers["retry-after"] == "7" and llm.tokenized == 0


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_refuses_at_once(stream: bool) -> None:
    """A status, not an event: nothing was sent yet. Of several prompts none goes on."""
    for prompt in ("p", ["p", "q", "r"]):
        llm = ScriptedLLM([WorkerDied("the engine is gone")])
        error = refused(post(COMPLETIONS, {"prompt": prompt, "stream": stream}, llm=llm), 503, None, "engine is gone")
        assert error["code"] == "engine_dead" and llm.num_open == 0
        llm = ScriptedLLM([QueueFull("full")])
        refused(post(COMPLETIONS, {"prompt": prompt, "stream": stream}, llm=llm), 429, None)


@pytest.mark.parametrize(("path", "failure", "code"), [
    (COMPLETIONS, WorkerDied("gone"), "engine_dead"), (CHAT, WorkerDied("gone"), "engine_dead"), (CHAT, RuntimeError("a bug"), "internal_error"),
])
def test_a_stream_that_breaks_ends_with_its_error(path: str, failure: Exception, code: str) -> None:
    llm = ScriptedLLM([[65], [66], failure])
    body = {"prompt": "p"} if path == COMPLETIONS else {"messages": USER}
    chunks = events(post(path, body | {"stream": True}, llm=llm))
    assert chunks[-1]["error"]["code"] == code and "a bug" not in json.dumps(chunks) and llm.num_open == 0
    assert "choices" in chunks[-2] and "[DONE]" not in chunks
    whole = post(path, body, llm=llm)
    assert whole.status_code == (503 if isinstance(failure, WorkerDied) else 500) and whole.json()["error"]["code"] == code


@pytest.mark.parametrize(("finish", "status"), [("error", 500), ("abort", 503)])
def test_an_answer_that_the_engine_gives_up(finish: str, status: int) -> None:
    llm = ScriptedLLM([[65], [66]], finish=finish)
    assert post(COMPLETIONS, {"prompt": "p"}, llm=llm).status_code == status
    chunks = events(post(COMPLETIONS, {"prompt": "p", "stream": True}, llm=llm))
    assert chunks[0]["choices"][0]["text"] == "A" and "error" in chunks[-1]


def test_health_says_why_not() -> None:
    llm = ScriptedLLM()

    async def run() -> None:
        async with client(create_app(llm, SMALL)) as http:
            assert (await http.get("/health")).status_code == 200
            llm.reason = "no step for 30 s"
            response = await http.get("/health")
            assert response.status_code == 503 and response.json()["reason"] == "no step for 30 s"
            assert (await http.get("/ping")).status_code == 200

    asyncio.run(run())


def test_tokenize_and_detokenize_errors() -> None:
    refused(post("/tokenize", {}), 400, "prompt", "either")
    refused(post("/tokenize", {"prompt": "a", "messages": USER}), 400, "prompt", "either")
    refused(post("/tokenize", {"prompt": 5}), 400, "prompt")
    refused(post("/tokenize", {"prompt": "a", "tools": -1.5}), 400, "tools")
    refused(post("/tokenize", {"messages": [{"role": "x"}]}), 400, "messages[0].role")
    refused(post("/detokenize", {"tokens": [1, 257]}), 400, "tokens", "tokens[1] is 257")
    refused(post("/detokenize", {"tokens": [-1]}), 400, "tokens", "-1")
    refused(post("/detokenize", {"tokens": "a"}), 400, "tokens")
    refused(post("/detokenize", {}), 400, "tokens", "missing")


@pytest.mark.parametrize("stream", [False, True])
def test_beams_that_the_pool_cannot_hold_blame_their_prompt(stream: bool) -> None:
    """Before anything runs, and behind a window, where beams cannot count on the prompt's blocks."""
    llm = ScriptedLLM(context=CONTEXT)
    llm.inputs = Inputs(
        tokenizer=llm.tokenizer, vocab=llm.vocab_size, max_model_len=CONTEXT, max_logprobs=20, eos_ids=[END], seed=0, num_kv_blocks=4, sliding=True,
    )
    beams = {"use_beam_search": True, "n": 2, "stream": stream, "max_tokens": 1}
    for prompt, field in (([1] * 40, "prompt"), ([[1], [1] * 40], "prompt[1]")):
        refused(post(COMPLETIONS, {"prompt": prompt, **beams}, llm=llm), 400, field, "2 beams of a prompt of 40 tokens take 6 blocks", "pool has 4")
    chat = [{"role": "user", "content": "x" * 40}]
    assert refused(post(CHAT, {"messages": chat, **beams}, llm=llm), 400, "messages", "the KV pool has 4")["code"] == "context_length_exceeded"
    whole = post(COMPLETIONS, {"prompt": [1] * 40, "echo": True, **beams, "max_tokens": 0, "stream": False}, llm=llm)
    assert whole.status_code == 200, "nothing is searched"


def test_the_prefix_cache_is_reset_without_a_body_either_way() -> None:
    llm = ScriptedLLM()
    response = post("/reset_prefix_cache", {}, llm=llm)
    assert response.status_code == 200 and response.content == b"" and llm.resets == 1
    llm.reason = "the engine is gone"
    refused(post("/reset_prefix_cache", {}, llm=llm), 503, None, "the engine is gone")
    assert llm.resets == 1
