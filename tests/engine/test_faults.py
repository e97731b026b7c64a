"""What must end one request, or the start, with an error that names the fault: none of it may stop a running engine."""

import asyncio
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoints import make_tiny, random_weights, save_weights, tiny_config, write_tokenizer

from octavo import LLM, AsyncLLM, CheckpointError, ConfigError, InvalidRequest, OctavoError, SamplingParams, UnsupportedError
from octavo.engine import factory
from octavo.engine.settings import make_config

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 8, "max_model_len": 128, "num_threads": 1}
SMALL = 265  # rows of the embedding; the tokenizer has more: " the" and "the" are beyond


class Told:
    """A report that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin(self, phase: str) -> None: ...
    def progress(self, what: str, done: int, total: int | None) -> None: ...
    def end(self, phase: str, seconds: float) -> None: ...

    def note(self, text: str) -> None:
        self.lines.append(text)


def here(backend: str) -> Any:
    if backend == "native":
        pytest.importorskip("octavo._native", reason="the native library is not built here", exc_type=ImportError)
    return backend


# -- a tokenizer with more tokens than the model


@pytest.fixture(scope="module")
def beyond(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = make_tiny(tmp_path_factory.mktemp("beyond"), vocab_size=SMALL, tokenizer=False)
    write_tokenizer(path, 320)
    file = path / "tokenizer.json"
    data = json.loads(file.read_text())
    extra = len(data["model"]["vocab"])  # the next id
    data["added_tokens"].append({"id": extra, "content": "<extra>", "special": True, "normalized": False, "lstrip": False, "rstrip": False,
                                 "single_word": False})
    file.write_text(json.dumps(data))
    return str(path)


@pytest.fixture(scope="module")
def told() -> Told:
    return Told()


@pytest.fixture(scope="module", params=["torch", "native"])
def llm(request: pytest.FixtureRequest, beyond: str, told: Told) -> Iterator[LLM]:
    with LLM(beyond, backend=here(request.param), report=told, **SETTINGS) as made:
        yield made


def still_well(llm: LLM) -> None:
    assert len(llm.generate("z", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 6


def test_the_start_tells_of_tokens_beyond_the_embedding(llm: LLM, told: Told) -> None:
    count = llm.get_tokenizer().vocab_size - SMALL
    line = [line for line in told.lines if "beyond" in line][-1]
    assert line.startswith(f"the tokenizer has {count} tokens beyond the model's {SMALL}, the first is ") and count > 5
    assert not [line for line in told.lines if "no token for the bytes" in line]


def test_texts_with_tokens_beyond_the_embedding(llm: LLM) -> None:
    extra = llm.get_tokenizer().token_to_id("<extra>")
    cases: list[tuple[Any, SamplingParams, str, str]] = [
        ("a<extra>b", GREEDY, "prompt", "'<extra>'"), ({"prompt": "<extra>"}, GREEDY, "prompt", "'<extra>'"),
        (["z", "a<extra>"], GREEDY, "prompt", "prompt 1 of 2: prompt holds '<extra>'"), ([extra], GREEDY, "prompt_token_ids", str(extra)),
        ("z", SamplingParams(bad_words=["z", "<extra>"]), "bad_words", "'<extra>'"),
        ("z", SamplingParams(stop_token_ids=[extra]), "stop_token_ids", ""),
    ]
    for prompt, params, name, words in cases:
        with pytest.raises(InvalidRequest) as caught:
            llm.generate(prompt, params, use_tqdm=False)
        assert caught.value.param == name and words in caught.value.message and f"0 to {SMALL - 1}" in caught.value.message
        assert str(extra) in caught.value.message
    with pytest.raises(InvalidRequest, match="'er' that the tokenizer gives the id"):  # of "<|im_start|>user"
        llm.chat([{"role": "user", "content": "<extra>"}], GREEDY, use_tqdm=False)
    stopping = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop=["<extra>"])  # a text, which never comes
    assert len(llm.generate("z", stopping, use_tqdm=False)[0].outputs[0].token_ids) == 6
    still_well(llm)


def test_a_beginning_of_text_beyond_the_embedding(beyond: str, tmp_path: Path) -> None:
    """Every text is refused, token ids are not."""
    for name in os.listdir(beyond):
        (tmp_path / name).write_bytes((Path(beyond) / name).read_bytes())
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    data["post_processor"] = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "B", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"B": {"id": "B", "ids": [700], "tokens": ["B"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with LLM(str(tmp_path), backend="torch", **SETTINGS) as llm:
        with pytest.raises(InvalidRequest, match="prompt holds a token that the tokenizer gives the id 700"):
            llm.generate("z", GREEDY, use_tqdm=False)
        assert llm.generate([[5]], GREEDY, use_tqdm=False)[0].finished


def test_the_engine_in_a_process_of_its_own(beyond: str) -> None:
    here("native")

    async def run() -> None:
        told = Told()
        async with AsyncLLM(beyond, report=told, enforce_eager=True, gpu_memory_utilization=0.5, **SETTINGS) as llm:
            assert [line for line in told.lines if "beyond" in line]
            assert "accepted, without effect here: enforce_eager, gpu_memory_utilization" in told.lines
            for prompt in ("a<extra>", {"prompt": "<extra>"}):
                with pytest.raises(InvalidRequest, match="'<extra>'"):
                    await llm.tokenize(prompt)
                with pytest.raises(InvalidRequest, match="'<extra>'"):
                    async for _ in llm.generate(prompt, GREEDY):
                        pass
            with pytest.raises(InvalidRequest, match="bad_words"):
                llm.generate("z", SamplingParams(bad_words=["<extra>"]))
            assert [out async for out in llm.generate("z", GREEDY)][-1].outputs[0].finish_reason == "length"

    asyncio.run(run())
    with pytest.raises(ConfigError, match="there is no setting max_model_length: did you mean max_model_len"):
        AsyncLLM(beyond, max_model_length=5)


# -- logits that are no numbers


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Finite weights under which token 9's last state overflows: its first value alone is not 0, and the last norm multiplies it by 3e38."""
    path = make_tiny(tmp_path_factory.mktemp("overflow"))
    weights = random_weights(tiny_config(), 0, 0.3)
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0
    weights["model.embed_tokens.weight"][:, 0] = 0
    weights["model.embed_tokens.weight"][9, 0] = 1000
    weights["model.norm.weight"][0] = 3e38
    save_weights(path, weights)
    return str(path)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_whose_logits_are_no_numbers(overflowing: str, backend: str, dtype: str) -> None:
    never = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logit_bias={9: -100.0}, logprobs=1)
    scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, logit_bias={9: -100.0})
    with LLM(overflowing, backend=here(backend), **(SETTINGS | {"dtype": dtype})) as llm:
        alone = llm.generate([[5, 6]], never, use_tqdm=False)[0].outputs[0]
        got = llm.generate([[5, 6], [5, 9], [9, 6], [9, 6]], [never, never, never, scored], use_tqdm=False)
        assert [out.outputs[0].finish_reason for out in got] == ["length", "error", "length", "error"]
        assert got[0].outputs[0].token_ids == alone.token_ids
        assert backend == "torch" or got[0].outputs[0].logprobs == alone.logprobs
        assert got[1].outputs[0].token_ids == [] and "position 2 are no numbers" in str(got[1].outputs[0].stop_reason)
        assert "position 1 are no numbers" in str(got[3].outputs[0].stop_reason)
        sampled = llm.generate([[5, 9]], SamplingParams(seed=1, max_tokens=6, n=2), use_tqdm=False)[0]
        assert [sample.finish_reason for sample in sampled.outputs] == ["error", "error"]
        assert llm.generate([[5, 6]], never, use_tqdm=False)[0].outputs[0].token_ids == alone.token_ids


def test_numbers_at_float32s_limits_run_without_a_warning(overflowing: str) -> None:
    from octavo.core.sampling import F32_MAX, F32_SMALLEST

    extremes: list[dict[str, Any]] = [
        {"temperature": F32_MAX}, {"temperature": 1e-300}, {"repetition_penalty": F32_MAX}, {"repetition_penalty": F32_SMALLEST},
        {"top_p": 1e-300, "min_p": 1e-300}, {"allowed_token_ids": [5], "repetition_penalty": F32_MAX},
    ]
    params = [SamplingParams(seed=1, max_tokens=5, ignore_eos=True, **its) for its in extremes]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with np.errstate(over="raise", invalid="raise", divide="raise"), LLM(overflowing, backend=here("native"), **SETTINGS) as llm:
            got = llm.generate([[5, 6]] * len(params), params, use_tqdm=False)
    # Token 9 may be drawn, which ends its request; nothing else may.
    assert all(out.outputs[0].finish_reason == "length" or 9 in out.outputs[0].token_ids for out in got)


# -- arguments


@pytest.mark.parametrize(("options", "name"), [
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"), ({"chat_template_kwargs": [1]}, "chat_template_kwargs"), ({"tools": "x"}, "tools"),
    ({"chat_template": 5}, "chat_template"),
])  # fmt: skip
def test_bad_arguments_of_chat(llm: LLM, options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.chat([{"role": "user", "content": "z"}], GREEDY, use_tqdm=False, **options)
    assert caught.value.param == name
    still_well(llm)


def test_texts_that_are_no_unicode_blame_their_field(llm: LLM) -> None:
    for act, name in (
        (lambda: llm.generate("a\ud800", GREEDY), "prompt"), (lambda: llm.chat([{"role": "user", "content": "a\ud800"}]), "messages[0].content"),
        (lambda: SamplingParams(bad_words=["\ud800"]), "bad_words"), (lambda: SamplingParams(stop="\ud800"), "stop"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            act()
        assert caught.value.param == name
    still_well(llm)


def test_what_vllms_users_call(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="params must be BeamSearchParams, not object"):
        llm.beam_search(["z"], object())
    assert llm.generate("z", GREEDY, use_tqdm=False, lora_request=None)[0].outputs[0].finished()
    for call in (lambda: llm.generate("z", lora_request=object()), lambda: llm.chat([{"role": "user", "content": "z"}], lora_request=object())):
        with pytest.raises(UnsupportedError) as caught:
            call()
        assert caught.value.param == "lora_request"


# -- settings


@pytest.mark.parametrize(("settings", "kind", "name", "words"), [
    ({"tokenizer": "/no/such/place"}, CheckpointError, "tokenizer", "^tokenizer '/no/such/place' looks like a path"),
    ({"tokenizer": "smolm"}, CheckpointError, "tokenizer", "^tokenizer 'smolm' is not known"),
    ({"tensor_parallel_size": 2}, UnsupportedError, "tensor_parallel_size", "num_threads"),
    ({"chat_template": "{% if x %}"}, ConfigError, "chat_template", "cannot be compiled"),
    ({"chat_template": "/dev/zero"}, ConfigError, "chat_template", "more than 16777216 bytes"),
    ({"chat_template": "x" * 5000}, ConfigError, "chat_template", "neither a template nor a file"),
    ({"model": "x" * 5000}, CheckpointError, "model", "5000 characters"),
])
def test_settings_that_are_told_at_the_start(beyond: str, settings: dict[str, Any], kind: type[OctavoError], name: str, words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        LLM(**({"model": beyond, "backend": "torch"} | SETTINGS | settings))
    assert caught.value.param == name


def test_a_tokenizer_without_a_model(beyond: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((Path(beyond) / "tokenizer.json").read_bytes())
    with LLM(beyond, tokenizer=str(tmp_path), backend="torch", **SETTINGS) as llm:
        still_well(llm)


def test_a_pipe_may_hold_the_chat_template(tmp_path: Path) -> None:
    from octavo.engine.textside import read_template

    read, write = os.pipe()
    os.write(write, b"no braces \xc3\xa9")
    os.close(write)
    assert read_template(f"/dev/fd/{read}") == "no braces é"
    os.close(read)


@pytest.mark.parametrize(("settings", "blamed"), [
    ({"max_logprobs": -1, "max_num_batched_tokens": 2**20}, "max_logprobs"), ({"max_num_batched_tokens": 2**20}, "max_num_batched_tokens"),
    ({"max_num_seqs": 2**20}, "max_num_seqs"),
])
def test_too_large_arrays_blame_what_makes_them_large(settings: dict[str, Any], blamed: str) -> None:
    config = make_config("m", **settings)
    error = factory._too_large(config, 150_000, MemoryError("no room"))
    assert error.param == blamed and f"lower {blamed}" in error.message and "no room" in error.message


def test_a_pool_that_cannot_be_had_blames_the_pool(beyond: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any, **_more: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr("octavo.ops.torch_ops.TorchProvider.kv_store", refuse)
    with pytest.raises(ConfigError, match="64 KV blocks cannot be had: no room") as caught:
        LLM(beyond, backend="torch", **SETTINGS)
    assert caught.value.param == "num_kv_blocks"
    monkeypatch.undo()
    monkeypatch.setattr("octavo.engine.factory.Runner", refuse)
    with pytest.raises(ConfigError) as caught:
        LLM(beyond, backend="torch", **SETTINGS)
    assert caught.value.param == "max_num_batched_tokens"


# -- the swap tier's disk


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_disk_that_fails_loses_nobody(beyond: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
                                        call: str) -> None:
    """The disk is full, or cannot be read, in the middle of a run: the same answers, and one warning."""
    settings = SETTINGS | {"backend": here("native"), "enable_prefix_caching": False}
    prompts = [{"prompt_token_ids": [3 + place] * (10 + 5 * place)} for place in range(8)]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True, logprobs=1)
    with LLM(beyond, **settings) as llm:
        expected = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
    tight = settings | {"num_kv_blocks": 8, "kv_swap_bytes": 1 << 20, "kv_swap_path": str(tmp_path), "preemption_mode": "swap"}
    with LLM(beyond, **tight) as llm:
        real = getattr(os, call)

        def failing(*given: Any) -> int:
            if llm.preemption_stats.blocks_out > 3:
                raise OSError(28, "No space left on device")
            return int(real(*given))

        monkeypatch.setattr(os, call, failing)
        got = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
        stats = llm.preemption_stats
    assert [(o.token_ids, o.logprobs) for o in got] == [(o.token_ids, o.logprobs) for o in expected]
    assert stats.blocks_out > 3 and stats.tier_used == 0 and stats.tokens_recomputed > 0
    assert [r.levelname for r in caplog.records if "No space left" in r.getMessage()] == ["WARNING"]


@pytest.mark.parametrize(("settings", "name", "words"), [
    ({"kv_swap_bytes": 100}, "kv_swap_bytes", "kv_swap_bytes is 100; one block of 16 tokens takes"),
    ({"kv_swap_bytes": 2**50}, "kv_swap_bytes", "swap tier of 1048576.00 GiB"),
    ({"kv_swap_bytes": 2**20, "kv_swap_path": "/proc/octavo"}, "kv_swap_path", "no swap file can be made at '/proc/octavo'"),
    ({"kv_swap_bytes": 2**60, "kv_swap_path": "."}, "kv_swap_path", "cannot be made at '.', where .* are free"),
])
def test_a_tier_that_cannot_be_is_told_at_the_start(beyond: str, settings: dict[str, Any], name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        LLM(beyond, **SETTINGS, backend=here("native"), **settings)
    assert caught.value.param == name
