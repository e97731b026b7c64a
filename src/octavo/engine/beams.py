"""Beam search in the shape of vLLM's LLM.beam_search."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from octavo.core.output import Logprob, RequestOutput
from octavo.core.sampling import SamplingParams
from octavo.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """What LLM.beam_search looks for: the ``beam_width`` best continuations of at most ``max_tokens`` tokens.

    The names are vLLM's; scores, ``length_penalty`` and ``early_stopping`` (which vLLM does not have) have transformers' meaning, as in
    SamplingParams. The values are checked when the search is asked for.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = False

    def sampling(self) -> SamplingParams:
        """The same as SamplingParams. Raises: InvalidRequest, UnsupportedError."""
        return SamplingParams(
            use_beam_search=True, n=self.beam_width, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos, temperature=self.temperature,
            length_penalty=self.length_penalty, early_stopping=self.early_stopping, include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=0,
        )


@contextmanager
def naming_the_width() -> Iterator[None]:
    """What SamplingParams calls n, and blames by that name, was given as beam_width."""
    try:
        yield
    except InvalidRequest as error:
        if error.param != "n":
            raise
        raise InvalidRequest(re.sub(r"\bn\b", "beam_width", error.message, count=1), "beam_width") from error.__cause__


@dataclass(slots=True)
class BeamSearchSequence:
    """One continuation. ``tokens`` and ``text`` are of prompt and output together, as vLLM has them; ``logprobs`` of the output's tokens."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str | None = None  # None without a tokenizer
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The continuations of one prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def beam_output(output: RequestOutput, tokenizer: Any | None) -> BeamSearchOutput:
    """The answer in vLLM's shape."""
    found = []
    for beam in output.outputs:
        tokens = [*output.prompt_token_ids, *beam.token_ids]
        text = None if tokenizer is None else tokenizer.decode(tokens)
        found.append(BeamSearchSequence(tokens, beam.logprobs or [], beam.cumulative_logprob or 0.0, text, beam.finish_reason, beam.stop_reason))
    return BeamSearchOutput(found)
