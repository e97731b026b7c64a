"""Token ids to streamed text: UTF-8 across token boundaries, and stop strings.

    ids ─ bytes of visible tokens ─ complete characters ─ what cannot begin a stop string ─▶ delta
                                    └ held: an open character └ held: a possible beginning

Each stage holds back only what it must. All deltas and the final ``flush`` together are the text that
``Tokenizer.decode`` shows after the prompt, up to the stop string. Cost: linear in the bytes, whatever the split.
"""

import codecs
from collections import deque
from collections.abc import Iterable, Sequence

from octavo.core.sampling import SamplingParams
from octavo.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class StopStrings:
    """Finds the first of several strings in a text that arrives in pieces (an automaton over their prefixes).

    "First" is the one that is complete first; of those that end at the same character, the longest. So the answer
    depends on the text alone, never on how it was cut into tokens. Immutable; a search's position is a state number.
    Source: Aho & Corasick 1975.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._match: list[str | None] = [None]
        depth = [0]
        for string in strings:
            state = 0
            for char in string:
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    self._match.append(None)
                    depth.append(depth[state] + 1)
                state = self._next[state][char]
            self._match[state] = string
        self._fail = [0] * len(self._next)
        queue = list(self._next[0].values())
        for state in queue:  # breadth first: a state's shorter suffixes are done before it
            for char, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], char) if state else 0
                queue.append(child)
            if self._match[state] is None:
                self._match[state] = self._match[self._fail[state]]
        # how many characters of a state's text can still become a stop string
        self._open = [0] * len(self._next)
        for state in queue:
            self._open[state] = depth[state] if self._next[state] else self._open[self._fail[state]]

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while char not in self._next[state]:
            if state == 0:
                return 0
            state = self._fail[state]
        return self._next[state][char]

    def match(self, state: int) -> str | None:
        """The longest stop string that ends where the search is."""
        return self._match[state]

    def held(self, state: int) -> int:
        """How many of the last characters could be the beginning of a stop string."""
        return self._open[state]


class IncrementalDetokenizer:
    """The text of one sequence as its tokens arrive.

    ``stop_reason`` is the stop string that was found, if any; then ``finished`` is True and ``num_tokens`` counts the
    tokens up to and including the one that completed it: later ones (of the same speculative step) are not part of
    the answer. With ``min_tokens``, as in vLLM, a stop string counts only if its last character came out after the
    first ``min_tokens`` tokens; it may have begun before. With ``params.detokenize`` False there is no text at all.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._enabled = params.detokenize
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._stops = StopStrings(params.stop) if params.stop and params.detokenize else None
        self._state = 0
        self._window: deque[str] = deque()  # text that came out of the decoder and may begin a stop string
        self._window_size = 0
        self._parts: list[str] = []
        self.num_tokens = 0
        self.stop_reason: str | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._prompt_tail = b""
        self._strip = False
        self._flushed = False
        if self._enabled:
            self._look_back(prompt_ids)

    def _look_back(self, prompt_ids: Sequence[int]) -> None:
        """Take from the prompt what its continuation depends on: an open character, and whether any text came before."""
        tail = b""
        for token in reversed(prompt_ids):
            if token in self._skip:
                continue
            tail = self._tokenizer.token_bytes(token) + tail
            if len(tail) >= 4:
                break
        self._strip = self._tokenizer.strip_first_space and not tail
        self._prompt_tail = _open_character(tail[-3:])
        self._decoder.decode(self._prompt_tail)

    @property
    def finished(self) -> bool:
        """Whether a stop string ended the text."""
        return self.stop_reason is not None

    @property
    def text(self) -> str:
        """All text given out so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, ids: Iterable[int], stop_terminated: bool = False) -> str:
        """Take new tokens; → the text that is now certain (often one token behind when stop strings are near).

        ``stop_terminated``: the last of ``ids`` is a stop token, which shows only with include_stop_str_in_output.
        Tokens after a stop string are ignored.
        """
        ids = list(ids)
        out = ""
        for i, token in enumerate(ids):
            if self.finished:
                break
            self.num_tokens += 1
            hidden = stop_terminated and i == len(ids) - 1 and not self._include_stop
            if not self._enabled or hidden or token in self._skip:
                continue
            text = self._decode(self._tokenizer.token_bytes(token), final=False)
            if text:
                out += self._search(text)
        return self._give(out)

    def flush(self) -> str:
        """The rest of the text, when no more tokens will come. An open character ends as U+FFFD."""
        if self._flushed or self.finished:
            return ""
        self._flushed = True
        text = self._decode(b"", final=True)
        out = self._search(text) if text else ""
        if not self.finished:
            out += "".join(self._window)
            self._window.clear()
        return self._give(out)

    def _give(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text

    def _decode(self, data: bytes, final: bool) -> str:
        """Complete characters. What the prompt's open character would have shown on its own belongs to the prompt."""
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        text = self._decoder.decode(data, final)
        if self._prompt_tail:
            if text:
                broken = text[0] == REPLACEMENT and not _completes(self._prompt_tail, data)
                self._prompt_tail = b""
                return text[1:] if broken else text
            self._prompt_tail += data
        return text

    def _search(self, text: str) -> str:
        """Look for stop strings in new text; → what cannot be part of one any more."""
        stops = self._stops
        if stops is None:
            return text
        active = self.num_tokens > self._min_tokens
        state = self._state
        for i, char in enumerate(text):
            state = stops.step(state, char)
            found = stops.match(state)
            if found is not None and active:
                self.stop_reason = found
                whole = "".join(self._window) + text[: i + 1]
                self._window.clear()
                return whole if self._include_stop else whole[: len(whole) - len(found)]
        self._state = state
        self._window.append(text)
        self._window_size += len(text)
        return self._release(self._window_size - stops.held(state))

    def _release(self, count: int) -> str:
        """The first ``count`` characters of the window."""
        self._window_size -= count
        out = []
        while count:
            piece = self._window.popleft()
            out.append(piece[:count])
            if len(piece) > count:
                self._window.appendleft(piece[count:])
                break
            count -= len(piece)
        return "".join(out)


def _open_character(tail: bytes) -> bytes:
    """The bytes at the end of ``tail`` that begin a character and do not finish it."""
    for size in range(1, len(tail) + 1):
        last = tail[-size:]
        if last[0] >= 0xC2:  # a lead byte; what follows it decides (b"\xed\xa0" begins nothing and is two errors)
            held = not codecs.getincrementaldecoder("utf-8")("replace").decode(last)
            return last if held and len(last.decode("utf-8", "replace")) == 1 else b""
    return b""


def _completes(begun: bytes, more: bytes) -> bool:
    """Whether ``more`` finishes the character that ``begun`` begins."""
    size = 2 if begun[0] < 0xE0 else 3 if begun[0] < 0xF0 else 4
    try:
        return len((begun + more)[:size].decode("utf-8")) == 1
    except UnicodeDecodeError:
        return False
