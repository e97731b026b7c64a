"""StepPlan and StepResult: all that the deciding half and the tensor half say to each other."""

import msgspec

from octavo.core.output import LogprobRow
from octavo.core.sampling import SamplingParams
from octavo.observe.events import Event


class SlotInit(msgspec.Struct, frozen=True):
    """What the runner must know about a request when it is given a slot (first time, or again after a preemption)."""

    request_id: str
    params: SamplingParams
    seed: int  # unsigned 64 bits; the uniform of a token is Philox(seed, its position)
    prompt_len: int
    tokens: list[int]  # all known tokens: prompt + output so far
    eos_ids: frozenset[int]  # banned, like params.stop_token_ids, until params.min_tokens are out
    bad_words: tuple[tuple[int, ...], ...] = ()


class PlanItem(msgspec.Struct, frozen=True, gc=False):
    """One request's part of a step: compute ``tokens`` at positions ``start …`` of the sequence in ``slot``.

    A decode item's token is ``-1``: the slot knows its last token. Under ``use_beam_search`` it is named, as what the slot sampled
    need not be what was chosen. The step's K and V go to the positions' blocks; ``new_blocks`` extend the slot's block table first.
    With ``sample`` the last row gives the next token.
    """

    slot: int
    epoch: int
    start: int
    tokens: list[int]
    sample: bool
    new_blocks: list[int] = []
    init: SlotInit | None = None
    num_draft: int = 0  # trailing tokens that are drafts, to be verified
    score_from: int = 0  # prompt_logprobs: rows at positions score_from … score_to - 1 (absolute, inside this item)
    score_to: int = 0  # are scored, the row at p giving the log-probability of the prompt's token p + 1


COPY, OUT, IN = "copy", "out", "in"


class Move(msgspec.Struct, frozen=True, gc=False):
    """One block's K and V, bit for bit: ``copy`` from block to block, ``out`` from block to tier slot, ``in`` from tier slot to block."""

    kind: str
    source: int
    target: int


class StepPlan(msgspec.Struct, frozen=True):
    """What one step computes. ``freed`` slots are given up before the items are read (a freed slot may be reused).

    ``moves`` are made before the step writes anything, strictly in their order. So each finds what was there when it was
    decided: a block that is moved out, given to another and filled from elsewhere, or a tier slot that is emptied and filled
    again, comes out right by construction, however long the chain.

    All K and V of a step are written before any are read (layer by layer), so an item may read blocks that another item of
    the same plan fills. Blocks may be in several slots' tables; a full one is never written again while it is.
    """

    number: int
    items: list[PlanItem]
    freed: list[int] = []
    events: list[Event] = []
    moves: list[Move] = []

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass."""
        return sum(len(item.tokens) for item in self.items)


class SlotResult(msgspec.Struct, frozen=True):
    """What a step found for one item. ``tokens`` is empty unless the item sampled."""

    slot: int
    epoch: int
    tokens: list[int] = []  # accepted: the drafts that held, then one of the model's own
    logprobs: list[LogprobRow] | None = None  # one per token, when params.logprobs is set
    prompt_logprobs: list[LogprobRow] | None = None  # one per scored position of the item
    draft: list[int] = []  # proposed for the next step
    error: str | None = None  # this request cannot go on, and why; the others of the step can. Its K and V are written all the same


class StepResult(msgspec.Struct, frozen=True):
    """The results of a plan, one per item, in its order.

    A move that failed (an input or output error of the tier) is in ``failed_moves`` by its place in the plan's ``moves``, and
    ``moves_error`` says why. What it was to fill holds anything, and so does every row that read it; the others are sound.
    """

    number: int
    slots: list[SlotResult]
    seconds: float = 0.0  # time inside the executor
    swap_seconds: float = 0.0  # of it: for moves out and in
    failed_moves: list[int] = []
    moves_error: str = ""
