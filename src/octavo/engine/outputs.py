"""From Deltas to RequestOutput: text, stop strings, log-probabilities, times. Offline use and the server share it."""

from collections.abc import Sequence
from typing import Any

from octavo.core.output import CompletionOutput, Delta, Logprob, LogprobRow, RequestMetrics, RequestOutput
from octavo.core.sampling import SamplingParams
from octavo.engine.detokenize import IncrementalDetokenizer
from octavo.engine.inputs import Prompt


class Sample:
    """One of the n sequences of an answer, as it grows."""

    def __init__(self, index: int, prompt: Prompt, params: SamplingParams, tokenizer: Any | None) -> None:
        self.index = index
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative: float | None = None if params.logprobs is None and not params.use_beam_search else 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._tokenizer = tokenizer if params.detokenize else None
        self._detokenizer = None if self._tokenizer is None else IncrementalDetokenizer(self._tokenizer, prompt.ids, params)
        self._shown_text = self._shown_tokens = 0  # what news() has told
        self._told_end = False

    def apply(self, delta: Delta) -> bool:
        """Take a delta in. True when a stop string ended the sequence, which the engine does not know."""
        self.tokens.extend(delta.tokens)
        for row in delta.logprobs or ():
            assert self.cumulative is not None
            self.cumulative += row.logprob
            if self.logprobs is not None:
                self.logprobs.append(logprob_dict(row, self._tokenizer))
        self.finish_reason = delta.finish_reason
        # An error has no place of its own in vLLM's shape.
        self.stop_reason = delta.error if delta.finish_reason == "error" else delta.stop_reason
        text = self._detokenizer
        if text is None:
            return False
        self.text += text.push(delta.tokens, stop_terminated=delta.finish_reason == "stop")
        if delta.finish_reason is not None:
            self.text += text.flush()
        if text.stop_reason is None:
            return False
        self.finish_reason, self.stop_reason = "stop", text.stop_reason
        return delta.finish_reason is None

    def output(self) -> CompletionOutput:
        """Everything so far."""
        return CompletionOutput(
            self.index, self.text, list(self.tokens), self.cumulative, None if self.logprobs is None else list(self.logprobs),
            self.finish_reason, self.stop_reason,
        )

    def news(self) -> CompletionOutput | None:
        """What came since the last call; None when there is nothing to tell."""
        text, tokens = self.text[self._shown_text :], self.tokens[self._shown_tokens :]
        ended = self.finish_reason is not None and not self._told_end
        if not text and not tokens and not ended:
            return None
        logprobs = None if self.logprobs is None else self.logprobs[self._shown_tokens :]
        self._shown_text, self._shown_tokens, self._told_end = len(self.text), len(self.tokens), self.finish_reason is not None
        return CompletionOutput(self.index, text, tokens, self.cumulative, logprobs, self.finish_reason, self.stop_reason)


class Answer:
    """The answer to one prompt, gathered from the deltas of its n requests. Of a search with more beams the first n, the best, are told."""

    def __init__(self, request_id: str, prompt: Prompt, params: SamplingParams, tokenizer: Any | None, arrival: float) -> None:
        self.request_id = request_id
        self.samples = [Sample(index, prompt, params, tokenizer) for index in range(params.num_sequences)]
        self._told = self.samples[: params.n]
        self.metrics = RequestMetrics(arrival=arrival)
        self._prompt = prompt
        self._tokenizer = tokenizer if params.detokenize else None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None if params.prompt_logprobs is None else [None]
        self._num_cached = 0
        self._told_prompt = False

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        return all(sample.finish_reason is not None for sample in self.samples)

    def apply(self, index: int, delta: Delta, now: float) -> bool:
        """Take in the news of sequence ``index`` at time ``now``. True when it ended by a stop string and must be aborted."""
        metrics = self.metrics
        if delta.prompt_logprobs and self._prompt_logprobs is not None and index == 0:
            self._prompt_logprobs.extend(logprob_dict(row, self._tokenizer) for row in delta.prompt_logprobs)
        if delta.tokens:
            if metrics.first_token is None:
                metrics.first_token = now
            metrics.last_token = now
        if index == 0:
            self._num_cached = delta.num_cached
        sample = self.samples[index]
        stopped = sample.apply(delta)
        if sample.finish_reason is not None and self.finished:
            metrics.finished = now
        return stopped

    def output(self) -> RequestOutput:
        """Everything so far."""
        return self._output([sample.output() for sample in self._told], self._prompt_logprobs)

    def news(self) -> RequestOutput | None:
        """What came since the last call, texts and ids as differences; the prompt's log-probabilities come with the first."""
        outputs = [news for sample in self._told if (news := sample.news()) is not None]
        if not outputs:
            return None
        prompt_logprobs = None if self._told_prompt else self._prompt_logprobs
        self._told_prompt = True
        return self._output(outputs, prompt_logprobs)

    def _output(self, outputs: list[CompletionOutput], prompt_logprobs: list[dict[int, Logprob] | None] | None) -> RequestOutput:
        return RequestOutput(
            self.request_id, self._prompt.text, self._prompt.ids, prompt_logprobs, outputs, self.finished, self._num_cached, self.metrics,
        )


def logprob_dict(row: LogprobRow, tokenizer: Any | None) -> dict[int, Logprob]:
    """vLLM's shape of one position: the token itself first, then the most likely ones. Texts are None without a tokenizer."""
    found = {row.token: Logprob(row.logprob, row.rank, _text(tokenizer, row.token))}
    for rank, (token, logprob) in enumerate(zip(row.top_ids, row.top_logprobs, strict=True), 1):
        if token != row.token:
            found[token] = Logprob(logprob, rank, _text(tokenizer, token))
    return found


def _text(tokenizer: Any | None, token: int) -> str | None:
    return None if tokenizer is None else tokenizer.token_text(token)


def num_tokens(outputs: Sequence[RequestOutput]) -> int:
    """Generated tokens of several answers."""
    return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
