"""The offline engine end to end on tiny random checkpoints, over each backend that is here."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import make_tiny

from octavo import LLM, ConfigError, ContextTooLong, InvalidRequest, RequestOutput, SamplingParams, UnsupportedError, WorkerDied

VOCAB = 320
PROMPTS = [[1, 7, 30, 200], [5], [9, 9, 9, 300, 12, 77, 45, 101, 6, 2, 3, 4, 5, 6, 7, 8, 250], list(range(3, 51))]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def native_is_here() -> bool:
    try:
        import octavo.ops.native  # noqa: F401
    except ImportError:
        return False
    return True


BACKENDS = ["torch", pytest.param("native", marks=pytest.mark.skipif(not native_is_here(), reason="the native library is not built here"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), arch="llama", scale=0.3))


def make(folder: str, backend: str, **kw: Any) -> LLM:
    settings = {"backend": backend, "dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 16, "max_model_len": 256, "num_threads": 1}
    return LLM(folder, **{**settings, **kw})


@pytest.fixture(scope="module", params=BACKENDS)
def llm(request: pytest.FixtureRequest, folder: str) -> Iterator[LLM]:
    with make(folder, request.param) as made:
        yield made


@pytest.fixture(scope="module")
def oracle(folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def run(llm: LLM, prompts: list[Any], params: Any) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def log_probabilities(oracle: Any, tokens: list[int]) -> Any:
    """[n, V]: row p is the distribution of token p + 1."""
    import torch

    with torch.no_grad():
        return torch.log_softmax(oracle(torch.tensor([tokens])).logits[0].float(), -1)


# -- right tokens


def test_greedy_is_what_transformers_generates(llm: LLM, oracle: Any) -> None:
    import torch

    outputs = run(llm, PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        want = oracle.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=20,
                               do_sample=False, eos_token_id=None, pad_token_id=0)[0, len(prompt) :].tolist()
        sample = output.outputs[0]
        assert sample.token_ids == want and (sample.finish_reason, sample.stop_reason) == ("length", None)
        assert output.finished and output.prompt_token_ids == prompt and output.num_cached_tokens == 0
        assert sample.text == llm.get_tokenizer().decode(want) and sample.cumulative_logprob is None and sample.logprobs is None


def test_logprobs_are_log_softmax(llm: LLM, oracle: Any) -> None:
    outputs = run(llm, PROMPTS, SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True, logprobs=4, prompt_logprobs=3))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        sample = output.outputs[0]
        whole = [*prompt, *sample.token_ids]
        table = log_probabilities(oracle, whole)
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
        assert sample.logprobs is not None and len(sample.logprobs) == 12
        for position, row in enumerate([*output.prompt_logprobs[1:], *sample.logprobs]):
            truth, top = table[position], 3 if position < len(prompt) - 1 else 4
            token = whole[position + 1]
            best = truth.topk(top).values.tolist()
            assert next(iter(row)) == token and top <= len(row) <= top + 1
            assert row[token].rank == 1 + int((truth > truth[token]).sum())
            for candidate, got in row.items():
                assert got.logprob == pytest.approx(float(truth[candidate]), abs=2e-4)
                assert got.decoded_token == llm.get_tokenizer().token_text(candidate)
            shown = sorted((got.logprob for got in row.values() if got.rank <= top), reverse=True)
            assert shown == pytest.approx(best, abs=2e-4) and {got.rank for got in row.values()} >= set(range(1, top + 1))
        assert sample.cumulative_logprob == pytest.approx(sum(row[t].logprob for row, t in zip(sample.logprobs, sample.token_ids)))


def test_no_logprobs_and_no_alternatives(llm: LLM) -> None:
    sample = run(llm, [PROMPTS[0]], SamplingParams(temperature=0, max_tokens=3, logprobs=0))[0].outputs[0]
    assert [list(row) for row in sample.logprobs] == [[t] for t in sample.token_ids]


def mixed() -> list[SamplingParams]:
    """One of every kind. Few candidates where something is drawn: torch's products differ in the last bits with the
    batch, and each of the candidates' boundaries is a chance for that to show (native: tests/matrix has no such limit)."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.8, "seed": 1, "logprobs": 2}, {"temperature": 1.2, "seed": -2},
        {"temperature": 0, "repetition_penalty": 1.4, "prompt_logprobs": 1}, {"temperature": 0.9, "top_p": 0.8, "seed": 3, "presence_penalty": 1.0},
        {"temperature": 0.7, "seed": 4, "frequency_penalty": 0.9, "logprobs": 1}, {"temperature": 1.0, "min_p": 0.05, "seed": 5, "n": 2},
        {"temperature": 0, "min_tokens": 9, "stop_token_ids": [7, 11, 13]}, {"temperature": 0, "bad_words": ["the", "e"]},
        {"temperature": 0.8, "seed": 6, "logit_bias": {9: 5.0, 10: -100.0}}, {"temperature": 0, "allowed_token_ids": list(range(50, 90))},
    ]
    return [SamplingParams(max_tokens=18, top_k=6, **kind) for kind in kinds]


def close(a: list[RequestOutput], b: list[RequestOutput], exact: bool) -> None:
    """The same answers; log-probabilities to the bit where the backend promises it."""
    for one, two in zip(a, b, strict=True):
        for x, y in zip(one.outputs, two.outputs, strict=True):
            assert (x.token_ids, x.text, x.finish_reason, x.stop_reason) == (y.token_ids, y.text, y.finish_reason, y.stop_reason)
        for x, y in [(one.prompt_logprobs, two.prompt_logprobs), *[(s.logprobs, t.logprobs) for s, t in zip(one.outputs, two.outputs)]]:
            assert (x is None) == (y is None)
            for row, other in zip(x or [], y or [], strict=True):
                assert (row is None) == (other is None)
                for token in row or {}:
                    assert row[token].rank == other[token].rank
                    assert row[token].logprob == (other[token].logprob if exact else pytest.approx(other[token].logprob, abs=1e-4))


@pytest.mark.parametrize("settings", [
    {"max_num_batched_tokens": 1}, {"max_num_batched_tokens": 7}, {"num_kv_blocks": 8, "max_model_len": 100}, {"max_num_seqs": 1},
    {"num_kv_blocks": 8, "max_model_len": 100, "max_num_batched_tokens": 20, "scheduling_policy": "priority"},
    {"num_kv_blocks": 8, "max_model_len": 100, "scheduling_policy": "fair", "tenant_weights": "a=2"},
    {"num_kv_blocks": 8, "max_model_len": 100, "scheduling_policy": "lpm", "admission": "predicted", "target_itl_ms": 0.001},
])
def test_the_same_answers_however_the_work_is_cut(folder: str, llm: LLM, settings: dict[str, Any]) -> None:
    backend = llm.config.runner.backend
    params = mixed()
    prompts = [PROMPTS[i % 4] for i in range(len(params))]
    want = [run(llm, [p], [s])[0] for p, s in zip(prompts, params)]
    with make(folder, backend, **settings) as other:
        got = run(other, prompts, params)
        assert (other.num_preemptions > 0) == ("num_kv_blocks" in settings and "admission" not in settings)
        assert sum(out.metrics.preemptions for out in got) == other.num_preemptions
    close(want, got, exact=backend == "native")
    assert any(len(out.outputs[0].token_ids) == 18 for out in want)


# -- parameters


def test_n_gives_distinct_reproducible_samples(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=10, ignore_eos=True)
    first, second = (run(llm, [PROMPTS[0]], params)[0] for _ in range(2))
    samples = ids([first])[0]
    assert [s.index for s in first.outputs] == [0, 1, 2, 3] and len({tuple(s) for s in samples}) == 4
    assert samples == ids([second])[0]
    alone = run(llm, [PROMPTS[0]], SamplingParams(temperature=1.0, seed=5, max_tokens=10, ignore_eos=True))[0]
    assert alone.outputs[0].token_ids == samples[0]


def test_unseeded_sampling_follows_the_engines_seed(folder: str) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)

    def draw(seed: int) -> list[Any]:
        with make(folder, "torch", seed=seed) as llm:
            return ids(run(llm, [PROMPTS[0]] * 3, params))

    one = draw(1)
    assert one == draw(1) and one != draw(2) and one[0] != one[1] != one[2]


def test_negative_seeds_are_64_bits(llm: LLM) -> None:
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=8, ignore_eos=True) for seed in (-1, 2**64 - 1, 1)]
    a, b, c = ids(run(llm, [PROMPTS[0]] * 3, params))
    assert a == b != c


def test_end_token_and_min_tokens(llm: LLM) -> None:
    free = run(llm, [PROMPTS[0]], GREEDY)[0].outputs[0].token_ids
    stop = free[3]
    at = free.index(stop)
    stopped = run(llm, [PROMPTS[0]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop]))[0].outputs[0]
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (free[: at + 1], "stop", stop)
    assert stopped.text == llm.get_tokenizer().decode(free[:at])
    kept = run(llm, [PROMPTS[0]], SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop], min_tokens=9, include_stop_str_in_output=True))
    sample = kept[0].outputs[0]
    assert stop not in sample.token_ids[:9] and not {0, 2} & set(sample.token_ids[:9]) and sample.token_ids[:at] == free[:at]
    assert sample.text == llm.get_tokenizer().decode(sample.token_ids)


def test_the_models_end_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logit_bias={2: 100.0})
    sample = run(llm, [PROMPTS[0]], params)[0].outputs[0]
    assert (sample.token_ids, sample.finish_reason, sample.stop_reason, sample.text) == ([2], "stop", None, "")
    ignoring = run(llm, [PROMPTS[0]], SamplingParams(temperature=0, max_tokens=5, logit_bias={2: 100.0}, ignore_eos=True))[0].outputs[0]
    assert (ignoring.token_ids, ignoring.finish_reason) == ([2] * 5, "length")


def test_stop_strings(llm: LLM) -> None:
    whole = run(llm, [PROMPTS[2]], GREEDY)[0].outputs[0]
    middle = whole.text[4:7]
    want = whole.text[: whole.text.index(middle)]
    stopping = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=["not there at all", middle])
    got = run(llm, [PROMPTS[2], PROMPTS[1]], [stopping, GREEDY])
    sample = got[0].outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == (want, "stop", middle)
    assert sample.token_ids == whole.token_ids[: len(sample.token_ids)] and len(sample.token_ids) < 20
    assert len(got[1].outputs[0].token_ids) == 20
    kept = run(llm, [PROMPTS[2]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=middle, include_stop_str_in_output=True))
    assert kept[0].outputs[0].text == want + middle


def test_bad_words_never_come(llm: LLM) -> None:
    free = run(llm, [PROMPTS[0]], GREEDY)[0].outputs[0]
    tokenizer = llm.get_tokenizer()
    words = [w for w in (tokenizer.decode([t]) for t in free.token_ids[:3]) if w.strip() and "\ufffd" not in w]
    phrase = tokenizer.decode(free.token_ids[4:6])
    if "\ufffd" not in phrase and len(tokenizer.encode(phrase, add_special_tokens=False)) == 2:
        words.append(phrase)
    assert words
    banned = [tokenizer.encode(w, add_special_tokens=False) for w in words]
    got = run(llm, [PROMPTS[0]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, bad_words=words))[0].outputs[0].token_ids
    assert got != free.token_ids
    for word in banned:
        assert not any(got[i : i + len(word)] == word for i in range(len(got)))


def test_logit_bias_and_allowed_tokens(llm: LLM) -> None:
    biased, allowed = run(llm, [PROMPTS[0]] * 2, [
        SamplingParams(temperature=0, max_tokens=6, logit_bias={"77": 100.0}),
        SamplingParams(temperature=4.0, seed=1, max_tokens=40, allowed_token_ids=[5, 300, 64]),
    ])
    assert biased.outputs[0].token_ids == [77] * 6
    assert set(allowed.outputs[0].token_ids) == {5, 300, 64}


def test_penalties_against_the_formula(llm: LLM, oracle: Any) -> None:
    """Each greedy token is the best of the oracle's logits with the penalties applied by the book."""
    import torch

    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.4)
    prompt = PROMPTS[2]
    got = run(llm, [prompt], params)[0].outputs[0].token_ids
    for i, token in enumerate(got):
        with torch.no_grad():
            x = oracle(torch.tensor([[*prompt, *got[:i]]])).logits[0, -1].float()
        for seen in {*prompt, *got[:i]}:
            x[seen] = x[seen] / 1.5 if x[seen] > 0 else x[seen] * 1.5
            count = got[:i].count(seen)
            x[seen] -= 0.4 * count + 0.7 * (count > 0)
        assert float(x[token]) == pytest.approx(float(x.max()), abs=1e-4)
    assert got != run(llm, [prompt], GREEDY)[0].outputs[0].token_ids


def test_max_tokens_unset_goes_to_the_context(folder: str) -> None:
    with make(folder, "torch", max_model_len=40) as llm:
        sample = run(llm, [PROMPTS[0]], SamplingParams(temperature=0, ignore_eos=True))[0].outputs[0]
        assert len(sample.token_ids) == 36 and sample.finish_reason == "length"


# -- shapes


def test_prompt_shapes(llm: LLM) -> None:
    text = "the quick brown fox"
    tokens = llm.get_tokenizer().encode(text)
    by_text = llm.generate(text, GREEDY, use_tqdm=False)
    assert len(by_text) == 1 and by_text[0].prompt == text and by_text[0].prompt_token_ids == tokens
    for prompts in ([text], {"prompt": text}, [{"prompt": text}], tokens, [tokens], {"prompt_token_ids": tokens}, (text,)):
        assert ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == ids(by_text)
    assert llm.generate([], GREEDY) == []
    two = llm.generate([text, tokens], [GREEDY, SamplingParams(temperature=0, max_tokens=2)], use_tqdm=False, priority=[0, 0])
    assert [len(o.outputs[0].token_ids) for o in two] == [20, 2] and two[1].prompt is None


def test_chat_renders_the_template(llm: LLM) -> None:
    talk = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Hi"}]
    text = "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    one = llm.chat(talk, GREEDY, use_tqdm=False)
    want = llm.get_tokenizer().encode(text, add_special_tokens=False)
    assert one[0].prompt == text and one[0].prompt_token_ids == want
    several = llm.chat([talk, talk[1:]], GREEDY, use_tqdm=False)
    assert ids(several[:1]) == ids(one) and several[1].prompt == text[text.index("<|im_start|>user") :]
    own = llm.chat(talk, GREEDY, use_tqdm=False, chat_template="{{ messages[1].content }}{{ mark }}", chat_template_kwargs={"mark": "!"})
    assert own[0].prompt == "Hi!"
    begun = [*talk, {"role": "assistant", "content": "We"}]
    go_on = llm.chat(begun, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert go_on[0].prompt.endswith("assistant\nWe")
    streamed = list(llm.stream_chat(talk, GREEDY))
    assert "".join(piece.outputs[0].text for piece in streamed) == one[0].outputs[0].text
    for bad in ([], "hello", [{"content": "x"}], 5):
        with pytest.raises(InvalidRequest, match="messages"):
            llm.chat(bad, GREEDY)


def test_streaming_is_the_same_text_in_pieces(llm: LLM) -> None:
    for params in (GREEDY, SamplingParams(temperature=0, max_tokens=20, stop=["zzz", "e"], logprobs=1), SamplingParams(n=2, seed=1, max_tokens=9)):
        whole = run(llm, [PROMPTS[2]], params)[0]
        pieces = list(llm.stream({"prompt_token_ids": PROMPTS[2]}, params))
        assert [p.finished for p in pieces] == [False] * (len(pieces) - 1) + [True] and len(pieces) > 1
        for index, sample in enumerate(whole.outputs):
            mine = [s for p in pieces for s in p.outputs if s.index == index]
            assert "".join(s.text for s in mine) == sample.text and [t for s in mine for t in s.token_ids] == sample.token_ids
            assert (mine[-1].finish_reason, mine[-1].stop_reason) == (sample.finish_reason, sample.stop_reason)
            assert [s.finish_reason for s in mine[:-1]] == [None] * (len(mine) - 1)
            if sample.logprobs is not None:
                assert [list(row) for s in mine for row in s.logprobs] == [list(row) for row in sample.logprobs]


def test_defaults_of_the_model(tmp_path: Path) -> None:
    import json

    made = make_tiny(tmp_path / "m")
    settings = {"temperature": 0.5, "top_k": 7, "max_new_tokens": 3, "repetition_penalty": 1.25, "do_sample": True, "eos_token_id": [2, 0]}
    (made / "generation_config.json").write_text(json.dumps(settings))
    with make(str(made), "torch") as llm:
        got = llm.get_default_sampling_params()
        assert (got.temperature, got.top_k, got.max_tokens, got.repetition_penalty) == (0.5, 7, 3, 1.25)
        assert len(llm.generate([PROMPTS[0]], use_tqdm=False)[0].outputs[0].token_ids) <= 3
    with make(str(made), "torch", generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_without_a_tokenizer(tmp_path: Path) -> None:
    made = make_tiny(tmp_path / "m", tokenizer=False)
    with make(str(made), "torch") as llm:
        sample = run(llm, [PROMPTS[0]], SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True))[0].outputs[0]
        assert sample.text == "" and len(sample.token_ids) == 4 and all(c.decoded_token is None for row in sample.logprobs for c in row.values())
        for act in (lambda: llm.generate("hello"), lambda: llm.generate([[1]], SamplingParams(stop="x"))):
            with pytest.raises(InvalidRequest, match="tokenizer"):
                act()
        for act in (llm.get_tokenizer, lambda: llm.chat([{"role": "user", "content": "x"}])):
            with pytest.raises(ConfigError, match="tokenizer"):
                act()
    other = make_tiny(tmp_path / "other", seed=1)
    with make(str(made), "torch", tokenizer=str(other)) as llm:
        assert llm.generate("the", GREEDY, use_tqdm=False)[0].prompt_token_ids == llm.get_tokenizer().encode("the")


# -- trouble


@pytest.mark.parametrize(("prompts", "params", "error", "words"), [
    ([[1], []], None, InvalidRequest, "prompt 1 of 2: prompt_token_ids is empty"),
    ([[1], [320]], None, InvalidRequest, r"prompt 1 of 2: prompt_token_ids\[0\] is 320"),
    ([[1], [1] * 256], None, ContextTooLong, "prompt 1 of 2: the prompt has 256 tokens; the context holds 256"),
    ([[1], [2]], [GREEDY], InvalidRequest, "1 entries for 2 prompts"),
    ([[1], [2]], [GREEDY, None], InvalidRequest, "not None"),
    ([[1], [2]], [GREEDY, SamplingParams(logprobs=21)], InvalidRequest, "prompt 1 of 2: logprobs is 21"),
    ([[1], [2]], {"n": 1}, InvalidRequest, "sampling_params"),
    (5, None, InvalidRequest, "not int"),
    ([None], None, InvalidRequest, "not NoneType"),
])
def test_bad_input_runs_nothing_and_the_engine_goes_on(llm: LLM, prompts: Any, params: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        llm.generate(prompts, params, use_tqdm=False)
    assert not llm._engine.core.has_work
    assert len(run(llm, [PROMPTS[0]], GREEDY)[0].outputs[0].token_ids) == 20


def test_bad_priority(llm: LLM) -> None:
    for bad in ("1", True, [1, 2], 1.5, 2**63):
        with pytest.raises(InvalidRequest, match="priority"):
            llm.generate([[1]], GREEDY, priority=bad)
    with pytest.raises(InvalidRequest, match="priority is 3, and the scheduling policy fcfs pays no heed to it"):
        llm.generate([[1], [2]], GREEDY, priority=[0, 3])


def test_tenants_reach_the_scheduler(folder: str) -> None:
    with make(folder, "native", scheduling_policy="fair", max_num_seqs=1) as llm:
        core, told = llm._engine.core, []
        add = core.add
        core.add = lambda request: (told.append(request.tenant), add(request))[1]
        llm.generate([[1], [2], [3]], GREEDY, use_tqdm=False, tenant=["a", "b", "a"])
        llm.generate([1], GREEDY, use_tqdm=False, tenant="c")
        llm.generate([1], GREEDY, use_tqdm=False)
        assert told == ["a", "b", "a", "c", ""]
        for bad, words in (([1], "tenant must be str"), (["a", "b"], "2 entries for 1"), (5, "tenant"), ("x" * 257, "257 char"),
                           ("\ud800", "surrogate")):
            with pytest.raises(InvalidRequest, match=words) as caught:
                llm.generate([[1]], GREEDY, tenant=bad)
            assert caught.value.param == "tenant"
        assert not core.has_work


def idle(llm: LLM) -> None:
    """Nothing is left of anything: all blocks and slots are free once the aborts were handed out."""
    scheduler = llm._engine.core._scheduler
    if llm._engine.core.has_work:
        llm._engine.core.step()
    scheduler.check()
    assert not scheduler.has_unfinished and scheduler.kv.ledger().live == 0 and not llm._driver._open


def test_an_interrupt_takes_back_what_was_asked(llm: LLM) -> None:
    program = llm._engine.core.executor._program
    run_step, calls = program.run, []

    class Interrupting:
        def run(self) -> None:
            calls.append(0)
            run_step()
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGINT)

    want = ids(run(llm, PROMPTS, GREEDY))
    llm._engine.core.executor._program = Interrupting()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(llm, PROMPTS, GREEDY)
    finally:
        llm._engine.core.executor._program = program
    assert len(calls) == 3 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    idle(llm)
    assert ids(run(llm, PROMPTS, GREEDY)) == want


def test_a_stream_that_is_left_early(llm: LLM) -> None:
    stream = llm.stream({"prompt_token_ids": PROMPTS[0]}, GREEDY)
    next(stream)
    other = ids(run(llm, [PROMPTS[3]], GREEDY))  # runs beside it
    stream.close()
    assert list(stream) == []
    idle(llm)
    unread = llm.stream({"prompt_token_ids": PROMPTS[0]}, GREEDY)
    del unread
    idle(llm)
    assert ids(run(llm, [PROMPTS[3]], GREEDY)) == other


def test_threads_share_the_engine(llm: LLM) -> None:
    want = [ids(run(llm, [p], GREEDY)) for p in PROMPTS]
    got: dict[int, Any] = {}

    def work(i: int) -> None:
        got[i] = ids(run(llm, [PROMPTS[i]], GREEDY))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(4)] == want


def test_a_broken_step_is_worker_died(folder: str) -> None:
    llm = make(folder, "torch")

    def broken() -> None:
        raise ZeroDivisionError("a kernel")

    llm._engine.core.executor._program.run = broken
    with pytest.raises(WorkerDied, match="ZeroDivisionError: a kernel") as caught:
        run(llm, PROMPTS, GREEDY)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(WorkerDied):
        run(llm, PROMPTS, GREEDY)
    llm.shutdown()


def test_shutdown_gives_everything_back(folder: str) -> None:
    import gc
    import weakref

    for backend in ("torch", "native") if native_is_here() else ("torch",):
        llm = make(folder, backend)
        run(llm, PROMPTS, GREEDY)
        program, store = (weakref.ref(getattr(llm._engine.core.executor, name)) for name in ("_program", "_kv"))
        llm.shutdown()
        gc.collect()
        assert program() is None and store() is None and llm is not None


def test_shutdown(folder: str) -> None:
    with make(folder, "torch") as llm:
        stream = llm.stream({"prompt_token_ids": PROMPTS[0]}, GREEDY)
        next(stream)
        llm.shutdown()
        assert [piece.outputs[0].finish_reason for piece in stream] == ["abort"]
    llm.shutdown()
    for act in (lambda: llm.generate([[1]]), lambda: llm.config, llm.get_tokenizer):
        with pytest.raises(WorkerDied, match="shut down"):
            act()


# -- start


@pytest.mark.parametrize(("settings", "error", "words"), [
    ({"max_model_len": 4096}, ConfigError, "max_model_len is 4096; the model was made for 2048"),
    ({"max_model_len": 128, "num_kv_blocks": 7}, ConfigError, r"max_model_len is 128, .* 7 blocks holds 112 .* num_kv_blocks=8"),
    ({"num_kv_blocks": None, "kv_cache_memory_bytes": 1000}, ConfigError, "kv_cache_memory_bytes is 1000; one block of 16 tokens takes"),
    ({"num_kv_blocks": 2**26}, ConfigError, "67108864 blocks takes .* available"),
    ({"dtype": "bfloat16", "kv_cache_dtype": "float32"}, UnsupportedError, "kv_cache_dtype"),
    ({"chat_template": "/no/such/file"}, ConfigError, "chat_template"),
])
def test_settings_against_the_model(folder: str, settings: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        make(folder, "torch", **settings)


def test_the_context_is_cut_to_the_pool(folder: str) -> None:
    with make(folder, "torch", max_model_len=None, num_kv_blocks=5) as llm:
        assert llm.max_model_len == 80 and llm.config.model.max_model_len == 80 and llm.vocab_size == VOCAB
        assert len(run(llm, [[1] * 79], SamplingParams(temperature=0))[0].outputs[0].token_ids) == 1
        assert len(run(llm, [[1] * 70], SamplingParams(temperature=0, ignore_eos=True))[0].outputs[0].token_ids) == 10
        with pytest.raises(ContextTooLong, match="at most 79"):
            run(llm, [[1] * 80], GREEDY)
    with make(folder, "torch", max_model_len=None, num_kv_blocks=None, kv_cache_memory_bytes=2 * 16 * 2 * 3 * 2 * 32 * 4) as llm:
        assert llm.config.kv.num_kv_blocks == 2  # bytes of a block: 16 tokens · K, V · 3 layers · 2 heads · 32 (16 padded) · 4


def test_start_up_is_told(folder: str) -> None:
    class Told:
        def __init__(self) -> None:
            self.lines: list[str] = []

        def begin(self, phase: str) -> None:
            self.lines.append(f"begin {phase}")

        def progress(self, what: str, done: int, total: int | None) -> None:
            self.last = (what, done, total)

        def end(self, phase: str, seconds: float) -> None:
            assert self.lines[-1] == f"begin {phase}" and seconds >= 0

        def note(self, text: str) -> None:
            self.lines.append(text)

    told = Told()
    with make(folder, "torch", report=told, dtype="auto") as llm:
        text = "\n".join(told.lines)
        for words in ("begin loading", "computing in bfloat16; the checkpoint holds F32; dtype=float32", "KV pool of 64 blocks: 1024 tokens",
                      "context 256 tokens of 2048", "weights ", "ready in"):
            assert words in text, words
        assert told.last[0] == "weights" and told.last[1] == told.last[2] > 0
        assert llm.config.model.dtype == llm.config.kv.kv_cache_dtype == "bfloat16" and llm.ledger.kv == 64 * 16 * 2 * 3 * 2 * 32 * 2


@pytest.mark.parametrize(("given", "kept", "bits", "scales"), [
    ("bfloat16", "bfloat16", 16, 0), ("fp8", "fp8_e4m3", 8, 2), ("int8", "int8", 8, 2), ("int4", "int4", 4, 2),
])
def test_a_kv_cache_of_its_own_type(folder: str, given: str, kept: str, bits: int, scales: int, caplog: pytest.LogCaptureFixture) -> None:
    """More blocks fit the same memory, and it is told."""
    one = 3 * 2 * 2 * (32 * bits // 8 + scales)  # bytes of a token: 3 layers · 2 heads · K, V · 32 (16 padded)
    pool = {"kv_cache_dtype": given, "num_kv_blocks": None, "kv_cache_memory_bytes": 64 * 16 * one}
    with caplog.at_level(logging.INFO, "octavo"), make(folder, "torch", **pool) as llm:
        assert (llm.config.kv.kv_cache_dtype, llm.config.kv.num_kv_blocks, llm.ledger.kv) == (kept, 64, 64 * 16 * one)
        assert any(f"1024 tokens in {kept} at" in record.getMessage() for record in caplog.records)
        (out,) = llm.generate(["abc"], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
        assert len(out.outputs[0].token_ids) == 3


def test_the_log(folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "octavo"), make(folder, "torch"):
        pass
    assert any("context 256" in record.getMessage() for record in caplog.records)
    monkeypatch.setenv("OCTAVO_LOG", "loud")
    with pytest.raises(ConfigError, match="OCTAVO_LOG"):
        make(folder, "torch")


# -- the prefix cache


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [15, 16, 17, 47, 48, 49])
def test_cached_prefixes_change_no_bit(folder: str, backend: str, length: int) -> None:
    prompt = [(7 * i) % 200 + 3 for i in range(length)]
    params = [SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2),
              SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True, repetition_penalty=1.2, frequency_penalty=0.3, logprobs=2)]
    def told(llm: LLM, prompts: list[list[int]], one: SamplingParams) -> list[Any]:
        samples = [sample for output in run(llm, prompts, one) for sample in output.outputs]
        if backend == "torch":  # eager torch is no bitwise pure function of a row
            return [o.token_ids for o in samples]
        return [(o.token_ids, [{t: x.logprob for t, x in row.items()} for row in o.logprobs or ()]) for o in samples]

    with make(folder, backend, enable_prefix_caching=False) as off, make(folder, backend) as on:
        assert not off.config.kv.enable_prefix_caching and on.config.kv.enable_prefix_caching
        for one in params:
            want = told(off, [prompt], one)
            tokens = want[0] if backend == "torch" else want[0][0]
            turn = [*prompt, *tokens, 9, 9, 9]
            after = told(off, [turn], one)
            on.reset_prefix_cache()
            for cached in (0, (length - 1) // 16 * 16):
                (output,) = run(on, [prompt], one)
                assert output.num_cached_tokens == cached
                assert told(on, [prompt], one) == want
            (output,) = run(on, [turn], one)
            assert output.num_cached_tokens == (length + 19) // 16 * 16  # the last sampled token was never computed
            assert told(on, [turn, turn], one) == after * 2
            (output,) = run(on, [prompt], SamplingParams(max_tokens=2, prompt_logprobs=1))
            assert output.num_cached_tokens == 0 and output.prompt_logprobs is not None and len(output.prompt_logprobs) == length
            salted = on.generate({"prompt_token_ids": prompt, "cache_salt": "s"}, one, use_tqdm=False)
            assert salted[0].num_cached_tokens == 0 and salted[0].outputs[0].token_ids == tokens
            ledger = on.kv_ledger
            assert (ledger.live, ledger.shared, ledger.utilization) == (0, 0, 1) and ledger.cached > 0 and ledger.cached + ledger.free == 64
        assert off.prefix_cache_stats == (0, 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 30, 33])
def test_samples_of_one_prompt_are_what_they_are_alone(folder: str, backend: str, caching: bool, length: int) -> None:
    prompt = [(5 * i) % 200 + 3 for i in range(length)]
    params = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=18, ignore_eos=True, presence_penalty=0.4, logprobs=1)
    with make(folder, backend, enable_prefix_caching=caching, max_num_seqs=4) as shared, \
            make(folder, backend, enable_prefix_caching=False, max_num_seqs=1) as apart:
        (one,), (other,) = (run(llm, [prompt], params) for llm in (shared, apart))
        assert [s.token_ids for s in one.outputs] == [s.token_ids for s in other.outputs] and len({tuple(s.token_ids) for s in one.outputs}) == 3
        if backend == "native":
            assert [s.logprobs for s in one.outputs] == [s.logprobs for s in other.outputs]
        counters = shared._running().core.counters
        assert counters.tokens_planned == length + 17 + 2 * 18
