"""Beam search end to end, against transformers' on tiny float32 checkpoints."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import make_tiny

from octavo import LLM, BeamSearchParams, ContextTooLong, InvalidRequest, SamplingParams, UnsupportedError

PROMPTS = [[1, 7, 30, 200], [5], list(range(3, 20)), list(range(60, 92))]
ENDS = [2, 0, 17, 40, 41, 99, 150, 205, 260, 301]  # so many that beams do end


@pytest.fixture(scope="module", params=[[], [2], ENDS], ids=["no end", "one end", "ten ends"])
def ends(request: pytest.FixtureRequest) -> list[int]:
    return list(request.param)


@pytest.fixture(scope="module")
def folder(ends: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_tiny(tmp_path_factory.mktemp("tiny"), "llama", scale=0.2)
    made.joinpath("generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": ends or [2]}))
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", num_kv_blocks=512, max_num_seqs=64, max_model_len=128, num_threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def transformers_beams(oracle: Any, prompt: list[int], ends: list[int], **wanted: Any) -> list[tuple[list[int], float]]:
    """(tokens, score) of the best beams."""
    import torch

    oracle.generation_config.eos_token_id = None
    with torch.inference_mode():
        found = oracle.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False, eos_token_id=ends or None,
            pad_token_id=319, return_dict_in_generate=True, output_scores=True, **wanted,
        )  # fmt: skip
    out = []
    for sequence, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        tokens = sequence[len(prompt) :]
        end = next((place for place, token in enumerate(tokens) if token in ends), len(tokens) - 1)
        out.append((tokens[: end + 1], score))
    return out


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 4])
def test_the_beams_are_transformers(
    llm: LLM, oracle: Any, ends: list[int], width: int, length_penalty: float, early_stopping: bool | str,
) -> None:
    """All prompts at once here, one at a time there."""
    params = SamplingParams(
        use_beam_search=True, n=width, max_tokens=14, length_penalty=length_penalty, early_stopping=early_stopping, ignore_eos=not ends,
    )  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = transformers_beams(
            oracle, prompt, ends, num_beams=width, num_return_sequences=width, max_new_tokens=14, length_penalty=length_penalty,
            early_stopping=early_stopping,
        )  # fmt: skip
        assert [sample.token_ids for sample in output.outputs] == [tokens for tokens, _ in expected]
        for sample, (tokens, score) in zip(output.outputs, expected, strict=True):
            assert sample.cumulative_logprob == pytest.approx(score * len(tokens) ** length_penalty, abs=1e-4)
            assert sample.finish_reason == ("stop" if tokens[-1] in ends else "length")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_tiny(tmp_path_factory.mktemp("plain"), "llama", scale=0.2)
    with LLM(str(folder), dtype="float32", num_kv_blocks=24, max_num_seqs=6, max_model_len=128, num_threads=1) as made:
        yield made


def test_the_best_of_more_beams_are_told(plain: LLM) -> None:
    prompt = {"prompt_token_ids": PROMPTS[2]}
    whole = plain.generate(prompt, SamplingParams(use_beam_search=True, n=4, max_tokens=10, ignore_eos=True), use_tqdm=False)[0]
    best = plain.generate(prompt, SamplingParams(use_beam_search=True, n=2, best_of=4, max_tokens=10, ignore_eos=True, logprobs=3), use_tqdm=False)[0]
    assert [s.token_ids for s in best.outputs] == [s.token_ids for s in whole.outputs[:2]] and len(whole.outputs) == 4 and best.finished
    for one, other in zip(best.outputs, whole.outputs):
        assert one.cumulative_logprob == other.cumulative_logprob and other.logprobs is None and one.logprobs is not None
        rows = [row[token] for row, token in zip(one.logprobs, one.token_ids, strict=True)]
        assert sum(row.logprob for row in rows) == pytest.approx(one.cumulative_logprob) and all(3 <= len(row) <= 4 for row in one.logprobs)


def test_one_beam_is_greedy(plain: LLM) -> None:
    greedy = plain.generate({"prompt_token_ids": [5, 6]}, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    beam = plain.generate({"prompt_token_ids": [5, 6]}, SamplingParams(use_beam_search=True, max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert beam[0].outputs[0].token_ids == greedy[0].outputs[0].token_ids


def test_vllms_method(plain: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True, length_penalty=0.5)
    (found,) = plain.beam_search([{"prompt_token_ids": PROMPTS[0]}], params)
    (same,) = plain.generate(
        {"prompt_token_ids": PROMPTS[0]},
        SamplingParams(use_beam_search=True, n=3, max_tokens=6, ignore_eos=True, length_penalty=0.5), use_tqdm=False,
    )  # fmt: skip
    assert [beam.tokens for beam in found.sequences] == [PROMPTS[0] + sample.token_ids for sample in same.outputs]
    assert [beam.cum_logprob for beam in found.sequences] == [sample.cumulative_logprob for sample in same.outputs]
    for beam in found.sequences:
        assert beam.text == plain.get_tokenizer().decode(beam.tokens) and len(beam.logprobs) == 6 and beam.finish_reason == "length"


@pytest.mark.parametrize(("width", "says"), [(7, "beam_width is 7: a beam"), (0, "beam_width must be between 1"), ("a", "beam_width must be")])
def test_vllms_method_blames_its_own_field(plain: LLM, width: Any, says: str) -> None:
    for prompts in ("the", ["the", "a"]):
        with pytest.raises(InvalidRequest) as caught:
            plain.beam_search(prompts, BeamSearchParams(beam_width=width, max_tokens=6))
        assert caught.value.param == "beam_width" and says in caught.value.message


def test_a_stream_gets_each_beam_whole(plain: LLM) -> None:
    params = SamplingParams(use_beam_search=True, n=2, best_of=3, max_tokens=6, ignore_eos=True)
    (whole,) = plain.generate("the", params, use_tqdm=False)
    (news,) = plain.stream("the", params)
    assert [(s.text, s.token_ids) for s in news.outputs] == [(s.text, s.token_ids) for s in whole.outputs]
    stream = plain.stream("the", params)
    stream.close()
    assert plain.kv_ledger.live == 0


@pytest.mark.parametrize("settings", [{}, {"enable_prefix_caching": False}, {"kv_swap_bytes": 1 << 22, "preemption_mode": "swap"}], ids=str)
def test_preempted_beams_are_the_same(tmp_path: Path, settings: dict[str, Any]) -> None:
    """More groups than the pool holds; each result as alone."""
    folder = make_tiny(tmp_path / "m", "llama", scale=0.2)
    wanted = [SamplingParams(use_beam_search=True, n=n, max_tokens=50, ignore_eos=True) for n in (3, 2, 3, 1, 2)]
    prompts = [{"prompt_token_ids": list(range(10 + i, 40 + 3 * i))} for i in range(5)]
    with LLM(str(folder), dtype="float32", num_kv_blocks=15, max_num_seqs=12, max_model_len=128, num_threads=1, **settings) as llm:
        alone = [llm.generate(p, k, use_tqdm=False)[0] for p, k in zip(prompts, wanted)]
        assert llm.num_preemptions == 0
        together = llm.generate(prompts, wanted, use_tqdm=False)
        assert llm.num_preemptions > 0 and llm.kv_ledger.live == 0 and (llm.preemption_stats.blocks_in > 0) == ("kv_swap_bytes" in settings)
    for one, other in zip(alone, together, strict=True):
        assert [(s.token_ids, s.cumulative_logprob) for s in one.outputs] == [(s.token_ids, s.cumulative_logprob) for s in other.outputs]


@pytest.mark.parametrize(("given", "field", "says"), [
    ({"n": 7}, "n", "7: a beam search runs as many sequences at once, and at most 6 run"),
    ({"n": 2, "best_of": 9}, "best_of", "9: a beam search"),
    ({"n": 3, "best_of": 2}, "best_of", "below n"),
    ({"n": 2, "early_stopping": "always"}, "early_stopping", "always"),
    ({"n": 2, "length_penalty": 1e9}, "length_penalty", "at most 50"),
    ({"n": 5, "stop_token_ids": list(range(2, 318))}, "n", "the vocabulary has 3 tokens"),
])  # fmt: skip
def test_what_no_search_can_do_is_refused_with_the_numbers(plain: LLM, given: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plain.generate("the", SamplingParams(use_beam_search=True, **given), use_tqdm=False)
    assert caught.value.param == field and says in caught.value.message


def test_beams_that_the_pool_cannot_hold_alone(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", "llama")
    with LLM(str(folder), dtype="float32", num_kv_blocks=6, max_num_seqs=6, max_model_len=96, num_threads=1) as llm:
        with pytest.raises(ContextTooLong, match="4 beams of a prompt of 50 tokens take 7 blocks of 16 at least, and the KV pool has 6"):
            llm.generate({"prompt_token_ids": [7] * 50}, SamplingParams(use_beam_search=True, n=4), use_tqdm=False)
        (output,) = llm.generate({"prompt_token_ids": [7] * 50}, SamplingParams(use_beam_search=True, n=3, ignore_eos=True), use_tqdm=False)
        assert [(len(s.token_ids), s.finish_reason) for s in output.outputs] == [(4 * 16 + 1 - 50, "length")] * 3  # a block each beside the prompt's


def test_of_several_prompts_the_one_is_named_whose_beams_the_pool_cannot_hold(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", "mistral", sliding_window=20)  # behind a window no beam can count on the prompt's blocks
    says = "prompt 1 of 2: 4 beams of a prompt of 64 tokens take 16 blocks of 16 at least, and the KV pool has 10"
    with (
        LLM(str(folder), dtype="float32", num_kv_blocks=10, max_num_seqs=6, max_model_len=96, num_threads=1) as llm,
        pytest.raises(ContextTooLong, match=says),
    ):
        llm.generate([[7], [7] * 64], SamplingParams(use_beam_search=True, n=4), use_tqdm=False)


CHANGES = {"temperature": 0.7, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "presence_penalty": 1.0, "stop": ["a"], "bad_words": ["a"],
           "logit_bias": {1: 2.0}, "allowed_token_ids": [1]}


@pytest.mark.parametrize(("name", "value"), CHANGES.items())
def test_what_would_change_the_distribution_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedError) as caught:
        SamplingParams(use_beam_search=True, n=2, **{name: value})
    assert caught.value.param == name
