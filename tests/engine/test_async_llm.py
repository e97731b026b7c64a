"""AsyncLLM over its own process with a tiny model: the same answers as LLM, and nothing lost or mixed up whoever leaves."""

import asyncio
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import make_tiny
from tests.engine.test_llm import PROMPTS, mixed, native_is_here

from octavo import LLM, AsyncLLM, ContextTooLong, InvalidRequest, RequestOutput, SamplingParams

pytestmark = pytest.mark.skipif(not native_is_here(), reason="the native library is not built here")
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_kv_blocks": 24, "max_num_seqs": 12, "max_num_batched_tokens": 64, "max_model_len": 256, "num_threads": 1, "seed": 7,
    "scheduling_policy": "priority",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), scale=0.3))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def served(folder: str, runner: asyncio.Runner) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(folder, **SETTINGS)
    runner.run(llm.start())
    yield llm
    runner.run(llm.shutdown())


@pytest.fixture(scope="module")
def offline(folder: str) -> Iterator[LLM]:
    with LLM(folder, **SETTINGS) as llm:
        yield llm


async def whole(llm: AsyncLLM, prompt: Any, params: SamplingParams, **more: Any) -> dict[int, list[Any]]:
    """All that a stream tells, put together per sequence: text, tokens, logprobs, how it ended."""
    found: dict[int, list[Any]] = {}
    scores = None
    async for output in llm.generate(prompt, params, **more):
        scores = scores or output.prompt_logprobs
        for news in output.outputs:
            one = found.setdefault(news.index, ["", [], [], None, None])
            one[0] += news.text
            one[1] += news.token_ids
            one[2] += news.logprobs or []
            assert one[3] is None, "news after the end"
            one[3:] = news.finish_reason, news.stop_reason
    if params.prompt_logprobs is not None:
        found[-1] = [scores]
    return found


def same(output: RequestOutput, params: SamplingParams) -> dict[int, list[Any]]:
    """What whole() gives for a stream with this end."""
    found = {s.index: [s.text, s.token_ids, s.logprobs or [], s.finish_reason, s.stop_reason] for s in output.outputs}
    return found | ({-1: [output.prompt_logprobs]} if params.prompt_logprobs is not None else {})


def test_the_same_answers_as_offline_alone_and_under_load(served: AsyncLLM, offline: LLM, runner: asyncio.Runner) -> None:
    params = [*mixed(), SamplingParams(n=3, seed=5, max_tokens=12, logprobs=1), SamplingParams(temperature=0, max_tokens=30, stop=["e", "\n", "a"])]
    asked = [(prompt, its) for its in params for prompt in PROMPTS]
    expected = [same(output, its) for output, (_, its) in zip(
        offline.generate([p for p, _ in asked], [its for _, its in asked], use_tqdm=False), asked, strict=True)]

    async def together() -> list[Any]:
        return await asyncio.gather(*(whole(served, prompt, its) for prompt, its in asked))

    assert runner.run(together()) == expected
    for place in range(0, len(asked), 5):
        assert runner.run(whole(served, *asked[place])) == expected[place]
    assert served.stats.preemptions > 0, "the pool is to be small enough that somebody is preempted"


def test_unseeded_requests_draw_from_the_engines_seed(folder: str) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(folder, **SETTINGS) as llm:
        expected = [same(output, params) for output in llm.generate(PROMPTS, params, use_tqdm=False)]

    async def run() -> list[Any]:
        async with AsyncLLM(folder, **SETTINGS) as llm:
            prompts = [await llm.tokenize(prompt) for prompt in PROMPTS]
            return await asyncio.gather(*(whole(llm, prompt, params) for prompt in prompts))

    assert asyncio.run(run()) == expected


def test_texts_and_conversations(served: AsyncLLM, offline: LLM, runner: asyncio.Runner) -> None:
    params, messages = SamplingParams(temperature=0, max_tokens=8), [{"role": "user", "content": "hello é"}]
    for prompt in ("The quick brown fox", {"prompt": "a block"}, {"prompt": "shown", "prompt_token_ids": [5, 6]}, [5, 6]):
        assert runner.run(whole(served, prompt, params)) == same(offline.generate(prompt, params, use_tqdm=False)[0], params)
    text = runner.run(served.render(messages, add_generation_prompt=True))
    assert runner.run(whole(served, text, params, add_special_tokens=False)) == same(offline.chat(messages, params, use_tqdm=False)[0], params)


def test_everything_so_far_equals_the_pieces(served: AsyncLLM, runner: asyncio.Runner) -> None:
    params = SamplingParams(temperature=0, max_tokens=10, n=2, logprobs=1)

    async def run() -> RequestOutput:
        return [output async for output in served.generate(PROMPTS[0], params, deltas=False)][-1]

    assert same(runner.run(run()), params) == runner.run(whole(served, PROMPTS[0], params))


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_or_mixed_up_when_readers_leave(served: AsyncLLM, offline: LLM, runner: asyncio.Runner, seed: int) -> None:
    """200 requests, a third of whose readers leave at some point, in one of four ways."""
    rng = random.Random(seed)
    asked = []
    for number in range(200):
        prompt = [rng.randrange(3, 320) for _ in range(rng.randint(1, 60))]
        params = SamplingParams(max_tokens=rng.randint(1, 40), seed=number, n=rng.choice((1, 1, 1, 2)), ignore_eos=rng.random() < 0.5,
                                stop=rng.choice(([], [], ["e"])), temperature=rng.choice((0.0, 1.0)))
        asked.append((prompt, params))
    expected = [same(output, its) for output, (_, its) in zip(
        offline.generate([p for p, _ in asked], [its for _, its in asked], use_tqdm=False), asked, strict=True)]
    leavers = {number: rng.choice(("close", "cancel", "drop", "abort")) for number in rng.sample(range(200), 67)}

    async def stay(number: int) -> dict[int, list[Any]]:
        await asyncio.sleep(rng.random() * 0.5)
        return await whole(served, *asked[number], priority=number % 3)

    async def leave(number: int) -> None:
        await asyncio.sleep(rng.random() * 0.5)
        name = f"{seed}-{number}"
        news, steps = served.generate(*asked[number], request_id=name), rng.randint(0, 6)
        tokens: dict[int, list[int]] = {}
        async def read() -> None:
            for _ in range(steps):
                output = await anext(news, None)
                for sample in output.outputs if output is not None else ():
                    tokens.setdefault(sample.index, []).extend(sample.token_ids)

        if leavers[number] == "cancel":
            task = asyncio.create_task(read())
            await asyncio.sleep(rng.random() * 0.1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await news.aclose()
        elif leavers[number] == "abort" and steps:
            await read()
            if await served.abort(name):
                async for output in news:
                    assert all(s.finish_reason in (None, "abort", "length", "stop") for s in output.outputs)
        else:
            await read()
            if leavers[number] == "close":
                await news.aclose()
        for index, found in tokens.items():
            assert found == expected[number][index][1][: len(found)]

    async def run() -> list[Any]:
        return await asyncio.gather(*(leave(number) if number in leavers else stay(number) for number in range(200)))

    results = runner.run(run())
    for number in range(200):
        assert number in leavers or results[number] == expected[number], number
    assert runner.run(served.drain(5)) and served.num_waiting == 0 and not served._board.sequences

    async def settled() -> None:
        while served.stats.kv_live or served.stats.running or served.stats.waiting:
            await asyncio.sleep(0.01)

    runner.run(asyncio.wait_for(settled(), 5))
    assert served.health() is None


def test_a_long_text_is_refused_or_tokenized_without_holding_up_the_loop(served: AsyncLLM, runner: asyncio.Runner) -> None:
    async def run() -> int:
        turns, stop = 0, asyncio.Event()

        async def watch() -> None:
            nonlocal turns
            while not stop.is_set():
                await asyncio.sleep(0.001)
                turns += 1

        watcher = asyncio.create_task(watch())
        await asyncio.sleep(0.01)
        with pytest.raises(ContextTooLong, match="256 tokens"):
            await served.tokenize("word " * 1_000_000)
        served._longest_token, kept = math.inf, served._longest_token  # as for a tokenizer that no bound is known of
        try:
            before = turns
            with pytest.raises(ContextTooLong, match="256"):
                await served.tokenize("word " * 200_000)
            during = turns - before
        finally:
            served._longest_token = kept
        with pytest.raises(InvalidRequest):
            await served.tokenize([5] * 1_000_000 + [-1])
        stop.set()
        await watcher
        return during

    assert runner.run(run()) > 5  # tokenizing inside the loop would give it no turn at all


def test_a_reset_of_the_cache_forgets_all_and_disturbs_nobody(served: AsyncLLM, runner: asyncio.Runner) -> None:
    prompt, params = [(7 * i) % 200 + 3 for i in range(40)], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)

    async def cached() -> int:
        return max([output.num_cached_tokens async for output in served.generate(prompt, SamplingParams(max_tokens=1))])

    async def scene() -> None:
        expected = await whole(served, prompt, params)
        assert await cached() == 32
        before = await served.reset_prefix_cache(), await cached(), await cached()
        assert before == (True, 0, 32)
        generation, found = served.generate(prompt, params), []
        async for output in generation:
            found += output.outputs[0].token_ids
            if len(found) == 5 or output.finished:
                await served.reset_prefix_cache()
        assert found == expected[0][1]
        assert await cached() == 0

    runner.run(scene())


def test_beams_behind_a_window_that_the_pool_cannot_hold_are_refused(tmp_path: Path) -> None:
    """As offline: this process knows what the engine's KV manager counts on."""
    folder = str(make_tiny(tmp_path / "m", "mistral", sliding_window=20))

    async def scene() -> None:
        async with AsyncLLM(folder, **(SETTINGS | {"num_kv_blocks": 10, "max_model_len": 96})) as llm:
            params = SamplingParams(use_beam_search=True, n=4, max_tokens=2)
            with pytest.raises(ContextTooLong, match="4 beams of a prompt of 64 tokens take 16 blocks"):
                await whole(llm, [7] * 64, params)
            assert llm.num_open == 0 and await whole(llm, [7] * 20, params)

    asyncio.run(scene())


def test_smollm2_gives_offlines_tokens(smollm2: str) -> None:
    prompts = ["The capital of France is", "def add(a, b):", "Once upon a time", "1 2 3 4"]
    params = [SamplingParams(temperature=0, max_tokens=24), SamplingParams(seed=3, max_tokens=24, logprobs=2)]
    settings: dict[str, Any] = {"num_kv_blocks": 200, "max_num_seqs": 8}
    asked = [(prompt, its) for prompt in prompts for its in params]
    with LLM(smollm2, **settings) as llm:
        outputs = llm.generate([p for p, _ in asked], [its for _, its in asked], use_tqdm=False)
        expected = [same(output, its) for output, (_, its) in zip(outputs, asked, strict=True)]

    async def run() -> list[Any]:
        async with AsyncLLM(smollm2, **settings) as llm:
            return await asyncio.gather(*(whole(llm, prompt, its) for prompt, its in asked))

    assert asyncio.run(run()) == expected
