"""SamplingParams: how one request wants its tokens chosen. vLLM's names and meanings."""

import math
from collections.abc import Sequence

import msgspec

from octavo.errors import InvalidRequest

MAX_N = 16_384
SEED_LIMIT = 2**64


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen. Immutable; checked when made.

    Penalties: ``presence`` and ``frequency`` look at the output only, ``repetition`` at prompt and output.
    ``temperature`` 0 is greedy. ``top_k`` 0 or -1 is off. ``logprobs`` is the number of alternatives per token
    (-1: the whole vocabulary), ``prompt_logprobs`` the same for the prompt's tokens.

    Raises: InvalidRequest, naming the field and its value.
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

    def __post_init__(self) -> None:
        put = msgspec.structs.force_setattr
        if isinstance(self.stop, str):
            put(self, "stop", [self.stop])
        for name in ("stop", "stop_token_ids", "bad_words"):
            if getattr(self, name) is None:
                put(self, name, [])
        if self.logit_bias:
            put(self, "logit_bias", {_token_key(k): v for k, v in self.logit_bias.items()})
        _whole(self.n, "n", 1, MAX_N)
        _number(self.presence_penalty, "presence_penalty", -2.0, 2.0)
        _number(self.frequency_penalty, "frequency_penalty", -2.0, 2.0)
        _number(self.repetition_penalty, "repetition_penalty", 0.0, math.inf, open_low=True)
        _number(self.temperature, "temperature", 0.0, math.inf)
        _number(self.top_p, "top_p", 0.0, 1.0, open_low=True)
        _whole(self.top_k, "top_k", -1, None)
        _number(self.min_p, "min_p", 0.0, 1.0)
        if self.seed is not None:
            _whole(self.seed, "seed", -(2**63), SEED_LIMIT - 1)
        if self.max_tokens is not None:
            _whole(self.max_tokens, "max_tokens", 1, None)
        _whole(self.min_tokens, "min_tokens", 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})", "min_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(getattr(self, name), name, -1, None)
        _texts(self.stop, "stop")
        _texts(self.bad_words, "bad_words")
        _ids(self.stop_token_ids, "stop_token_ids")
        if self.allowed_token_ids is not None:
            _ids(self.allowed_token_ids, "allowed_token_ids")
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids is empty: no token could be chosen", "allowed_token_ids")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, not {getattr(self, name)!r}", name)
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True: they are found in the text", "stop")
        for bias in (self.logit_bias or {}).values():
            _number(bias, "logit_bias", -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on the tokens seen so far."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def _token_key(key: object) -> int:
    """JSON objects have text keys; ids are meant."""
    try:
        return int(key)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError):
        raise InvalidRequest(f"logit_bias has the key {key!r}, which is no token id", "logit_bias") from None


def _whole(value: object, name: str, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be a whole number, not {value!r}", name)
    if value < low or (high is not None and value > high):
        raise InvalidRequest(f"{name} must be {_span(low, high)}, not {value}", name)


def _number(value: object, name: str, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, not {value!r}", name)
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        above = f"above {low:g}" if open_low else f"at least {low:g}"
        below = "" if math.isinf(high) else f" and at most {high:g}"
        raise InvalidRequest(f"{name} must be {above}{below}, not {value!r}", name)


def _span(low: int, high: int | None) -> str:
    return f"at least {low}" if high is None else f"between {low} and {high}"


def _texts(values: Sequence[object], name: str) -> None:
    if not isinstance(values, list | tuple):
        raise InvalidRequest(f"{name} must be a list of strings, not {values!r}", name)
    for value in values:
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{name} must hold non-empty strings, not {value!r}", name)


def _ids(values: Sequence[object], name: str) -> None:
    if not isinstance(values, list | tuple):
        raise InvalidRequest(f"{name} must be a list of token ids, not {values!r}", name)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidRequest(f"{name} must hold token ids (whole numbers from 0), not {value!r}", name)
