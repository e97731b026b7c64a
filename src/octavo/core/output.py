"""What comes out: Delta from the engine core, RequestOutput for the caller (vLLM's shapes)."""

from dataclasses import dataclass, field
from typing import Any

import msgspec


class LogprobRow(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities at one position: the token itself, then the most likely ones (ties to the lowest id)."""

    token: int
    logprob: float
    rank: int  # 1 is the most likely
    top_ids: list[int]
    top_logprobs: list[float]


class Delta(msgspec.Struct, frozen=True):
    """News of one request from one step. The one with ``finish_reason`` is its last."""

    request_id: str
    tokens: list[int] = []
    logprobs: list[LogprobRow] | None = None
    prompt_logprobs: list[LogprobRow] | None = None  # of prompt positions 1, 2, … in order, over several deltas
    finish_reason: str | None = None  # stop | length | abort | error
    stop_reason: int | str | None = None  # the stop token id or string; None for the model's own end token
    num_cached: int = 0
    error: str | None = None


@dataclass(slots=True)
class Logprob:
    """One candidate token at a position."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether nothing more comes."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds on the engine's clock."""

    arrival: float = 0.0
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt: one or more completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        from dataclasses import asdict

        return asdict(self)
