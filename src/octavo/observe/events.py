"""What happened inside a step, as plain data. The scheduler puts events into its plan; observers subscribe."""

import msgspec


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """A request left the waiting queue. ``resumed``: it had run before. ``forked_tokens`` were taken over from another sample of its prompt."""

    request_id: str
    slot: int
    cached_tokens: int
    resumed: bool
    forked_tokens: int = 0


class Preempted(msgspec.Struct, frozen=True, tag=True):
    """A request lost its blocks to another and waits again; ``tokens_lost`` must be computed anew, unless they are still
    cached when it is resumed (``Admitted.cached_tokens``)."""

    request_id: str
    cause: str  # who needed the blocks and how many, in words
    tokens_lost: int
    blocks_freed: int


class Finished(msgspec.Struct, frozen=True, tag=True):
    """A request ended and its blocks are free."""

    request_id: str
    reason: str


Event = Admitted | Preempted | Finished
