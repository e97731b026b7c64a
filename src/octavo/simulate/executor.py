"""SimExecutor: an executor without a model. The test double of the engine, and the simulator's machine.

It sees what a runner sees (a plan, and what it remembers of each slot) and asserts the whole contract of plans. In
place of K and V each cell of the block memory holds a hash of the sequence up to and including its token; a step reads
back every cell of its context through the block table, after all of the step's writes. So a wrong position, a stale, lost
or overwritten block is found at the step that would have read it, and blocks are shared exactly by those whose sequences
agree. With a sliding ``window`` a row reads the last cells only, and what the table has behind them does not matter. A swap tier
holds such cells, too, and moves are made in their order. What a move that failed (``breaks``) was to fill, and all that is
computed from it, is spoilt, and so is the result: a token that is never the right one. The token after a sequence is a pure function of the
sequence and the seed: a request has one right answer, whatever company, chunks and preemptions it meets.
"""

from collections.abc import Callable, Sequence

from octavo.config import BLOCK_SIZE
from octavo.core.output import LogprobRow
from octavo.core.step import COPY, IN, OUT, Move, PlanItem, SlotInit, SlotResult, StepPlan, StepResult

MASK = 2**64 - 1
SPOILT = -1  # a cell that holds anything


def mix(state: int, value: int) -> int:
    """Hash ``value`` into ``state``, both of 64 bits. Source: Steele, Lea & Flood 2014 (SplitMix64's finalizer)."""
    z = (state + (value + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def hash_sequence(tokens: Sequence[int]) -> int:
    """The hash of a whole sequence: what the cell of its last token holds."""
    state = 0
    for token in tokens:
        state = mix(state, token)
    return state


def next_token(state: int, seed: int, vocab: int, banned: frozenset[int] = frozenset()) -> int:
    """The token that follows a sequence with this hash: the first of a fixed series of draws that is not banned."""
    draw = mix(state, seed)
    while (token := draw % vocab) in banned:
        draw = mix(draw, 0)
    return token


def logprob(state: int, token: int) -> float:
    """A made-up log-probability of ``token`` after the sequence with this hash; between -16 and 0."""
    return -(mix(state, token) >> 32) / 2**28


def most_likely(state: int, vocab: int) -> list[int]:
    """All tokens, by falling log-probability after the sequence with this hash; of equals the lowest id first."""
    return sorted(range(vocab), key=lambda token: (-logprob(state, token), token))


class VirtualClock:
    """Time that moves only when told to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The time in seconds."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    def wait(self, until: float) -> None:
        """Let time pass until then, if it is still to come."""
        self.now = max(self.now, until)


class _Slot:
    """What a runner remembers of the request in a slot."""

    def __init__(self, init: SlotInit, epoch: int) -> None:
        params = init.params
        self.init = init
        self.epoch = epoch
        self.tokens = list(init.tokens)
        self.computed = 0
        self.table: list[int] = []
        self.banned = frozenset(init.eos_ids | set(params.stop_token_ids)) if params.min_tokens else frozenset()


class SimExecutor:
    """Executes plans on hashes. ``cost``: the seconds a plan takes, by which ``clock`` is advanced; ``block_seconds``: what a move out
    or in takes, which is more than that. ``breaks``: whether such a move fails.

    Raises: AssertionError at the first breach of the contract, with the plan's number and the slot.
    """

    def __init__(
        self,
        num_slots: int,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        *,
        vocab: int = 1000,
        max_tokens: int | None = None,
        clock: VirtualClock | None = None,
        cost: Callable[[StepPlan], float] | None = None,
        window: int | None = None,
        tier_slots: int = 0,
        block_seconds: float = 0.0,
        breaks: Callable[[Move], bool] = lambda move: False,
    ) -> None:
        self.block_size = block_size
        self.vocab = vocab
        self._num_slots = num_slots
        self._num_blocks = num_blocks
        self._window = window
        self._max_tokens = max_tokens  # rows of the largest step
        self._clock = clock
        self._cost = cost
        self._slots: dict[int, _Slot] = {}
        self._memory: list[int | None] = [None] * (num_blocks * block_size)
        self._tier: list[list[int | None] | None] = [None] * tier_slots
        self._block_seconds = block_seconds
        self._breaks = breaks
        self._number = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Check a plan, then compute it."""
        _require(plan.number > self._number, plan, None, f"comes after {self._number}")
        self._number = plan.number
        for slot in plan.freed:
            self._slots.pop(slot, None)
        self._check_whole(plan)
        failed = [place for place, move in enumerate(plan.moves) if not self._move(plan, move)]
        for item in plan.items:
            self._check_item(plan, item, self._slots[item.slot])
        written: set[int] = set()
        for item in plan.items:
            self._write(plan, item, written)
        if SPOILT in self._memory:
            self._spoil(plan)
        results = [self._read(plan, item) for item in plan.items]
        swap = self._block_seconds * sum(move.kind != COPY for move in plan.moves)
        seconds = swap + (self._cost(plan) if self._cost else 0.0)
        if self._clock:
            self._clock.advance(seconds)
        return StepResult(plan.number, results, seconds, swap, failed, "the tier broke" if failed else "")

    def shutdown(self) -> None:
        """Forget everything."""
        self._slots.clear()

    @property
    def occupied(self) -> set[int]:
        """The slots that hold a request."""
        return set(self._slots)

    def _check_whole(self, plan: StepPlan) -> None:
        """What concerns more than one item; takes in slots and blocks."""
        _require(bool(plan.items), plan, None, "has no items")
        _require(self._max_tokens is None or plan.num_tokens <= self._max_tokens, plan, None, f"has {plan.num_tokens} tokens")
        _require(len({item.slot for item in plan.items}) == len(plan.items), plan, None, "names a slot twice")
        for item in plan.items:
            _require(0 <= item.slot < self._num_slots, plan, item, "the slot is out of range")
            if item.init is not None:
                _require(item.slot not in self._slots, plan, item, "is given out while occupied")
                _require(len(item.init.tokens) >= item.init.prompt_len > 0, plan, item, "is introduced with too few tokens")
                self._slots[item.slot] = _Slot(item.init, item.epoch)
                self._slots[item.slot].computed = item.start  # what a prefix cache held
            _require(item.slot in self._slots, plan, item, "is empty")
            self._slots[item.slot].table.extend(item.new_blocks)
            table = self._slots[item.slot].table[self._first(item) // self.block_size :]
            _require(all(0 <= block < self._num_blocks for block in table), plan, item, "is given a block out of range")
            _require(len(set(table)) == len(table), plan, item, "is given a block twice")

    def _move(self, plan: StepPlan, move: Move) -> bool:
        """One move; False, and its target spoilt, where it breaks."""
        known = move.kind in (COPY, OUT, IN)
        _require(known, plan, None, f"has a move of no known kind: {move}")
        ends = [len(self._tier) if tier else self._num_blocks for tier in (move.kind == IN, move.kind == OUT)]
        _require(0 <= move.source < ends[0] and 0 <= move.target < ends[1], plan, None, f"moves what is out of range: {move}")
        size, source = self.block_size, move.source
        found = self._tier[source] if move.kind == IN else self._memory[source * size : (source + 1) * size]
        _require(found is not None, plan, None, f"brings back what was never moved out: {move}")
        sound = move.kind == COPY or not self._breaks(move)
        cells: list[int | None] = list(found or ()) if sound else [SPOILT] * size
        if move.kind == OUT:
            self._tier[move.target] = cells
        else:
            self._memory[move.target * size : (move.target + 1) * size] = cells
        return sound

    def _spoil(self, plan: StepPlan) -> None:
        """What is computed from a spoilt cell is spoilt, too; also through another item of the step."""
        items = list(plan.items)
        while spoilt := [item for item in items if any(self._memory[cell] == SPOILT for cell in self._cells(item))]:
            items = [item for item in items if item not in spoilt]
            for item in spoilt:
                for cell in self._cells(item, item.start):
                    self._memory[cell] = SPOILT

    def _check_item(self, plan: StepPlan, item: PlanItem, slot: _Slot) -> None:
        count, start, end = len(item.tokens), item.start, item.start + len(item.tokens)
        told, params, prompt_len = len(slot.init.tokens), slot.init.params, slot.init.prompt_len
        _require(item.epoch == slot.epoch, plan, item, f"is in epoch {slot.epoch}")
        _require(count > 0 and start == slot.computed, plan, item, f"has {slot.computed} tokens computed, the item starts at {start}")
        _require(end <= len(slot.tokens), plan, item, f"has {len(slot.tokens)} tokens, the item ends at {end}")
        _require(end <= len(slot.table) * self.block_size, plan, item, f"has blocks for fewer than {end} tokens")
        if params.use_beam_search and start >= told and start == len(slot.tokens) - 1:
            _require(item.tokens[0] >= 0, plan, item, "is a beam's, and the item does not name its token")
            slot.tokens[start:] = item.tokens  # whatever was sampled there
        expected = slot.tokens[start:end] if start < told or params.use_beam_search else [-1]
        _require(item.tokens == expected, plan, item, f"expects tokens {expected}, the item says {item.tokens}")
        _require(item.sample == (end == len(slot.tokens)), plan, item, "samples exactly when nothing is left to compute")
        _require(item.num_draft == 0, plan, item, "has drafts")
        if item.score_to > item.score_from:
            inside = start <= item.score_from and item.score_to <= min(end, prompt_len - 1)
            _require(inside and params.prompt_logprobs is not None, plan, item, "scores rows that it may not")

    def _write(self, plan: StepPlan, item: PlanItem, written: set[int]) -> None:
        """The item's K and V: hashes of what its slot knows to be the sequence."""
        slot, start = self._slots[item.slot], item.start
        state = hash_sequence(slot.tokens[:start])
        for position in range(start, start + len(item.tokens)):
            state = mix(state, slot.tokens[position])
            cell = self._cell(slot, position)
            _require(cell not in written, plan, item, f"writes the cell of position {position}, as another item does")
            written.add(cell)
            self._memory[cell] = state

    def _read(self, plan: StepPlan, item: PlanItem) -> SlotResult:
        """Attention, which reads the whole context back, and what comes of it."""
        slot = self._slots[item.slot]
        params, start = slot.init.params, item.start
        state = 0
        scored = []
        spoilt = any(self._memory[cell] == SPOILT for cell in self._cells(item))
        first = self._first(item)
        for position in range(start + len(item.tokens)):
            state = mix(state, slot.tokens[position])
            whole = spoilt or position < first or self._memory[self._cell(slot, position)] == state
            _require(whole, plan, item, f"the cell of position {position} was overwritten, or never written")
            if item.score_from <= position < item.score_to:
                scored.append(self._row(state, slot.tokens[position + 1], params.prompt_logprobs or 0))
        slot.computed = start + len(item.tokens)
        if not item.sample:
            return SlotResult(item.slot, item.epoch, prompt_logprobs=scored or None)
        early = len(slot.tokens) - slot.init.prompt_len < params.min_tokens
        token = next_token(state, slot.init.seed, self.vocab, slot.banned if early else frozenset())
        token = (token + spoilt) % self.vocab
        slot.tokens.append(token)
        rows = None if params.logprobs is None else [self._row(state, token, params.logprobs)]
        return SlotResult(item.slot, item.epoch, [token], rows, scored or None)

    def _first(self, item: PlanItem) -> int:
        """The first position that an item's rows see."""
        return 0 if self._window is None else max(0, item.start - self._window + 1)

    def _cells(self, item: PlanItem, first: int | None = None) -> list[int]:
        """The cells that an item's rows see, or those from a position on."""
        slot = self._slots[item.slot]
        return [self._cell(slot, at) for at in range(self._first(item) if first is None else first, item.start + len(item.tokens))]

    def _cell(self, slot: _Slot, position: int) -> int:
        return slot.table[position // self.block_size] * self.block_size + position % self.block_size

    def _row(self, state: int, token: int, top: int) -> LogprobRow:
        """``token``, and the most likely ids, as many alternatives as asked for."""
        ids = most_likely(state, self.vocab)[: self.vocab if top < 0 else top] if top else []
        rank = 1 + sum(logprob(state, other) > logprob(state, token) for other in range(self.vocab))
        return LogprobRow(token, logprob(state, token), rank, ids, [logprob(state, i) for i in ids])


def _require(holds: bool, plan: StepPlan, item: PlanItem | None, message: str) -> None:
    """An assertion that python -O keeps: finding broken plans is this class's work."""
    if not holds:
        where = "" if item is None else f"slot {item.slot} (epoch {item.epoch}) "
        raise AssertionError(f"plan {plan.number}: {where}{message}")
