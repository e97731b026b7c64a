"""What happened inside a step, as plain data. The scheduler puts events into its plan; observers subscribe."""

import msgspec


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """A request left the waiting queue. ``resumed``: it had run before. ``forked_tokens`` were taken over from another sample of its prompt;
    ``swapped_tokens`` came back from the swap tier. What is neither cached, forked nor swapped is computed."""

    request_id: str
    slot: int
    cached_tokens: int
    resumed: bool
    forked_tokens: int = 0
    swapped_tokens: int = 0


class Preempted(msgspec.Struct, frozen=True, tag=True):
    """A request lost its blocks to another and waits again.

    ``how``: recompute, or swap when its blocks went to the tier. ``tokens_lost`` must be computed anew, unless they are still
    cached when it is resumed (``Admitted.cached_tokens``). ``seconds``: what this way is expected to cost; ``Recovered`` says what it did.
    """

    request_id: str
    cause: str  # who needed the blocks and how many, in words
    tokens_lost: int
    blocks_freed: int
    how: str = "recompute"
    blocks_swapped: int = 0  # moved out for it; one that another victim of the same step has brought there is not moved twice
    seconds: float = 0.0


class Recovered(msgspec.Struct, frozen=True, tag=True):
    """A request that was preempted has all computed again that it had. ``seconds``: the measured time for it, in steps and moves;
    of a step that computed for others, too, its tokens' share. Preempted once more meanwhile, it is told once for all."""

    request_id: str
    recomputed_tokens: int
    blocks_swapped: int  # that came back
    seconds: float


class TierFailed(msgspec.Struct, frozen=True, tag=True):
    """The swap tier cannot be written or read: nothing goes there any more, and what was there is computed anew. Told once."""

    message: str
    request_id: str = ""  # nobody's


class Finished(msgspec.Struct, frozen=True, tag=True):
    """A request ended and its blocks are free."""

    request_id: str
    reason: str


Event = Admitted | Preempted | Recovered | TierFailed | Finished
