"""Request: what the scheduler knows about one sequence of tokens."""

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from octavo.core.sampling import SamplingParams

if TYPE_CHECKING:
    from octavo.scheduler.groups import BeamGroup


class State(Enum):
    """Where a request is. WAITING → RUNNING → FINISHED, with RUNNING → WAITING at a preemption."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: fixed facts, then the moving ones, which only the Scheduler writes.

    The catch-up rule: a step computes some of ``tokens[num_computed:]`` (and of ``draft``); when nothing is left to
    compute, the step samples. Prefill, decode, chunking, a resumption and a cache hit are all this one rule.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    max_total: int  # prompt + output tokens at most: min(prompt + max_tokens, max_model_len)
    eos_ids: frozenset[int] = frozenset()  # the model's end tokens (also when ignore_eos: min_tokens bans them)
    seed: int = 0  # resolved: params.seed or one derived by the engine; unsigned 64 bits
    arrival: float = 0.0  # seconds, the engine's clock
    priority: int = 0  # smaller is more urgent (vLLM's sense)
    tenant: str = ""
    bad_words: tuple[tuple[int, ...], ...] = ()  # tokenized params.bad_words
    cache_salt: str = ""  # only requests with the same one find each other's cached blocks
    adapter: str = ""  # likewise: another adapter computes other K and V
    fork_of: str = ""  # n > 1, beams: the first request of the same prompt, whose K and V of it this one takes over
    # moving, written by the Scheduler only
    order: int = 0  # place in arrival order, given by add() and kept through preemptions
    limit: int = 0  # prompt + output tokens at most, by the pool, too; given by add()
    group: "BeamGroup | None" = field(default=None, repr=False)  # beam search: those that it is scheduled with, as a whole
    tokens: list[int] = field(default_factory=list)  # prompt + output so far
    draft: list[int] = field(default_factory=list)  # proposed, not yet accepted
    num_computed: int = 0  # leading tokens whose K and V are in the cache
    num_scored: int = 0  # leading rows of the prompt whose prompt_logprobs are out already
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    block_keys: list[bytes] | None = None  # memo of its blocks' keys, extended by the KvManager; None: its blocks are not for others
    state: State = State.WAITING
    slot: int = -1  # the runner's place for it while RUNNING
    fresh: bool = False  # the runner must be told whom the slot is for
    idle: bool = False  # a beam that holds slot and blocks, and has nothing to compute until it takes over from another
    epoch: int = 0  # rises at each preemption, abort or take-over: older results are dropped
    preemptions: int = 0
    known: int = 0  # leading tokens that the runner is told; later ones it sampled itself
    ahead: int = 0  # tokens that planned steps will sample and that are not committed yet
    served: int = 0  # when it last had a part in a plan, as a number that rises with each part given

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.prompt)

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def num_pending(self) -> int:
        """Tokens that are known (or drafted, or about to be sampled) and not computed yet."""
        return 0 if self.idle else len(self.tokens) + self.ahead + len(self.draft) - self.num_computed

    @property
    def head(self) -> "Request":
        """Who stands for it in the queue and before the policy: itself, but for beams the first of their group."""
        return self if self.group is None else self.group.leader
