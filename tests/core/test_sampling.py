"""SamplingParams: what is refused, and by which name; what vLLM's users may go on writing."""

import enum
import math
import pickle
from typing import Any

import numpy as np
import pytest

from octavo import CompletionOutput, InvalidRequest, OctavoError, SamplingParams, UnsupportedError
from octavo.core.sampling import F32_MAX, F32_SMALLEST, MAX_N, MOST_COUNT, NEUTRAL, SEED_LIMIT

HUGE = pytest.param(10**5000, id="5001 digits")  # more than Python writes
FLOATS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")
INTS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")


def refused(kind: type[OctavoError] = InvalidRequest, **given: Any) -> OctavoError:
    with pytest.raises(kind) as caught:
        SamplingParams(**given)
    assert type(caught.value) is kind
    return caught.value


def test_the_limits_are_float32s() -> None:
    assert float(np.finfo(np.float32).max) == F32_MAX and float(np.finfo(np.float32).tiny) == F32_SMALLEST


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [1e39, -1e39, math.nan, math.inf, -math.inf, 10**400, -(10**400), HUGE, "1", True, None, [1.0], 1j])
def test_floats_beyond_float32_are_refused(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert error.param == name and error.message.startswith(f"{name} must be ") and len(error.message) < 250


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_the_bound_is_in_the_message(name: str) -> None:
    assert "at most 3.40282e+38" in refused(**{name: 1e39}).message
    assert getattr(SamplingParams(**{name: F32_MAX}), name) == F32_MAX


def test_a_repetition_penalty_that_float32_takes_for_zero() -> None:
    """It would divide by zero."""
    assert "above 0" in refused(repetition_penalty=1e-40).message
    assert np.float32(SamplingParams(repetition_penalty=F32_SMALLEST).repetition_penalty) > 0


@pytest.mark.parametrize("name", INTS)
@pytest.mark.parametrize("value", [-(10**400), pytest.param(-(10**5000), id="-5001 digits"), 2.5, True, "3", [1]])
def test_impossible_whole_numbers(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert error.param == name and len(error.message) < 250


@pytest.mark.parametrize("name", INTS)
def test_large_whole_numbers(name: str) -> None:
    """The error names the field and the limit; messages hold any number as a short text."""
    most = {"n": MAX_N, "seed": SEED_LIMIT - 1}.get(name, MOST_COUNT)
    assert getattr(SamplingParams(**{name: most}), name) == most
    for value, written in ((most + 1, str(most + 1)), (10**20, str(10**20)), (10**5000, "a number of 16610 bits")):
        error = refused(**{name: value})
        assert error.param == name and error.message.endswith(f" and {most}, not {written}")


@pytest.mark.parametrize("value", [[1], "a", "", 0, 5, ["1"], {1}, [[1, 2]]])
def test_a_logit_bias_that_is_no_object(value: Any) -> None:
    assert refused(logit_bias=value).param == "logit_bias"


@pytest.mark.parametrize("key", [1.5, 1.0, True, False, None, "1.5", "-1", "a", "", "٣", "9" * 5000, (1,), np.float64(1)])
def test_a_logit_bias_for_what_is_no_id(key: Any) -> None:
    error = refused(logit_bias={key: 1.0})
    assert error.param == "logit_bias" and "which is no token id" in error.message


def test_logit_bias_keys() -> None:
    assert SamplingParams(logit_bias={"7": 1, 8: 2.5, np.int32(9): -1.0}).logit_bias == {7: 1, 8: 2.5, 9: -1.0}
    assert "names the token 7 twice" in refused(logit_bias={"7": 1, 7: 2}).message
    assert "at most 100, not 101" in refused(logit_bias={1: 101}).message


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_lone_surrogates_blame_their_field(name: str) -> None:
    error = refused(**{name: ["fine", "a\ud800"]})
    assert error.param == name and error.message.startswith(f"{name}[1] is no valid Unicode")
    assert getattr(SamplingParams(**{name: ["\U0001f600"]}), name) == ["\U0001f600"]


ODD: list[Any] = [
    np.array([1, 2]), 10**400, -(10**400), 10**5000, math.nan, math.inf, 1e39, "9" * 400, "\ud800", {}, [], object(), True, {"a": 1}, {5: "x"},
    {1: np.array([1, 2])}, [np.array([1, 2])], [10**5000], [None], [[1]], b"x", print, -1, 2.5, np.float32(3), (1, 2),
]


@pytest.mark.parametrize("name", [*SamplingParams.__struct_fields__, *NEUTRAL])
def test_no_value_whatever_is_answered_by_anything_but_our_own_errors(name: str) -> None:
    for value in ODD:
        try:
            SamplingParams(**{name: value})
        except (InvalidRequest, UnsupportedError) as error:
            assert error.param == name and len(error.message) < 400


class OutputKind(enum.Enum):
    """As vLLM's."""

    CUMULATIVE = 0
    DELTA = 1


def test_vllms_other_parameters_with_values_that_ask_for_nothing() -> None:
    made = SamplingParams(
        n=2, best_of=2, use_beam_search=False, length_penalty=1, early_stopping=False, output_kind=OutputKind.CUMULATIVE, structured_outputs=None,
        guided_decoding=None, logits_processors=[], truncate_prompt_tokens=None, spaces_between_special_tokens=True, extra_args={},
        temperature=0.5,
    )
    assert made == SamplingParams(n=2, temperature=0.5)


@pytest.mark.parametrize(
    "given",
    [{"best_of": 3}, {"n": 2, "best_of": 4}, {"use_beam_search": True, "top_p": 0.5}, {"use_beam_search": True, "stop": ["a"]},
     {"use_beam_search": True, "temperature": 0.5}, {"use_beam_search": True, "repetition_penalty": 1.1},
     {"output_kind": OutputKind.DELTA}, {"structured_outputs": {"regex": "a"}},
     {"logits_processors": [len]}, {"truncate_prompt_tokens": 5}, {"spaces_between_special_tokens": "no"}, {"extra_args": {"a": 1}}],
)  # fmt: skip
def test_vllms_other_parameters_that_ask_for_something(given: dict[str, Any]) -> None:
    name = list(given)[-1]
    error = refused(UnsupportedError, **given)
    assert error.param == name and error.message.startswith(f"{name}=") and "is not served" in error.message


def test_unknown_parameters_are_named_with_the_nearest_known_one() -> None:
    error = refused(max_token=5)
    assert error.param == "max_token" and error.message == "there is no sampling parameter max_token: did you mean max_tokens?"
    assert refused(xyzzy=1).message == "there is no sampling parameter xyzzy"


def test_copies() -> None:
    made = SamplingParams(temperature=0.3, stop=["x"], logit_bias={3: 1.0})
    again = made.clone()
    assert again == made and again is not made
    assert pickle.loads(pickle.dumps(made)) == made
    assert SamplingParams.from_optional(temperature=0.3, stop=["x"], logit_bias={3: 1.0}, top_p=None, seed=None, n=None) == made


def test_a_completion_says_whether_it_is_finished() -> None:
    assert [CompletionOutput(0, "", [], finish_reason=reason).finished() for reason in (None, "length")] == [False, True]
