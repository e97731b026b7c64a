"""What crosses the cut between the caller's process and the engine's: msgspec Structs, as MessagePack.

    caller  ── Add, Abort, ResetCache, Shutdown ──▶  engine
    caller  ◀── Begin, Progress, End, Note, Ready (start-up), then one Batch per step ──  engine

Boot goes first, by another way (the engine's standard input), and LastWords come last (a pipe whose end is also the
engine's end). Plans and results of steps never cross.
"""

from collections.abc import Sequence

import msgspec

from octavo import errors
from octavo.config import Config
from octavo.core.output import Delta
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.errors import OctavoError, WorkerDied
from octavo.observe.events import Event
from octavo.runner.memory import Ledger


class Boot(msgspec.Struct, frozen=True):
    """What an engine process must know to start. ``model`` in ``config`` is a local path."""

    config: Config
    address: str  # of the socket
    log: str | None  # the level of its logger; None: its own environment says


# -- to the engine


class Add(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """New sequences with one prompt: the fixed facts of ``len(ids)`` Requests."""

    ids: list[str]
    seeds: list[int]
    prompt: list[int]
    params: SamplingParams
    max_total: int
    eos_ids: frozenset[int] = frozenset()
    arrival: float = 0.0
    priority: int = 0
    tenant: str = ""
    bad_words: tuple[tuple[int, ...], ...] = ()
    cache_salt: str = ""
    rest: SamplingParams | None = None  # the parameters of all but the first, where they differ

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "Add":
        """The message for the requests that Inputs made of one prompt."""
        first, params = requests[0], [_computed(request.params) for request in requests[:2]]
        return cls(
            [request.id for request in requests], [request.seed for request in requests], first.prompt, params[0], first.max_total, first.eos_ids,
            first.arrival, first.priority, first.tenant, first.bad_words, first.cache_salt,
            params[1] if params[1:] and params[1] != params[0] else None,
        )

    def requests(self) -> list[Request]:
        """The requests, on the other side."""
        return [
            Request(
                id=name, prompt=self.prompt, params=self.params if self.rest is None or place == 0 else self.rest, max_total=self.max_total,
                eos_ids=self.eos_ids, seed=seed, arrival=self.arrival, priority=self.priority, tenant=self.tenant, bad_words=self.bad_words,
                cache_salt=self.cache_salt, fork_of=self.ids[0] if place else "",
            )
            for place, (name, seed) in enumerate(zip(self.ids, self.seeds, strict=True))
        ]


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End these sequences, if they have not ended."""

    ids: list[str]


class ResetCache(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget all cached prefixes. The next Batch counts it."""


class Shutdown(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End everything, then the process."""


# -- from the engine


class Begin(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A phase of the start-up begins."""

    phase: str


class Progress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Bytes done of a long phase; told a few times a second."""

    what: str
    done: int
    total: int | None


class End(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A phase is over."""

    phase: str
    seconds: float


class Note(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A fact about the start-up, for people."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The start-up is over; requests are taken."""

    config: Config  # final
    ledger: Ledger
    isa: str
    sliding: bool = False  # every layer sees a window only


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """What the engine says about itself after a step. Counts of sequences and blocks, then totals since the start."""

    running: int = 0
    waiting: int = 0  # also those that were preempted
    kv_total: int = 0  # blocks
    kv_free: int = 0  # of them: hold nothing
    steps: int = 0
    tokens_planned: int = 0  # rows of all forward passes
    tokens_sampled: int = 0
    preemptions: int = 0
    tokens_lost: int = 0  # computed tokens that preemptions threw away
    kv_cached: int = 0  # blocks in no table, kept for as long as nothing else needs them
    kv_shared: int = 0  # blocks in more than one table
    kv_logical: int = 0  # blocks that the tables would take without sharing
    kv_reserved_slots: int = 0  # token slots of live blocks that are not used yet
    cache_queries: int = 0  # prompt tokens that were looked up in the prefix cache
    cache_hits: int = 0  # of them: found
    tokens_recomputed: int = 0  # computed tokens that were computed once more, after a preemption
    blocks_out: int = 0  # moved to the swap tier
    blocks_in: int = 0  # moved back
    tier_total: int = 0  # blocks of the swap tier
    tier_used: int = 0
    swapped: int = 0  # waiting sequences that have blocks there

    @property
    def kv_live(self) -> int:
        """Blocks that running sequences hold."""
        return self.kv_total - self.kv_free - self.kv_cached


class Batch(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The news of one step. Times are of the monotonic clock, which both processes share, in seconds."""

    begun: float
    ended: float
    num_tokens: int  # computed in the step
    deltas: list[Delta]
    events: list[Event]
    stats: EngineStats
    resets: int = 0  # of the cache, asked for and done since the last batch


class LastWords(msgspec.Struct, frozen=True):
    """Why the engine process ends: an error by its class, or None where it was told to."""

    kind: str | None = None
    message: str = ""
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> "LastWords":
        """Of an error: Octavo's own by its class, any other as WorkerDied."""
        if isinstance(error, OctavoError):
            return cls(type(error).__name__, error.message[:LONGEST], error.param)
        return cls(WorkerDied.__name__, f"{type(error).__name__}: {error}"[:LONGEST])

    def error(self) -> OctavoError:
        """The error again."""
        found = getattr(errors, self.kind or "", None)
        made: OctavoError = (found if isinstance(found, type) and issubclass(found, OctavoError) else WorkerDied)(self.message, self.param)
        return made


LONGEST = 8192  # characters of a message: last words must fit a pipe that nobody reads

ToEngine = Add | Abort | ResetCache | Shutdown
FromEngine = Begin | Progress | End | Note | Ready | Batch

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_boot = msgspec.msgpack.Decoder(Boot).decode
decode_last_words = msgspec.msgpack.Decoder(LastWords).decode


def _computed(params: SamplingParams) -> SamplingParams:
    """What the engine reads of the parameters.

    Text is the caller's affair (stop, bad_words as text); seed, n and max_tokens are facts of the Request already. A search's width is
    ``best_of``, whatever n.
    """
    return msgspec.structs.replace(
        params, n=1, best_of=params.beam_width if params.use_beam_search else None, seed=None, stop=[], bad_words=[], max_tokens=None,
        detokenize=True, skip_special_tokens=True, include_stop_str_in_output=False,
    )
