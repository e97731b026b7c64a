"""The openai package against a real server over a tiny model: its usual calls, and the same tokens as the offline engine."""

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from tests.server.conftest import SETTINGS, Live
from tests.server.test_errors import CHAT_ONLY, COMPLETION_ONLY, SHARED

from octavo import LLM, SamplingParams

PROMPTS = ["def add(a, b):", "The quick brown fox", "0 1 2 3 10", "an octavo is a sheet folded"]
CHATS = [[{"role": "user", "content": text}] for text in PROMPTS]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 0.9, "seed": 7}, {"temperature": 1.3, "seed": -3, "top_p": 0.8, "n": 2},
    {"temperature": 0.8, "seed": 1, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {"40": 5.0}},
]
EXTRA: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def api(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def offline(tiny: str) -> Any:
    with LLM(tiny, **SETTINGS) as llm:
        yield llm


def params(kind: dict[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(**(kind | {"ignore_eos": True} | more))


def test_models(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["tiny", "alias"]
    assert api.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError) as caught:
        api.models.retrieve("gpt-4o")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


@pytest.mark.parametrize("kind", KINDS)
def test_completions_are_the_offline_engine_s(api: openai.OpenAI, offline: LLM, kind: dict[str, Any]) -> None:
    wanted = offline.generate(PROMPTS, params(kind, max_tokens=24, logprobs=2), use_tqdm=False)
    answer = api.completions.create(model="tiny", prompt=PROMPTS, max_tokens=24, logprobs=2, extra_body=EXTRA, **kind)
    samples = [sample for output in wanted for sample in output.outputs]
    assert [choice.index for choice in answer.choices] == list(range(len(samples)))
    for choice, sample in zip(answer.choices, samples, strict=True):
        assert choice.text == sample.text and choice.token_ids == sample.token_ids and choice.finish_reason == "length"
        assert choice.logprobs.token_logprobs == [row[token].logprob for token, row in zip(sample.token_ids, sample.logprobs)]
        assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset) and len(choice.logprobs.tokens) == 24
    assert answer.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in wanted)
    assert answer.usage.completion_tokens == 24 * len(samples) and answer.usage.total_tokens > answer.usage.completion_tokens
    chunks = list(api.completions.create(model="alias", prompt=PROMPTS, max_tokens=24, stream=True, extra_body=EXTRA, **kind))
    for index, sample in enumerate(samples):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.text for choice in mine) == sample.text and [t for choice in mine for t in choice.token_ids] == sample.token_ids
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["length"]


@pytest.mark.parametrize("kind", KINDS)
def test_chats_are_the_offline_engine_s(api: openai.OpenAI, offline: LLM, kind: dict[str, Any]) -> None:
    for messages, output in zip(CHATS, offline.chat(CHATS, params(kind, max_tokens=16, logprobs=1), use_tqdm=False), strict=True):
        answer = api.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=16, logprobs=True, top_logprobs=1,
                                             extra_body=EXTRA, **kind)
        for choice, sample in zip(answer.choices, output.outputs, strict=True):
            assert choice.message.content == sample.text and choice.message.role == "assistant" and choice.token_ids == sample.token_ids
            content = choice.logprobs.content
            assert [entry.logprob for entry in content] == [row[token].logprob for token, row in zip(sample.token_ids, sample.logprobs)]
            plain = [entry.bytes for entry, token in zip(content, sample.token_ids, strict=True) if token > 2]  # the others are special
            assert bytes(byte for part in plain for byte in part).decode("utf-8", "replace") == sample.text
        stream = api.chat.completions.create(model="tiny", messages=messages, max_tokens=16, stream=True, stream_options={"include_usage": True},
                                             extra_body=EXTRA, **kind)
        chunks = list(stream)
        first, again = answer.usage, chunks[-1].usage
        assert chunks[-1].choices == [] and again.prompt_tokens == first.prompt_tokens and again.completion_tokens == first.completion_tokens
        assert again.prompt_tokens_details.cached_tokens == (first.prompt_tokens - 1) // 16 * 16  # the whole prompt was asked before
        for index, sample in enumerate(output.outputs):
            mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
            assert mine[0].delta.role == "assistant" and "".join(choice.delta.content or "" for choice in mine) == sample.text
            assert mine[-1].finish_reason == "length"


def test_beams_are_the_offline_engine_s(api: openai.OpenAI, offline: LLM) -> None:
    """Also streamed: each beam whole, when all are found. What the model's own defaults say of sampling is no matter."""
    beams = {"use_beam_search": True, "best_of": 3, "length_penalty": 0.5, "early_stopping": "never"}
    search = SamplingParams(n=2, max_tokens=12, ignore_eos=True, **beams)
    wanted = [sample for output in offline.generate(PROMPTS, search, use_tqdm=False) for sample in output.outputs]
    extra = EXTRA | beams | {"ignore_eos": True}
    answer = api.completions.create(model="tiny", prompt=PROMPTS, max_tokens=12, n=2, extra_body=extra)
    assert [(choice.text, choice.token_ids) for choice in answer.choices] == [(sample.text, sample.token_ids) for sample in wanted]
    assert answer.usage.completion_tokens == 12 * len(wanted)
    stream = api.completions.create(model="tiny", prompt=PROMPTS, max_tokens=12, n=2, stream=True, extra_body=extra)
    chunks = [choice for chunk in stream for choice in chunk.choices]
    assert sorted((c.index, c.text, c.finish_reason) for c in chunks) == [(index, sample.text, "length") for index, sample in enumerate(wanted)]
    (output,) = offline.chat(CHATS[0], search, use_tqdm=False)
    chat = api.chat.completions.create(model="tiny", messages=CHATS[0], max_completion_tokens=12, n=2, extra_body=extra)
    assert [choice.message.content for choice in chat.choices] == [sample.text for sample in output.outputs]
    for field, value in (("top_p", 0.5), ("stop", ["a"]), ("temperature", 0.7)):
        with pytest.raises(openai.BadRequestError) as caught:
            api.completions.create(model="tiny", prompt="a", n=2, extra_body=extra, **{field: value})
        assert caught.value.param == field


def test_everything_at_once_is_the_same(live: Live, offline: LLM) -> None:
    """48 requests of all kinds in flight together, a third of them leaving in the middle: the others get the offline tokens."""
    jobs = [(prompt, kind, leave) for kind in KINDS for prompt in PROMPTS for leave in (False, False, True)]
    wanted = {
        (prompt, json.dumps(kind)): [sample.token_ids for sample in output.outputs]
        for kind in KINDS for prompt, output in zip(PROMPTS, offline.generate(PROMPTS, params(kind, max_tokens=60), use_tqdm=False))
    }

    async def one(api: openai.AsyncOpenAI, prompt: str, kind: dict[str, Any], leave: bool) -> None:
        stream = await api.completions.create(model="tiny", prompt=prompt, max_tokens=60, stream=True, extra_body=EXTRA, **kind)
        got: list[list[int]] = [[] for _ in range(kind.get("n", 1))]
        async for chunk in stream:
            for choice in chunk.choices:
                got[choice.index].extend(choice.token_ids)
            if leave:
                await stream.close()
                return
        assert got == wanted[prompt, json.dumps(kind)]

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=60) as api:
            await asyncio.gather(*(one(api, *job) for job in jobs))

    asyncio.run(run())
    live.until(lambda: live.llm.num_open == 0 and live.llm.stats.running == 0)


def test_token_ids_and_echo(api: openai.OpenAI, offline: LLM) -> None:
    ids = offline.get_tokenizer().encode(PROMPTS[0])
    expected = offline.generate({"prompt_token_ids": ids}, params({"temperature": 0}, max_tokens=8, prompt_logprobs=1), use_tqdm=False)[0]
    for prompt in (PROMPTS[0], ids, [ids], [PROMPTS[0]]):
        choice = api.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0, echo=True, logprobs=1, extra_body=EXTRA).choices[0]
        assert choice.text == PROMPTS[0] + expected.outputs[0].text
        scores = choice.logprobs
        assert scores.token_logprobs[0] is None and len(scores.tokens) == len(ids) + 8
        assert scores.token_logprobs[1 : len(ids)] == [row[token].logprob for token, row in zip(ids[1:], expected.prompt_logprobs[1:])]
        alone = api.completions.create(model="tiny", prompt=prompt, max_tokens=0, temperature=0, echo=True, logprobs=1).choices[0]
        assert alone.text == PROMPTS[0] and alone.logprobs.token_logprobs == scores.token_logprobs[: len(ids)]
        for offset, token in zip(alone.logprobs.text_offset, alone.logprobs.tokens, strict=True):
            assert PROMPTS[0].startswith(token, offset)


def test_stop_strings(api: openai.OpenAI, offline: LLM) -> None:
    text = offline.generate(PROMPTS[1], params({"temperature": 0}, max_tokens=40), use_tqdm=False)[0].outputs[0].text
    stop = text[9:12]
    for stream in (False, True):
        answer = api.completions.create(model="tiny", prompt=PROMPTS[1], max_tokens=40, temperature=0, stop=[stop, "never there"], stream=stream,
                                        extra_body=EXTRA)
        choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
        assert choices[-1].finish_reason == "stop" and choices[-1].stop_reason == stop


def test_errors_as_the_package_raises_them(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(model="tiny", prompt="x", temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="tiny", messages=CHATS[0], max_tokens=600, stream=True)
    assert caught.value.code == "context_length_exceeded" and "at most" in str(caught.value)
    with pytest.raises(openai.BadRequestError, match="at most 511"):
        api.completions.create(model="tiny", prompt=[5] * 512)
    with pytest.raises(openai.BadRequestError, match="so no text above"):
        api.completions.create(model="tiny", prompt="word " * 1_000_000)


def test_an_exact_fit_is_served(api: openai.OpenAI) -> None:
    answer = api.completions.create(model="tiny", prompt=[5] * 500, max_tokens=12, extra_body=EXTRA)
    assert answer.usage.total_tokens == 512 and answer.choices[0].finish_reason == "length"
    unset = api.completions.create(model="tiny", prompt=[5] * 509, max_tokens=None, extra_body=EXTRA)
    assert unset.usage.completion_tokens == 3


def test_extreme_numbers_are_refused_or_harmless(live: Live) -> None:
    extremes: list[tuple[str, Any]] = [
        ("temperature", 1e-300), ("temperature", 1e300), ("temperature", 5e-324), ("repetition_penalty", 1e-300), ("repetition_penalty", 1e300),
        ("top_p", 1e-300), ("min_p", 1.0), ("top_k", 2**31 - 1), ("seed", -(2**63)), ("seed", 2**64 - 1), ("min_tokens", 2**31 - 1),
        ("logit_bias", {"5": 100.0, "6": -100.0}), ("priority", -(2**31)), ("presence_penalty", -2.0), ("frequency_penalty", 2.0),
    ]
    for field, value in extremes:
        response = httpx.post(live.url + "/v1/completions", json={"prompt": PROMPTS[0], "max_tokens": 4, "logprobs": 1, "seed": 1, field: value})
        assert response.status_code in (200, 400), (field, value, response.text)
        if response.status_code == 200:
            assert all(isinstance(p, float) for p in response.json()["choices"][0]["logprobs"]["token_logprobs"])
    assert live.llm.health() is None


def test_the_table_of_bad_fields_holds_on_the_real_server(live: Live) -> None:
    with httpx.Client(base_url=live.url) as http:
        tables = ("/v1/completions", {"prompt": "p"}, SHARED + COMPLETION_ONLY), ("/v1/chat/completions", {"messages": CHATS[0]}, SHARED + CHAT_ONLY)
        for path, base, table in tables:
            for field, value, _ in table:
                response = http.post(path, content=json.dumps(base | {field: value}), headers={"content-type": "application/json"})
                assert response.status_code < 500, (field, value, response.text)
        assert http.get("/health").status_code == 200
    live.until(lambda: live.llm.num_open == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_frees_the_blocks(live: Live, stream: bool) -> None:
    live.until(lambda: live.llm.num_open == 0)
    body = json.dumps({"prompt": [[9] * 100] * 2, "max_tokens": 400, "ignore_eos": True, "n": 2, "stream": stream, "min_tokens": 400}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: octavo\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection((live.url[7:].partition(":")[0], int(live.url.rpartition(":")[2]))) as sock:
        sock.sendall(head + body)
        live.until(lambda: live.llm.stats.running == 4)
        if stream:
            assert b"200 OK" in sock.recv(1000)
    steps = live.llm.stats.steps
    live.until(lambda: live.llm.num_open == 0)
    live.until(lambda: live.llm.stats.running == 0 and live.llm.stats.kv_live == 0)
    assert live.llm.stats.steps - steps < 200, "it ran to its end all the same"


def test_a_large_prompt_does_not_hold_health_up(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 MB are refused before anything is tokenized, and half a MB is tokenized in a thread, beside which others are answered."""
    text, less = "word and then another " * 230_000, "word and then another " * 25_000
    begun, answered, encode = threading.Event(), threading.Event(), live.llm.inputs.encode

    def slow(*args: Any, **kw: Any) -> Any:
        begun.set()
        assert answered.wait(60), "nobody else was answered meanwhile"
        return encode(*args, **kw)

    monkeypatch.setattr(live.llm.inputs, "encode", slow)
    with httpx.Client(base_url=live.url, timeout=60) as http, ThreadPoolExecutor(1) as pool:
        for path in ("/v1/completions", "/tokenize"):
            assert http.post(path, json={"prompt": text}).status_code == 400 and not begun.is_set()
        for path, body in (("/tokenize", {}), ("/v1/completions", {"truncate_prompt_tokens": 5, "max_tokens": 1})):
            begun.clear(), answered.clear()
            large = pool.submit(httpx.post, live.url + path, json={"prompt": less} | body, timeout=60)
            assert begun.wait(60) and http.get("/health").status_code == 200
            answered.set()
            assert large.result().status_code == 200, large.result().text[:300]
