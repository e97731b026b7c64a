"""SamplingParams: how one request wants its tokens chosen. vLLM's names and meanings."""

import difflib
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, Self

import msgspec

from octavo.errors import InvalidRequest, UnsupportedError, shown

MAX_N = 16_384
MOST_COUNT = 2**31 - 1  # of tokens and alternatives: more mean nothing anywhere, and may not fit where they go
SEED_LIMIT = 2**64
MOST_LENGTH_PENALTY = 50.0  # either way: the score of a million tokens is still a float64
MOST_CANDIDATES = 1024  # continuations of each beam that a step can give, at least where the vocabulary has as many
# Under beam search: what would change the distribution that it ranks by, or end a beam by its text, and the values that do not.
BEAM_NEUTRAL: dict[str, tuple[object, ...]] = {
    "temperature": (0.0, 1.0), "top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "presence_penalty": (0.0,), "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,), "stop": ([],), "bad_words": ([],), "logit_bias": (None, {}), "allowed_token_ids": (None,),
}
F32_MAX, F32_SMALLEST = (2 - 2**-23) * 2.0**127, 2.0**-126  # float32's largest and smallest normal number: the sampler counts in it

# vLLM's parameters that Octavo has no field for: the values that ask for nothing, all that are accepted.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "output_kind": (None,),
    "structured_outputs": (None,), "guided_decoding": (None,), "logits_processors": (None, []), "truncate_prompt_tokens": (None,),
    "spaces_between_special_tokens": (True, False),  # it changes nothing: no token here is spelled with spaces around it
    "extra_args": (None, {}), "flat_logprobs": (False,), "skip_reading_prefix_cache": (None, False), "repetition_detection": (None,),
    "thinking_token_budget": (None,), "skip_clone": (True, False),
}


class _Kind(type(msgspec.Struct)):  # type: ignore[misc]
    """Makes SamplingParams take vLLM's other parameters, where they ask for nothing, and say what is wrong where they do not."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        for name in [name for name in given if name not in cls.__struct_fields__]:
            _ask_for_nothing(name, given.pop(name), cls.__struct_fields__)
        return super().__call__(*args, **given)


def _ask_for_nothing(name: str, value: object, fields: Sequence[str]) -> None:
    if name not in NEUTRAL:
        close = difflib.get_close_matches(name, [*fields, *NEUTRAL], 1)
        raise InvalidRequest(f"there is no sampling parameter {name}{f': did you mean {close[0]}?' if close else ''}", name)
    if name == "output_kind" and getattr(value, "name", None) == "CUMULATIVE":  # vLLM's own enumeration
        return
    if not any(type(value) in (type(each), int) and value == each for each in NEUTRAL[name]):
        harmless = " or ".join(shown(each) for each in NEUTRAL[name])
        raise UnsupportedError(f"{name}={shown(value)} is not served: leave it out, or {harmless}", name)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, metaclass=_Kind):
    """How the tokens of one request are chosen. Immutable; checked when made.

    ``max_tokens`` None, the default, is as many as the context has room for (vLLM's own default is 16).

    Penalties: ``presence`` and ``frequency`` look at the output only, ``repetition`` at prompt and output.
    ``temperature`` 0 is greedy. ``top_k`` 0 or -1 is off. ``logprobs`` is the number of alternatives per token
    (-1: the whole vocabulary), ``prompt_logprobs`` the same for the prompt's tokens. Parameters of vLLM's that are no
    fields here are accepted with values that ask for nothing.

    ``use_beam_search``: the ``n`` best sequences of a search with ``best_of`` beams (None: n), by the raw distribution. ``length_penalty``: a
    sequence's log-probability is divided by its length to the power of it. ``early_stopping``, with transformers' meaning: True ends the search
    when as many sequences as beams are finished; False, when a beam of the present length could not be better than the worst of them; "never",
    when no longer one could be, either.

    Raises: InvalidRequest, naming the field and its value; UnsupportedError for vLLM's parameters that would ask for something.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    bad_words: list[str] = []
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    use_beam_search: bool = False
    best_of: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        put = msgspec.structs.force_setattr
        if isinstance(self.stop, str):
            put(self, "stop", [self.stop])
        for name in ("stop", "stop_token_ids", "bad_words"):
            if getattr(self, name) is None:
                put(self, name, [])
        if self.logit_bias is not None:
            put(self, "logit_bias", _biases(self.logit_bias))
        _whole(self.n, "n", 1, MAX_N)
        _number(self.presence_penalty, "presence_penalty", -2.0, 2.0)
        _number(self.frequency_penalty, "frequency_penalty", -2.0, 2.0)
        _number(self.repetition_penalty, "repetition_penalty", F32_SMALLEST, F32_MAX)
        _number(self.temperature, "temperature", 0.0, F32_MAX)
        _number(self.top_p, "top_p", 0.0, 1.0, open_low=True)
        _whole(self.top_k, "top_k", -1, MOST_COUNT)
        _number(self.min_p, "min_p", 0.0, 1.0)
        if self.seed is not None:
            _whole(self.seed, "seed", -(2**63), SEED_LIMIT - 1)
        if self.max_tokens is not None:
            _whole(self.max_tokens, "max_tokens", 1, MOST_COUNT)
        _whole(self.min_tokens, "min_tokens", 0, MOST_COUNT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens ({shown(self.min_tokens)}) is above max_tokens ({shown(self.max_tokens)})", "min_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(getattr(self, name), name, -1, MOST_COUNT)
        _texts(self.stop, "stop")
        _texts(self.bad_words, "bad_words")
        _ids(self.stop_token_ids, "stop_token_ids")
        if self.allowed_token_ids is not None:
            _ids(self.allowed_token_ids, "allowed_token_ids")
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids is empty: no token could be chosen", "allowed_token_ids")
        for name in ("use_beam_search", "ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, not {shown(getattr(self, name))}", name)
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True: they are found in the text", "stop")
        self._check_beams()

    def _check_beams(self) -> None:
        if self.best_of is not None:
            _whole(self.best_of, "best_of", 1, MAX_N)
            if self.best_of < self.n:
                raise InvalidRequest(f"best_of is {self.best_of}, below n ({self.n})", "best_of")
        _number(self.length_penalty, "length_penalty", -MOST_LENGTH_PENALTY, MOST_LENGTH_PENALTY)
        if not isinstance(self.early_stopping, bool) and not (isinstance(self.early_stopping, str) and self.early_stopping == "never"):
            raise InvalidRequest(f'early_stopping must be true, false or "never", not {shown(self.early_stopping)}', "early_stopping")
        if not self.use_beam_search:
            if self.best_of not in (None, self.n):
                raise UnsupportedError(
                    f"best_of={self.best_of} with n={self.n} is not served without use_beam_search: samples are not ranked; leave it out", "best_of"
                )
            msgspec.structs.force_setattr(self, "best_of", None)
            for name, usual in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != usual:
                    raise InvalidRequest(f"{name}={shown(getattr(self, name))} is for beam search: it needs use_beam_search", name)
            return
        for name, harmless in BEAM_NEUTRAL.items():
            if getattr(self, name) not in harmless:
                raise UnsupportedError(
                    f"{name}={shown(getattr(self, name))} is not served with use_beam_search, which ranks by the model's own distribution: "
                    "leave it out",
                    name,
                )

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """From values of which None stands for the default, as vLLM's servers make them. Raises: as the constructor."""
        made: Self = cls(**{name: value for name, value in given.items() if value is not None})
        return made

    def clone(self) -> Self:
        """A copy, for callers who are used to make one."""
        return msgspec.structs.replace(self)

    @property
    def beam_width(self) -> int:
        """Beams of the search; 1 without one."""
        return (self.best_of or self.n) if self.use_beam_search else 1

    @property
    def width_field(self) -> str:
        """What the number of beams was given as."""
        return "n" if self.best_of is None else "best_of"

    @property
    def num_sequences(self) -> int:
        """Sequences that run for one prompt: the beams, or the n samples."""
        return self.beam_width if self.use_beam_search else self.n

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on the tokens seen so far."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def _biases(given: object) -> dict[int, float]:
    """Token ids as whole numbers: JSON objects have text keys."""
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"logit_bias must be an object of token ids and biases, not {shown(given)}", "logit_bias")
    found = {}
    for key, bias in given.items():
        token = None
        if isinstance(key, str):
            token = int(key) if key.isascii() and key.isdigit() and len(key) < 20 else None
        elif not isinstance(key, bool) and hasattr(key, "__index__"):
            token = index(key)
        if token is None:
            raise InvalidRequest(f"logit_bias has the key {shown(key)}, which is no token id", "logit_bias")
        if token in found:
            raise InvalidRequest(f"logit_bias names the token {token} twice", "logit_bias")
        _number(bias, "logit_bias", -100.0, 100.0)
        found[token] = bias
    return found


def _whole(value: object, name: str, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be a whole number, not {shown(value)}", name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, not {shown(value)}", name)


def _number(value: object, name: str, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, not {shown(value)}", name)
    if not low <= value <= high or (open_low and value == low):  # a NaN fails, too
        least = "above 0" if low == F32_SMALLEST else f"above {low:g}" if open_low else f"at least {low:g}"
        most = f" and at most {high:g}"
        if low == F32_SMALLEST:
            most += f" (float32 holds {low:g} to {high:g})"
        elif high == F32_MAX:
            most = "" if value < low else f"{most}, float32's largest number"
        raise InvalidRequest(f"{name} must be {least}{most}, not {shown(value)}", name)


def _texts(values: Sequence[object], name: str) -> None:
    if not isinstance(values, list | tuple):
        raise InvalidRequest(f"{name} must be a list of strings, not {shown(values)}", name)
    for place, value in enumerate(values):
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{name} must hold non-empty strings, not {shown(value)}", name)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"{name}[{place}] is no valid Unicode: {shown(value)} holds a lone surrogate", name) from None


def _ids(values: Sequence[object], name: str) -> None:
    if not isinstance(values, list | tuple):
        raise InvalidRequest(f"{name} must be a list of token ids, not {shown(values)}", name)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidRequest(f"{name} must hold token ids (whole numbers from 0), not {shown(value)}", name)
