"""One choice of an answer as it comes: what is not told yet, in the pieces that the formats want."""

import codecs
from typing import Any

from octavo.core.output import CompletionOutput, Logprob
from octavo.server.answers import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

LOWEST = -9999.0  # JSON has no -inf; vLLM's number


class Choice:
    """News of one choice, gathered until ``take``. ``textless``: the model has no tokenizer, so tokens are all there is to tell."""

    __slots__ = ("_textless", "finish_reason", "logprobs", "parts", "said", "stop_reason", "token_ids")

    def __init__(self, *, textless: bool = False) -> None:
        self._textless = textless
        self.parts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.said = False  # whether anything was taken

    def add(self, news: CompletionOutput) -> None:
        """Take news in."""
        if news.text:
            self.parts.append(news.text)
        self.token_ids.extend(news.token_ids)
        if news.logprobs:
            self.logprobs.extend(news.logprobs)
        self.finish_reason, self.stop_reason = news.finish_reason, news.stop_reason

    def ready(self, interval: int) -> bool:
        """Whether a chunk should go out: at the end, with the first text, then with every ``interval`` tokens that brought text."""
        if self.finish_reason is not None:
            return True
        told = bool(self.parts) or (self._textless and bool(self.token_ids))
        return told and (not self.said or len(self.token_ids) >= interval)

    def take(self) -> tuple[str, list[int], list[dict[int, Logprob]]]:
        """What came since the last call."""
        taken = "".join(self.parts), self.token_ids, self.logprobs
        self.parts, self.token_ids, self.logprobs, self.said = [], [], [], True
        return taken


class Speller:
    """Tokens as the text that logprobs show."""

    def __init__(self, tokenizer: Any | None, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def text(self, token: int) -> str:
        """One token, or "token_id:7" where that was asked for or there is no text."""
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)  # type: ignore[union-attr,no-any-return]

    def bytes(self, token: int) -> list[int] | None:
        """The bytes that it stands for."""
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token))


def best(row: dict[int, Logprob], count: int) -> list[tuple[int, float]]:
    """The ``count`` most likely candidates of a position, best first. -1: all there are."""
    ranked = sorted(row.items(), key=lambda pair: pair[1].rank or 0)
    return [(token, max(found.logprob, LOWEST)) for token, found in (ranked if count < 0 else ranked[:count])]


def chat_logprobs(ids: list[int], rows: list[dict[int, Logprob]], top: int, speller: Speller) -> ChatLogprobs:
    """The chat format of some tokens."""
    content = []
    for token, row in zip(ids, rows, strict=True):
        candidates = [TopLogprob(speller.text(other), logprob, speller.bytes(other)) for other, logprob in best(row, top)]
        content.append(TokenLogprob(speller.text(token), max(row[token].logprob, LOWEST), speller.bytes(token), candidates))
    return ChatLogprobs(content)


class Offsets:
    """Where each token's first byte lies in a text, in characters; a token without text lies where the next one begins.

    ``strip``: the text lacks the space that its first token begins with.
    """

    def __init__(self, tokenizer: Any | None, skip: frozenset[int], at: int = 0, *, strip: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._strip = strip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.at = at

    def next(self, token: int) -> int:
        """The offset of this token."""
        here = self.at
        if self._tokenizer is None or token in self._skip:
            return here
        data = self._tokenizer.token_bytes(token)
        if self._strip and data:
            self._strip, data = False, data.removeprefix(b" ")
        self.at += len(self._decoder.decode(data))
        return here


def completion_logprobs(ids: list[int], rows: list[dict[int, Logprob] | None], top: int, speller: Speller, offsets: list[int]) -> CompletionLogprobs:
    """The legacy format of some tokens. ``rows`` are None where nothing came before (the prompt's first token).

    As OpenAI's, ``top_logprobs`` holds the chosen token too when it is not among the most likely; of candidates that are
    spelled alike, the most likely one counts.
    """
    found = CompletionLogprobs([], [], [], [])
    found.text_offset.extend(offsets)
    for token, row in zip(ids, rows, strict=True):
        found.tokens.append(speller.text(token))
        if row is None:
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
            continue
        own = max(row[token].logprob, LOWEST)
        candidates: dict[str, float] = {}
        for other, logprob in [*best(row, top), (token, own)]:
            candidates.setdefault(speller.text(other), logprob)
        found.token_logprobs.append(own)
        found.top_logprobs.append(candidates)
    return found
