from typing import Any

import numpy as np
import pytest

from octavo import ContextTooLong, InvalidRequest, SamplingParams
from octavo.engine.inputs import Inputs, Prompt

VOCAB = 50


class Letters:
    """A tokenizer of one token per letter; " x" is one token of its own when x is a vowel. BOS is 0."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        out, i = [0] if add_special_tokens else [], 0
        while i < len(text):
            if text[i] == " " and i + 1 < len(text) and text[i + 1] in "aeiou":
                out.append(30 + ord(text[i + 1]) % 16)
                i += 2
            else:
                out.append(1 if text[i] == " " else 2 + ord(text[i]) - ord("a"))
                i += 1
        return out


def make(**kw: Any) -> Inputs:
    return Inputs(**{"tokenizer": Letters(), "vocab": VOCAB, "max_model_len": 10, "max_logprobs": 5, "eos_ids": [48, 49], "seed": 3, **kw})


@pytest.mark.parametrize(("given", "want"), [
    ("ab", Prompt("ab", [0, 2, 3])), ({"prompt": "ab"}, Prompt("ab", [0, 2, 3])), ({"prompt_token_ids": [4, 5]}, Prompt(None, [4, 5])),
    ([4, 5], Prompt(None, [4, 5])), ((4, 5), Prompt(None, [4, 5])), (np.array([4, 5]), Prompt(None, [4, 5])),
    ([np.int64(4), 49], Prompt(None, [4, 49])), ({"prompt": "zz", "prompt_token_ids": [4]}, Prompt("zz", [4])),
    ({"prompt": "ab", "cache_salt": "s"}, Prompt("ab", [0, 2, 3], "s")), ({"prompt_token_ids": [4], "cache_salt": None}, Prompt(None, [4])),
])
def test_prompts(given: Any, want: Prompt) -> None:
    got = make().prompt(given)
    assert got == want and all(type(i) is int for i in got.ids)
    assert make().prompt("ab", add_special_tokens=False).ids == [2, 3]


@pytest.mark.parametrize(("given", "error", "words", "param"), [
    ([], InvalidRequest, "empty", "prompt_token_ids"),
    ({"prompt_token_ids": []}, InvalidRequest, "empty", "prompt_token_ids"),
    ([3, 50], InvalidRequest, r"prompt_token_ids\[1\] is 50.* 0 to 49", "prompt_token_ids"),
    ([-1], InvalidRequest, "is -1", "prompt_token_ids"),
    ([1, True], InvalidRequest, "not True", "prompt_token_ids"),
    ([1, 2.0], InvalidRequest, "not 2.0", "prompt_token_ids"),
    (["a", "b"], InvalidRequest, "not 'a'", "prompt_token_ids"),
    (7, InvalidRequest, "not int", "prompt"), (None, InvalidRequest, "not NoneType", "prompt"), (b"ab", InvalidRequest, "not bytes", "prompt"),
    ({}, InvalidRequest, "needs the key", "prompt"), ({"prompt": 5}, InvalidRequest, "not int", "prompt"),
    ({"prompt": "a", "multi_modal_data": {}}, InvalidRequest, "multi_modal_data", "prompt"),
    ({"prompt_token_ids": "ab"}, InvalidRequest, "not str", "prompt"),
    ({"prompt": "a", "cache_salt": ""}, InvalidRequest, "non-empty string.* not ''", "cache_salt"),
    ({"prompt": "a", "cache_salt": 7}, InvalidRequest, "not 7", "cache_salt"),
    ([1] * 10, ContextTooLong, r"has 10 tokens; the context holds 10.* at most 9", "prompt_token_ids"),
    ("a" * 40, ContextTooLong, "has 41 tokens", "prompt"),
])
def test_bad_prompts(given: Any, error: type, words: str, param: str) -> None:
    with pytest.raises(error, match=words) as caught:
        make().prompt(given)
    assert caught.value.param == param


def test_an_empty_text_without_special_tokens() -> None:
    assert make().prompt("").ids == [0]
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        make().prompt("", add_special_tokens=False)


def test_the_longest_prompt_fits() -> None:
    prompt = make().prompt([1] * 9)
    request, = make().requests("r", prompt, SamplingParams(max_tokens=5), (), arrival=0)
    assert request.max_total == 10


@pytest.mark.parametrize(("params", "words", "param"), [
    ({"logprobs": 6}, "logprobs is 6 above this engine's limit of 5", "logprobs"),
    ({"logprobs": -1}, "whole vocabulary of 50", "logprobs"),
    ({"prompt_logprobs": 6}, "limit of 5", "prompt_logprobs"),
    ({"stop_token_ids": [3, 50]}, "token id 50; .* 0 to 49", "stop_token_ids"),
    ({"allowed_token_ids": [50]}, "token id 50", "allowed_token_ids"),
    ({"logit_bias": {"50": 1.0}}, "token id 50", "logit_bias"),
    ({"logit_bias": {-1: 1.0}}, "token id -1", "logit_bias"),
    ({"allowed_token_ids": [4], "bad_words": ["c"]}, "no token", "bad_words"),
    ({"allowed_token_ids": [48, 7], "stop_token_ids": [7], "min_tokens": 1}, "min_tokens", "min_tokens"),
])
def test_bad_parameters(params: dict[str, Any], words: str, param: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        make().check(SamplingParams(**params))
    assert caught.value.param == param


def test_parameters_of_another_kind() -> None:
    with pytest.raises(InvalidRequest, match="not dict"):
        make().check({"n": 1})


def test_all_logprobs_where_the_engine_allows_them() -> None:
    make(max_logprobs=-1).check(SamplingParams(logprobs=-1, prompt_logprobs=40))
    make(max_logprobs=60).check(SamplingParams(logprobs=-1))


def test_bad_words_at_the_start_and_after_a_space() -> None:
    words = make().check(SamplingParams(bad_words=["a", "b", " a", "ab"]))
    spaced_a = 30 + ord("a") % 16
    assert words == ((2,), (spaced_a,), (3,), (2, 3), (spaced_a, 3))  # " b" is two tokens: no form of its own


def test_without_a_tokenizer() -> None:
    inputs = make(tokenizer=None)
    assert inputs.prompt([3]).ids == [3]
    for act, param in ((lambda: inputs.prompt("a"), "prompt"), (lambda: inputs.check(SamplingParams(stop="a")), "stop"),
                       (lambda: inputs.check(SamplingParams(bad_words=["a"])), "bad_words")):
        with pytest.raises(InvalidRequest, match="came without") as caught:
            act()
        assert caught.value.param == param


def test_requests() -> None:
    inputs = make()
    prompt = Prompt(None, [1, 2])
    one, = inputs.requests("5", prompt, SamplingParams(seed=-1), ((3,),), arrival=2.5, priority=4)
    assert (one.id, one.seed, one.max_total, one.eos_ids, one.arrival, one.priority, one.bad_words) == (
        "5", 2**64 - 1, 10, frozenset({48, 49}), 2.5, 4, ((3,),))
    many = inputs.requests("6", prompt, SamplingParams(n=3, seed=1, prompt_logprobs=2, max_tokens=3), (), arrival=0)
    assert [r.id for r in many] == ["6/0", "6/1", "6/2"] and many[0].seed == 1 and len({r.seed for r in many}) == 3
    assert [r.params.prompt_logprobs for r in many] == [2, None, None] and {r.max_total for r in many} == {5}
    assert many[0].tokens is not many[1].tokens


def test_unseeded_requests_draw_from_the_engines_seed() -> None:
    def seeds(seed: int) -> list[int]:
        inputs = make(seed=seed)
        return [r.seed for _ in range(4) for r in inputs.requests("r", Prompt(None, [1]), SamplingParams(n=2), (), arrival=0)]

    assert seeds(0) == seeds(0) and len({*seeds(0), *seeds(1)}) == 16


def test_a_search_that_the_runner_cannot_serve_is_refused_with_the_numbers() -> None:
    many = make(vocab=100_000)
    many.check(SamplingParams(use_beam_search=True, n=255, max_tokens=4))  # the three ends of a small model
    with pytest.raises(InvalidRequest, match="best_of is 300 and 6 tokens may end a beam: that is 2106 candidates a beam; at most 1024") as caught:
        many.check(SamplingParams(use_beam_search=True, best_of=300, stop_token_ids=[1, 2, 3, 4]))
    assert caught.value.param == "best_of"
    make(vocab=50).check(SamplingParams(use_beam_search=True, best_of=40, stop_token_ids=[1, 2]))  # the whole vocabulary is enough
    small = make(num_kv_blocks=5, block_size=4, max_num_seqs=8)
    with pytest.raises(InvalidRequest, match="n is 9: a beam search runs as many sequences at once, and at most 8 run"):
        small.check(SamplingParams(use_beam_search=True, n=9))
    with pytest.raises(ContextTooLong, match="4 beams of a prompt of 8 tokens take 6 blocks of 4 at least, and the KV pool has 5"):
        small.requests("a", Prompt(None, [1] * 8), SamplingParams(use_beam_search=True, n=4), (), arrival=0.0)
