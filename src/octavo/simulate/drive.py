"""Runs a load through an engine core: ``drive`` on any executor and clock, ``simulate`` with the real scheduler in virtual time.

What a policy does to whom is seen in milliseconds of computing: ``simulate`` has no tensor, no token that means anything and no check of
plans (that is SimExecutor's), only lengths and times. The benches drive the same loads through a real runner.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.config import SchedulerConfig
from octavo.core.output import LogprobRow
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.core.step import COPY, PlanItem, SlotInit, SlotResult, StepPlan, StepResult
from octavo.engine.core import EngineCore
from octavo.kv.manager import KvManager
from octavo.kv.tier import SwapTier
from octavo.observe.events import Admitted, Event, Preempted
from octavo.scheduler.scheduler import Counters, Scheduler
from octavo.simulate.executor import VirtualClock

END = 0  # the token that ends an output
WORD = 1  # any other
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a load. ``output``: the tokens after which it ends by itself; ``most``: what it asks for at most."""

    arrival: float  # seconds
    prompt: Sequence[int]
    output: int
    tenant: str = ""
    priority: int = 0
    most: int | None = None  # None: exactly its output
    params: SamplingParams = GREEDY  # how a real runner is to sample; simulated ones do not


@dataclass(slots=True)
class Record:
    """What became of a job. Times are of the clock that it was driven by, in seconds."""

    job: Job
    admitted: float | None = None  # for the first time
    tokens: list[float] = field(default_factory=list)  # when each came
    ids: list[int] = field(default_factory=list)  # which came
    logprobs: list[LogprobRow] = field(default_factory=list)  # where asked for
    finish_reason: str | None = None
    preemptions: int = 0
    cached: int = 0  # prompt tokens found in the prefix cache at the first admission

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        return self.tokens[0] - self.job.arrival

    @property
    def gaps(self) -> list[float]:
        """Seconds between its tokens."""
        return [after - before for before, after in zip(self.tokens, self.tokens[1:])]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A load's records, in the order of the jobs given, and what the engine counted."""

    records: list[Record]
    counters: Counters
    seconds: float  # until everything had ended

    def of(self, tenant: str) -> list[Record]:
        """One tenant's records."""
        return [record for record in self.records if record.job.tenant == tenant]


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds of a step: ``fixed`` + ``token`` for each of its tokens + ``context`` for each token that an item looks back on."""

    fixed: float
    token: float
    context: float = 0.0

    def __call__(self, plan: StepPlan) -> float:
        """The plan's."""
        return self.fixed + self.token * plan.num_tokens + self.context * sum(item.start for item in plan.items)


class LengthsExecutor:
    """Ends each output at its length, and lets the clock pass: a step's ``cost``, and ``block_seconds`` for each block that is
    moved out or in. Implements engine.executor.Executor."""

    def __init__(self, lengths: dict[str, int], clock: VirtualClock, cost: Callable[[StepPlan], float], block_seconds: float = 0.0) -> None:
        self._lengths = lengths
        self._clock = clock
        self._cost = cost
        self._block_seconds = block_seconds
        self._slots: dict[int, SlotInit] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """Take the time that the plan costs."""
        for item in plan.items:
            if item.init is not None:
                self._slots[item.slot] = item.init
        swap = self._block_seconds * sum(move.kind != COPY for move in plan.moves)
        seconds = swap + self._cost(plan)
        self._clock.advance(seconds)
        return StepResult(plan.number, [SlotResult(i.slot, i.epoch, [self._token(i)] if i.sample else []) for i in plan.items], seconds, swap)

    def shutdown(self) -> None:
        """Nothing is held."""

    def _token(self, item: PlanItem) -> int:
        init = self._slots[item.slot]
        number = item.start + len(item.tokens) - init.prompt_len + 1
        return END if number >= self._lengths[init.request_id] else WORD


def simulate(
    jobs: Sequence[Job], config: SchedulerConfig, kv: KvManager, cost: Callable[[StepPlan], float], *,
    observe: Callable[[Scheduler, float], None] | None = None, tier: SwapTier | None = None, block_seconds: float = 0.0,
) -> Outcome:
    """Serve a load from its first arrival to its last end. ``observe`` sees scheduler and time after each step. ``tier``: where
    victims' blocks may go, at ``block_seconds`` for each move.

    Raises: WorkerDied, AssertionError when the engine stops getting on.
    """
    clock = VirtualClock()
    executor = LengthsExecutor({_name(place): job.output for place, job in enumerate(jobs)}, clock, cost, block_seconds)
    scheduler = Scheduler(config, kv, tier=tier, block_seconds=block_seconds)
    core = EngineCore(scheduler, executor, clock)
    records = drive(core, jobs, _request, clock, clock.wait, observe=None if observe is None else lambda now, _: observe(scheduler, now))
    return Outcome(records, core.counters, clock.now)


def drive(
    core: EngineCore, jobs: Sequence[Job], make: Callable[[str, Job], Request], clock: Callable[[], float], wait: Callable[[float], None], *,
    observe: Callable[[float, Mapping[str, Record]], None] | None = None,
) -> list[Record]:
    """Serve a load from its first arrival to its last end. Returns the records in the order of the jobs.

    ``make`` gives a job's request under an id, ``clock`` the time of the core's clock in seconds, ``wait`` passes it until a time.
    ``observe`` is told the time after each step, and the records by request id; it may abort requests.

    Raises: WorkerDied, AssertionError when the engine stops getting on.
    """
    records = {_name(place): Record(job) for place, job in enumerate(jobs)}

    def hear(event: Event, now: float) -> None:
        record = records.get(event.request_id)
        if isinstance(event, Admitted) and record is not None and record.admitted is None:
            record.admitted, record.cached = now, event.cached_tokens
        elif isinstance(event, Preempted) and record is not None:
            record.preemptions += 1

    coming = deque(sorted(records, key=lambda name: records[name].job.arrival))  # those of one moment in the order given
    core.observers.append(hear)
    try:
        while coming or core.has_work:
            if not core.has_work:
                wait(records[coming[0]].job.arrival)
            while coming and records[coming[0]].job.arrival <= clock():
                name = coming.popleft()
                core.add(make(name, records[name].job))
            if not core.has_work:
                continue  # a real clock may wake a little early
            steps = core.counters.steps
            deltas = core.step()
            now = clock()
            for delta in deltas:
                record = records[delta.request_id]
                record.tokens.extend([now] * len(delta.tokens))
                record.ids.extend(delta.tokens)
                record.logprobs.extend(delta.logprobs or ())
                record.finish_reason = delta.finish_reason
            assert deltas or core.counters.steps > steps, f"at {now} s nothing could be planned"
            if observe is not None:
                observe(now, records)
    finally:
        core.observers.remove(hear)
    return list(records.values())


def jain(shares: Iterable[float]) -> float:
    """Jain's index of fairness: 1 where all shares are equal, 1/n where one has everything. Source: Jain, Chiu & Hawe 1984."""
    values = list(shares)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def quantile(values: Iterable[float], part: float) -> float:
    """The smallest of the values that at least this part of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-part * len(ordered) // 1) - 1)]


def _name(place: int) -> str:
    return f"j{place}"


def _request(name: str, job: Job) -> Request:
    most = job.output if job.most is None else job.most
    return Request(
        name, list(job.prompt), SamplingParams(max_tokens=most), len(job.prompt) + most, frozenset([END]), arrival=job.arrival,
        priority=job.priority, tenant=job.tenant,
    )

