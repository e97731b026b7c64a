"""BeamSearch: which sequences of one prompt go on, and which are finished. Numbers in, choices out: it knows no request, slot or block.

At each step every beam's most likely next tokens are ranked together by their sums of log-probabilities. The best ``width`` that do not end
become the next beams; of the best ``width`` in all, those that end are finished hypotheses, of which the best ``width`` by

    sum of log-probabilities / length ** length_penalty

are kept. Which candidates are looked at, how a hypothesis is scored and when the search is over is as transformers' ``generate`` with
``num_beams`` has it (length: generated tokens, the end token counted). Sums are float64; of equals, the better beam's, then the more likely
token comes first.
"""

from collections.abc import Sequence
from typing import NamedTuple

from octavo.core.output import LogprobRow
from octavo.errors import ContextTooLong


def num_candidates(width: int, num_ends: int) -> int:
    """Continuations that a step looks at: with so many, ``width`` are left whichever of them end."""
    return max(2, 1 + num_ends) * width


def num_alternatives(width: int, num_ends: int, num_banned: int) -> int:
    """Of one beam's next tokens, so that its best ``num_candidates`` are among them, whichever are banned."""
    return num_candidates(width, num_ends) + num_banned


def most_tokens(num_prompt: int, width: int, num_blocks: int, block_size: int, *, sliding: bool = False) -> int:
    """Prompt and output tokens that each of ``width`` beams may have, alone in a pool: the prompt's full blocks are shared, the rest is not.

    (Where all layers see a window only, a preempted search may find the shared ones behind it: then nothing is counted as shared.)
    The last token is never computed, so it needs no place. 0 when not every beam gets a block of its own.
    """
    shared = 0 if sliding else num_prompt // block_size
    each = (num_blocks - shared) // width
    return (shared + each) * block_size + 1 if each > 0 or width == 1 else 0


def check_room(num_prompt: int, width: int, num_blocks: int | None, block_size: int, *, sliding: bool = False, param: str = "prompt") -> None:
    """Whether a pool of so many blocks (None: unknown) can hold the search alone. Raises: ContextTooLong, naming ``param``."""
    if num_blocks is None or num_prompt > num_blocks * block_size:
        return
    if most_tokens(num_prompt, width, num_blocks, block_size, sliding=sliding) <= num_prompt:
        need = num_prompt // block_size + width if not sliding else -(-num_prompt // block_size) * width
        raise ContextTooLong(
            f"{width} beams of a prompt of {num_prompt} tokens take {need} blocks of {block_size} at least, and the KV "
            f"pool has {num_blocks}: ask for fewer beams, shorten the prompt or raise num_kv_blocks", param,
        )


class Path(NamedTuple):
    """The generated tokens of a beam, the last one first; beams share what they have in common."""

    row: LogprobRow  # of the last token
    before: "Path | None"

    def rows(self) -> list[LogprobRow]:
        """Of all tokens, in order."""
        found: list[LogprobRow] = []
        at: Path | None = self
        while at is not None:
            found.append(at.row)
            at = at.before
        return found[::-1]


class Hypothesis(NamedTuple):
    """A finished sequence."""

    score: float
    path: Path
    finish_reason: str  # stop | length
    stop_reason: int | None  # the stop token id; None for the model's own end token


class BeamSearch:
    """One search. ``ends``: tokens that end a hypothesis, each with what it gives as stop_reason; ``banned``: those that may not come among
    the first ``min_tokens``; ``most_tokens``: generated tokens at most; ``shown``: alternatives to keep in the rows (-1: all).
    """

    def __init__(
        self, width: int, ends: dict[int, int | None], *, most_tokens: int, length_penalty: float = 1.0, early_stopping: bool | str = False,
        banned: frozenset[int] = frozenset(), min_tokens: int = 0, shown: int = 0,
    ) -> None:
        self.width = width
        self.finished: list[Hypothesis] = []  # the best first
        self._ends = ends
        self._banned = banned
        self._min_tokens = min_tokens
        self._most_tokens = most_tokens
        self._penalty = length_penalty
        self._early_stopping = early_stopping
        self._shown = shown
        self._length = 0  # generated tokens of each beam
        self._beams: list[tuple[float, Path | None]] = [(0.0, None)]  # sum, tokens; the best first

    @property
    def needs(self) -> int:
        """Alternatives that a beam's row must have, unless the vocabulary is smaller."""
        return num_alternatives(self.width, len(self._ends), len(self._banned) if self._min_tokens else 0)

    def step(self, rows: Sequence[LogprobRow]) -> list[tuple[int, int]]:
        """Choose from the beams' rows, which come in the order of the last choice. Returns the next beams, the best first: (place of the
        parent in the last choice, token). None are left when the search is over.
        """
        self._length += 1
        candidates = self._ranked(rows)
        last = self._length >= self._most_tokens
        going = [] if last else [found for found in candidates if found[2].token not in self._ends][: self.width]
        for total, parent, row in candidates[: self.width]:
            if last or row.token in self._ends:
                self._finish(total, Path(row, self._beams[parent][1]))
        if not going or self._is_over(going[0][0]):
            self._beams = []
            return []
        self._beams = [(total, Path(row, self._beams[parent][1])) for total, parent, row in going]
        return [(parent, row.token) for _, parent, row in going]

    def _ranked(self, rows: Sequence[LogprobRow]) -> list[tuple[float, int, LogprobRow]]:
        """The best continuations: (sum, parent, the token's row)."""
        banned = self._banned if self._length <= self._min_tokens else frozenset()
        found = []
        for parent, ((total, _), row) in enumerate(zip(self._beams, rows, strict=True)):
            for rank, (token, logprob) in enumerate(zip(row.top_ids, row.top_logprobs, strict=True), 1):
                if token not in banned:
                    found.append((-(total + logprob), parent, rank, token, logprob))
        found.sort()
        best = found[: num_candidates(self.width, len(self._ends))]
        return [(-total, parent, self._row(rows[parent], rank, token, logprob)) for total, parent, rank, token, logprob in best]

    def _row(self, row: LogprobRow, rank: int, token: int, logprob: float) -> LogprobRow:
        shown = len(row.top_ids) if self._shown < 0 else self._shown
        return LogprobRow(token, logprob, rank, row.top_ids[:shown], row.top_logprobs[:shown])

    def _finish(self, total: float, path: Path) -> None:
        """Keep a hypothesis, if it is among the best."""
        token = path.row.token
        reason = ("stop", self._ends[token]) if token in self._ends else ("length", None)
        self.finished.append(Hypothesis(total / self._length**self._penalty, path, *reason))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self.width :]

    def _is_over(self, best: float) -> bool:
        """Whether the beams, the best of which has this sum, are given up: nothing that they may become is worth more than what is finished."""
        if len(self.finished) < self.width:
            return False
        if self._early_stopping is True:
            return True
        length = self._most_tokens if self._early_stopping == "never" and self._penalty > 0 else self._length
        return bool(best / length**self._penalty <= self.finished[-1].score)
