"""The laboratory: one loaded model, and any number of schedulers over it in turn.

An experiment compares *arms*: the same load on the same weights, kernels and KV memory, with one mechanism switched. Each run of an arm
has a scheduler and a KvManager of its own, so nothing is left in a cache by an earlier one. Arms take turns within each round (A B, B A, …),
all of a round get the same token ids, every round gets fresh ones, and the model is warm before the first. What is compared is the ratio
within a round.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from octavo.bench.timed import PlanTimes
from octavo.config import BLOCK_SIZE, Config
from octavo.core.request import Request
from octavo.engine import factory
from octavo.engine.core import EngineCore
from octavo.engine.report import Report
from octavo.engine.settings import make_config
from octavo.kv.manager import KvManager, Ledger
from octavo.kv.tier import SwapTier
from octavo.models import registry
from octavo.runner.tier import TierMemory
from octavo.scheduler.scheduler import AdmissionPredicate, Counters, Scheduler
from octavo.simulate.drive import Job, Record, drive
from octavo.weights import hub
from octavo.weights.checkpoint import open_checkpoint

EVERYTHING = 4096  # tokens: a budget that no prompt here exceeds
SEQS = 64
HISTORY = 16  # outputs that predicted admission wants to have seen
FIRST_ID = 3  # of the token ids that prompts are made of: those before are often special

T = TypeVar("T")
Observe = Callable[[float, Mapping[str, Record]], None]


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()

    def __call__(self) -> float:
        """The time."""
        return time.perf_counter() - self._zero

    def wait(self, until: float) -> None:
        """Sleep until then, if it is still to come."""
        time.sleep(max(0.0, until - self()))


@dataclass(slots=True)
class Averages:
    """What the KV ledger said over time. A ratio's average is that of what is above and of what is below, each summed over seconds."""

    seconds: float = 0.0
    slots: float = 0.0  # allocated token slots · seconds, and likewise
    unused: float = 0.0  # those without a token
    live: float = 0.0  # live blocks
    logical: float = 0.0  # blocks that the tables would take without sharing
    running: float = 0.0  # requests

    def add(self, seconds: float, ledger: Ledger, running: int) -> None:
        """It was so for some time."""
        self.seconds += seconds
        self.slots += seconds * ledger.live_slots
        self.unused += seconds * ledger.reserved_slots
        self.live += seconds * ledger.live
        self.logical += seconds * ledger.logical
        self.running += seconds * running

    @property
    def utilization(self) -> float:
        """Live tokens / allocated token slots."""
        return 1 - self.unused / self.slots

    @property
    def unique(self) -> float:
        """Blocks / blocks without sharing."""
        return self.live / self.logical

    @property
    def resident(self) -> float:
        """Requests that run at once."""
        return self.running / self.seconds


@dataclass(frozen=True, slots=True)
class Run:
    """One load, served. ``counters``: of this run alone."""

    records: list[Record]
    seconds: float
    counters: Counters
    averages: Averages
    times: PlanTimes

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second, from the first arrival to the last end."""
        return sum(len(record.ids) for record in self.records) / self.seconds


class Arm:
    """An engine core of its own over the lab's model, for one run."""

    def __init__(self, scheduler: Scheduler, core: EngineCore, clock: Clock) -> None:
        self.scheduler = scheduler
        self.core = core
        self.clock = clock

    def run(self, jobs: Sequence[Job], make: Callable[[str, Job], Request] | None = None, observe: Observe | None = None) -> Run:
        """Serve a load whose arrivals are seconds from now. ``make`` and ``observe``: as drive() takes them."""
        began = self.clock()
        if began:
            jobs = [replace(job, arrival=job.arrival + began) for job in jobs]
        averages, times, before = Averages(), PlanTimes(self.scheduler), asdict(self.core.counters)
        last = began

        def measure(now: float, records: Mapping[str, Record]) -> None:
            nonlocal last
            averages.add(now - last, self.scheduler.kv.ledger(), len(self.scheduler.running))
            last = now
            for each in [r for r in self.scheduler.running if records[r.id].job.most is not None and r.num_output >= records[r.id].job.output]:
                self.core.abort(each.id)  # it has found its end, as at a stop string
            if observe is not None:
                observe(now, records)

        with times:
            records = drive(self.core, jobs, make or request, self.clock, self.clock.wait, observe=measure)
        seconds = self.clock() - began
        counted = {name: value - before[name] for name, value in asdict(self.core.counters).items()}
        return Run(records, seconds, Counters(**counted), averages, times)

    def learn(self, lab: "Lab", outputs: Sequence[int], most: int) -> None:
        """Serve some short prompts, so that predicted admission knows how long outputs are before anything is measured."""
        self.run(jobs_of(lab, random.Random("learn"), [(BLOCK_SIZE, output) for output in outputs], most=most))


class Lab:
    """A loaded model and how thorough to be. ``quick`` asks an experiment for a load of some seconds. ``tell`` hears of progress, a line each.

    Raises: ConfigError, CheckpointError, UnsupportedError.
    """

    def __init__(self, model: str, *, repeats: int = 5, quick: bool = False, num_threads: int | None = None, dtype: str = "auto",
                 report: Report, tell: Callable[[str], None] = lambda text: None) -> None:
        self.repeats = repeats
        self.quick = quick
        self.tell = tell
        wanted = make_config(model, num_threads=num_threads, dtype=dtype, max_num_seqs=SEQS, max_num_batched_tokens=EVERYTHING)
        with open_checkpoint(hub.resolve(wanted.model.model, None, report.progress)) as checkpoint:
            self._side = factory.build_core(wanted, checkpoint, registry.read_spec(checkpoint), report)
        self._runner: Any = self._side.core.executor
        self._run = 0

    def close(self) -> None:
        """Give up weights and KV memory."""
        self._side.core.shutdown()

    @property
    def config(self) -> Config:
        """The settings that the model was loaded with; arms vary those of the scheduler and the pool's size, downwards."""
        return self._side.config

    @property
    def context(self) -> int:
        """Tokens of prompt and output together, at most."""
        return self._side.config.scheduler.max_model_len

    @property
    def num_kv_blocks(self) -> int:
        """Blocks of the KV memory: the most that an arm's pool may have."""
        assert self._side.config.kv.num_kv_blocks is not None
        return self._side.config.kv.num_kv_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block."""
        return self._side.ledger.kv // self.num_kv_blocks

    @property
    def tokens_shared(self) -> int:
        """Tokens of context that a sequence read together with others instead of for itself, so far."""
        return int(self._runner.program.tokens_shared)

    def arm(
        self, *, kv: KvManager | None = None, num_kv_blocks: int | None = None, prefix_caching: bool = True, tier: TierMemory | None = None,
        predicates: Sequence[AdmissionPredicate] = (), **settings: Any,
    ) -> Arm:
        """A fresh engine. ``kv`` instead of a pool of its own with ``num_kv_blocks``; ``tier``: memory for swapped blocks,
        the caller's to close; ``predicates``: of admission; ``settings`` are SchedulerConfig's."""
        config = replace(self._side.config.scheduler, **{"max_num_batched_tokens": 512, **settings})
        kv = kv or KvManager(num_kv_blocks or self.num_kv_blocks, prefix_caching=prefix_caching)
        assert kv.pool.num_blocks <= self.num_kv_blocks and config.max_num_batched_tokens <= EVERYTHING and config.max_num_seqs <= SEQS
        clock, runner = Clock(), self._runner
        runner.tier = tier
        slots, seconds = (None, 0.0) if tier is None else (SwapTier(tier.num_slots), runner.seconds_per_move())
        scheduler = Scheduler(config, kv, admission=predicates, tier=slots, block_seconds=seconds)
        return Arm(scheduler, EngineCore(scheduler, runner, clock), clock)

    def ids(self, draw: random.Random, count: int) -> list[int]:
        """Token ids for a prompt."""
        return draw.choices(range(FIRST_ID, self._side.spec.vocab), k=count)

    def rounds(self, arms: Mapping[str, Callable[[random.Random], T]], repeats: int | None = None) -> dict[str, list[T]]:
        """Run all arms ``repeats`` times, in turns. All arms of a round get equal generators, those of another round others."""
        found: dict[str, list[T]] = {name: [] for name in arms}
        repeats = self.repeats if repeats is None else repeats
        for number in range(repeats):
            took = []
            for name in reversed(arms) if number % 2 else arms:
                began = time.perf_counter()
                found[name].append(arms[name](random.Random(f"{self._run}.{number}")))
                took.append(f"{name} {time.perf_counter() - began:.1f} s")
            self.tell(f"round {number + 1} of {repeats}: {', '.join(took)}")
        self._run += 1
        return found

    def warm_up(self) -> float:
        """Touch weights, buffers and KV memory, and let the processor come to its pace. Returns output tokens a second with eight sequences."""
        run = self.arm().run(jobs_of(self, random.Random("warm-up"), [(64, 16)] * 8))
        return run.tokens_per_second


def request(name: str, job: Job) -> Request:
    """A job's request. No token id ends it, so it ends after exactly its output; if it asks for more (``most``), Arm.run ends it there."""
    return Request(
        name, list(job.prompt), job.params, len(job.prompt) + (job.output if job.most is None else job.most), seed=job.params.seed or 0,
        arrival=job.arrival, priority=job.priority, tenant=job.tenant,
    )


def jobs_of(lab: Lab, draw: random.Random, lengths: Sequence[tuple[int, int]], **more: Any) -> list[Job]:
    """Jobs that arrive at once, with fresh prompts. ``lengths``: tokens in and out of each."""
    return [Job(0.0, lab.ids(draw, tokens_in), tokens_out, **more) for tokens_in, tokens_out in lengths]


def lognormal(count: int, mean_in: float, mean_out: float, *, sigma: float = 0.8, most_in: int = 1024, most_out: int = 512,
              seed: int = 0) -> list[tuple[int, int]]:
    """Lengths in and out as chats have them: most short, some long. ``mean_…`` is the logarithm's; the same for every round and run."""
    draw = random.Random(seed)
    return [
        (min(max(int(draw.lognormvariate(mean_in, sigma)), 16), most_in), min(max(int(draw.lognormvariate(mean_out, sigma)), 8), most_out))
        for _ in range(count)
    ]

