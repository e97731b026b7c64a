"""What answers look like in both APIs: echo, logprobs, usage, n, several prompts, extras. Over a scripted engine, so that every number is known."""

import asyncio
import json
from typing import Any

import pytest
from tests.server.asgi import CHAT, COMPLETIONS, client, events, joined
from tests.server.scripted import END, ScriptedLLM

from octavo.core.sampling import SamplingParams
from octavo.engine.settings import make_config
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings

USER = [{"role": "user", "content": "hi"}]
ANSWER = [list("é".encode()), list(b"!"), [END]]


def ask(path: str, body: dict[str, Any], llm: Any = None, settings: ServerSettings | None = None) -> Any:
    async def run() -> Any:
        async with client(create_app(llm or ScriptedLLM(ANSWER), settings or ServerSettings())) as http:
            response = await http.post(path, json=body)
            assert response.status_code == 200, response.text
            return events(response) if body.get("stream") else response.json()

    return asyncio.run(run())


def test_a_completion() -> None:
    answer = ask(COMPLETIONS, {"prompt": "ab", "model": "scripted"})
    assert answer.pop("id").startswith("cmpl-") and answer.pop("created") > 1.7e9 and answer.pop("system_fingerprint").startswith("fp_")
    assert answer == {
        "object": "text_completion", "model": "scripted",
        "choices": [{"index": 0, "text": "é!", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6, "prompt_tokens_details": {"cached_tokens": 0}},
    }


def test_a_chat_completion() -> None:
    answer = ask(CHAT, {"messages": USER})
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    message = {"role": "assistant", "content": "é!", "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}]
    assert answer["usage"]["prompt_tokens"] == len("<user>hi\n<assistant>")


def test_a_chat_stream() -> None:
    chunks = ask(CHAT, {"messages": USER, "stream": True, "stream_options": {"include_usage": True}})
    assert chunks.pop() == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"} and len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    usage = chunks.pop()
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in chunks)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {"content": "é"}, {"content": "!"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]


def test_usage_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = ask(COMPLETIONS, {"prompt": "ab", "stream": True, "stream_options": options})[:-1]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [2, 3, 4, 4] and chunks[-1]["choices"] == []
    assert all("usage" not in chunk for chunk in ask(COMPLETIONS, {"prompt": "ab", "stream": True})[:-1])


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
def test_echo_with_logprobs(prompt: Any) -> None:
    choice = ask(COMPLETIONS, {"prompt": prompt, "echo": True, "logprobs": 2})["choices"][0]
    assert choice["text"] == "abé!"
    scores = choice["logprobs"]
    assert scores["tokens"] == ["a", "b", "\ufffd", "\ufffd", "!", "<end>"]
    assert scores["text_offset"] == [0, 1, 2, 2, 3, 4]
    assert scores["token_logprobs"][0] is None and scores["token_logprobs"][1] == pytest.approx(-0.5 - 98 / 1000)
    assert scores["top_logprobs"][0] is None and scores["top_logprobs"][1] == {"b": -0.598, "\ufffd": -3.0}
    assert "prompt_logprobs" not in choice
    streamed = ask(COMPLETIONS, {"prompt": prompt, "echo": True, "logprobs": 2, "stream": True})[:-1]
    assert joined(streamed) == choice["text"]
    for name in scores:
        assert [item for chunk in streamed for item in chunk["choices"][0]["logprobs"][name]] == scores[name]


def test_echo_of_the_prompt_alone() -> None:
    for n in (1, 3):
        for stream in (False, True):
            body = {"prompt": ["ab", "c"], "echo": True, "max_tokens": 0, "n": n, "stream": stream}
            idle = ScriptedLLM()
            answer = ask(COMPLETIONS, body, idle)  # the script is empty: nothing is run
            texts = [joined(answer, i) for i in range(2 * n)] if stream else [choice["text"] for choice in answer["choices"]]
            assert texts == ["ab"] * n + ["c"] * n
            scored = ask(COMPLETIONS, body | {"logprobs": 0})
            if stream:
                assert [chunk["choices"][0]["logprobs"]["tokens"] for chunk in scored[:-1] if chunk["choices"][0]["index"] < n] == [["a", "b"]] * n
            else:
                assert [choice["logprobs"]["token_logprobs"] for choice in scored["choices"][:n]] == [[None, pytest.approx(-0.598)]] * n
                assert scored["usage"] == answer["usage"] and answer["usage"]["completion_tokens"] == 0
                assert {choice["finish_reason"] for choice in scored["choices"]} == {"length"}


def test_chat_logprobs() -> None:
    body = {"messages": USER, "logprobs": True, "top_logprobs": 2}
    content = ask(CHAT, body)["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [33], list(b"<end>")]
    assert content[2] == {
        "token": "!", "logprob": pytest.approx(-0.533), "bytes": [33],
        "top_logprobs": [{"token": "!", "logprob": pytest.approx(-0.533), "bytes": [33]}, {"token": "\ufffd", "logprob": -3.0, "bytes": [222]}],
    }
    streamed = ask(CHAT, body | {"stream": True})[1:-1]
    assert [entry for chunk in streamed for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]] == content
    bare = ask(CHAT, {"messages": USER, "logprobs": True})["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in bare] == [[]] * 4


def test_tokens_as_ids() -> None:
    scores = ask(COMPLETIONS, {"prompt": "a", "logprobs": 1, "return_tokens_as_token_ids": True})["choices"][0]["logprobs"]
    assert scores["tokens"] == ["token_id:195", "token_id:169", "token_id:33", "token_id:256"] and "token_id:195" in scores["top_logprobs"][0]
    answer = ask(CHAT, {"messages": USER, "return_token_ids": True})
    assert answer["choices"][0]["token_ids"] == [195, 169, 33, 256] and answer["prompt_token_ids"] == list(b"<user>hi\n<assistant>")
    chunks = ask(CHAT, {"messages": USER, "return_token_ids": True, "stream": True})[:-1]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert [token for chunk in chunks[1:] for token in chunk["choices"][0]["token_ids"]] == [195, 169, 33, 256]


def test_prompt_logprobs() -> None:
    for body, path in (({"prompt": "ab"}, COMPLETIONS), ({"messages": USER}, CHAT)):
        answer = ask(path, body | {"prompt_logprobs": 1})
        scores = answer["choices"][0]["prompt_logprobs"] if path == COMPLETIONS else answer["prompt_logprobs"]
        assert len(scores) == answer["usage"]["prompt_tokens"] and scores[0] is None
        second = "98" if path == COMPLETIONS else "117"
        assert scores[1][second] == {"logprob": pytest.approx(-0.5 - int(second) / 1000), "rank": 1, "decoded_token": chr(int(second))}


def test_several_prompts_and_answers_keep_their_indices() -> None:
    body = {"prompt": ["a", "bb", [99, 99, 99]], "n": 2, "echo": True}
    whole = ask(COMPLETIONS, body)
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [
        (0, "aé!"), (1, "aé!"), (2, "bbé!"), (3, "bbé!"), (4, "cccé!"), (5, "cccé!"),
    ]
    assert whole["usage"]["prompt_tokens"] == 6 and whole["usage"]["completion_tokens"] == 24
    chunks = ask(COMPLETIONS, body | {"stream": True})
    assert [joined(chunks, i) for i in range(6)] == [choice["text"] for choice in whole["choices"]]
    ends = [choice["index"] for chunk in chunks[:-1] for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(ends) == list(range(6))
    chat = ask(CHAT, {"messages": USER, "n": 3, "stream": True})
    assert [chunk["choices"][0]["index"] for chunk in chat[:3]] == [0, 1, 2] and chat[2]["choices"][0]["delta"]["role"] == "assistant"


class Recorder(ScriptedLLM):
    """Keeps what it is asked."""

    def __init__(self, **more: Any) -> None:
        super().__init__(ANSWER, **more)
        self.asked: list[tuple[Any, SamplingParams, dict[str, Any]]] = []

    def generate(self, prompt: Any, params: SamplingParams, **more: Any) -> Any:
        self.asked.append((prompt, params, more))
        return super().generate(prompt, params, **more)


def test_every_sampling_field_reaches_the_engine() -> None:
    given = {
        "n": 2, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "temperature": 0.25, "top_p": 0.5, "top_k": 7,
        "min_p": 0.125, "seed": 9, "stop_token_ids": [5, 6], "bad_words": ["x"], "ignore_eos": True, "min_tokens": 2, "skip_special_tokens": False,
        "include_stop_str_in_output": True, "logit_bias": {"3": -1.5}, "allowed_token_ids": [1, 2, 3], "max_tokens": 5, "stop": ["z", "y"],
    }
    for path, base in ((COMPLETIONS, {"prompt": "p", "logprobs": 3}), (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 3})):
        llm = Recorder()
        llm.config = make_config("scripted", scheduling_policy="priority")
        ask(path, base | given | {"priority": -4, "prompt_logprobs": 1, "request_id": "mine"}, llm)
        _, params, more = llm.asked[0]
        assert params == SamplingParams(**(given | {"logit_bias": {3: -1.5}, "logprobs": 3, "prompt_logprobs": 1}))
        assert more["priority"] == -4 and more["request_id"].startswith("cmpl-mine" if path == COMPLETIONS else "chatcmpl-mine")


def test_defaults_of_the_model_and_of_the_api() -> None:
    llm = Recorder()
    llm.defaults = SamplingParams(temperature=0.5, top_k=3, max_tokens=50)
    ask(COMPLETIONS, {"prompt": "p"}, llm)
    ask(COMPLETIONS, {"prompt": "p", "max_tokens": None, "temperature": 1}, llm)
    ask(CHAT, {"messages": USER}, llm)
    ask(CHAT, {"messages": USER, "min_tokens": 60, "max_completion_tokens": 70, "max_tokens": 65}, llm)
    ask(CHAT, {"messages": USER, "min_tokens": 60}, llm)
    assert [params.max_tokens for _, params, _ in llm.asked] == [16, 50, 50, 70, None]
    assert [params.temperature for _, params, _ in llm.asked] == [0.5, 1.0, 0.5, 0.5, 0.5] and {params.top_k for _, params, _ in llm.asked} == {3}


def test_messages_as_the_template_gets_them() -> None:
    llm = Recorder()
    messages = [
        {"role": "developer", "content": "d"}, {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
    ]
    ask(CHAT, {"messages": messages, "continue_final_message": True, "echo": True}, llm)
    assert llm.asked[0][0].text == "<system>d\n<user>one\ntwo\n<assistant>\n<tool>r\n<assistant>x"
    ask(CHAT, {"messages": messages, "add_generation_prompt": False}, llm)
    assert llm.asked[1][0].text.endswith("<assistant>x\n")
    continued = ask(CHAT, {"messages": messages, "continue_final_message": True, "echo": True, "stream": True}, llm)
    assert joined(continued) == "xé!"
    assert ask(CHAT, {"messages": messages, "continue_final_message": True}, llm)["choices"][0]["message"]["content"] == "é!"


TRUNCATED = [(3, None, "fgh"), (3, "left", "fgh"), (3, "right", "abc"), (8, None, "abcdefgh"), (-1, None, "cdefgh")]


@pytest.mark.parametrize(("keep", "side", "want"), TRUNCATED)
def test_truncated_prompts(keep: int, side: str | None, want: str) -> None:
    for prompt in ("abcdefgh", list(b"abcdefgh")):
        llm = Recorder(context=10)
        ask(COMPLETIONS, {"prompt": prompt, "truncate_prompt_tokens": keep, "truncation_side": side, "max_tokens": 4 if keep == -1 else 1}, llm)
        assert bytes(llm.asked[0][0].ids).decode() == want


def test_tokenize_and_detokenize() -> None:
    async def run() -> None:
        async with client(create_app(ScriptedLLM(context=5), ServerSettings())) as http:
            answer = (await http.post("/tokenize", json={"prompt": "abcdefgh", "return_token_strs": True})).json()
            assert answer == {"count": 8, "max_model_len": 5, "tokens": list(b"abcdefgh"), "token_strs": list("abcdefgh")}
            rendered = (await http.post("/tokenize", json={"messages": USER})).json()
            assert bytes(rendered["tokens"]) == b"<user>hi\n<assistant>"
            assert (await http.post("/detokenize", json={"tokens": [104, 105, 256]})).json() == {"prompt": "hi<end>"}
            assert (await http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}

    asyncio.run(run())


def test_a_model_without_a_tokenizer() -> None:
    from octavo.engine.inputs import Inputs

    llm: Any = ScriptedLLM(ANSWER)
    llm.tokenizer = llm.template = None
    llm.inputs = Inputs(tokenizer=None, vocab=257, max_model_len=99, max_logprobs=5, eos_ids=[END], seed=0)
    chunks = ask(COMPLETIONS, {"prompt": [1, 2], "stream": True, "return_token_ids": True, "logprobs": 1, "echo": True}, llm)[:-1]
    assert joined(chunks) == "" and [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[195, 169], [33], [256]]
    assert chunks[1]["choices"][0]["logprobs"]["tokens"] == ["token_id:33"]


def test_the_fingerprint_changes_with_the_precision_only() -> None:
    from dataclasses import replace

    found = set()
    for dtype in ("bfloat16", "float32", "float32"):
        llm = ScriptedLLM(ANSWER)
        llm.config = replace(llm.config, model=replace(llm.config.model, dtype=dtype))
        found.add(ask(COMPLETIONS, {"prompt": "a"}, llm)["system_fingerprint"])
    assert len(found) == 2


def test_text_cannot_break_out_of_an_event() -> None:
    nasty = 'line\r\n\r\ndata: [DONE]\n\n"quote"\u2028\x00\x85'
    llm = ScriptedLLM([[byte] for byte in nasty.encode()] + [[END]])
    assert joined(ask(COMPLETIONS, {"prompt": "a", "stream": True, "max_tokens": 200}, llm)) == nasty
    assert json.dumps(ask(CHAT, {"messages": USER}, llm)["choices"][0]["message"]["content"]) == json.dumps(nasty)
