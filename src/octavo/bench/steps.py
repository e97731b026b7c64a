"""Steps as they run: which plan, when it was done, how long the native call took, what each op took, and the least it could take."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.ceilings import Amount, Ceilings
from octavo.core.step import StepPlan, StepResult
from octavo.models.spec import ModelSpec
from octavo.ops.table import visible_pairs

TILE = 64  # rows that share one pass over the head's matrix


@dataclass(frozen=True, slots=True)
class Step:
    """One step. Times in seconds."""

    plan: StepPlan
    ended: float  # perf_counter
    native: float  # inside the native call; 0 where the backend does not tell

    @property
    def decode(self) -> bool:
        """Whether every sequence computes one token."""
        return all(len(item.tokens) == 1 for item in self.plan.items)


@dataclass(slots=True)
class OpTime:
    """All ops of one name in one step."""

    name: str
    seconds: float
    work: Amount


@dataclass(slots=True)
class Watched:
    """An executor around the runner, for as long as something is measured. ``profile`` says of a plan whether to measure each op."""

    runner: Any
    profile: Callable[[StepPlan], bool] | None = None
    steps: list[Step] = field(default_factory=list)
    profiled: list[tuple[StepPlan, list[float]]] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> StepResult:
        """As the runner does."""
        program = self.runner.program
        watched = self.profile is not None and bool(plan.items) and self.profile(plan)
        if watched:
            program.profile(True)
        before = getattr(program, "busy_seconds", 0.0)
        result: StepResult = self.runner.execute(plan)
        self.steps.append(Step(plan, time.perf_counter(), getattr(program, "busy_seconds", 0.0) - before))
        if watched:
            self.profiled.append((plan, program.profile(False)))
        return result

    def shutdown(self) -> None:
        """As the runner does."""
        self.runner.shutdown()


@dataclass(frozen=True, slots=True)
class Work:
    """What a step has to read and compute at least: weights once, K and V of each sequence once, all products."""

    ops: list[Any]  # of the program
    spec: ModelSpec
    kv_bytes_per_token: int

    def of(self, plan: StepPlan) -> Amount:
        """The amount of a step."""
        tokens, rows = plan.num_tokens, _head_rows(plan)
        return sum((self._op(op, tokens, rows) for op in self.ops), self._attention(plan))

    def by_name(self, plan: StepPlan, seconds: list[float]) -> list[OpTime]:
        """The measured times of one step, ops of one name together, in the order in which they first run."""
        tokens, rows = plan.num_tokens, _head_rows(plan)
        found: dict[str, OpTime] = {}
        for op, took in zip(self.ops, seconds, strict=True):
            each = found.setdefault(op.name, OpTime(op.name, 0.0, Amount()))
            each.seconds, each.work = each.seconds + took, each.work + self._op(op, tokens, rows)
        if "attention" in found:
            found["attention"].work = self._attention(plan)
        return list(found.values())

    def _op(self, op: Any, tokens: int, rows: int) -> Amount:
        count = tokens if op.rows == "T" else rows
        passes = tokens if op.name == "embed" else -(-rows // TILE) if op.rows == "tile" else min(count, 1)
        kind = "operations" if op.bits == 0 else "codes" if op.bits >= 8 else "few_bits"
        return Amount(op.weight_bytes * passes)._replace(**{kind: 2.0 * op.products * count})

    def _attention(self, plan: StepPlan) -> Amount:
        s, nbytes, operations = self.spec, 0.0, 0.0
        for item in plan.items:
            new, end = len(item.tokens), item.start + len(item.tokens)
            for window in s.windows:
                operations += 4.0 * s.head_dim * s.num_heads * visible_pairs(new, end, window)
                nbytes += (end if window is None else min(end, window + new - 1)) * self.kv_bytes_per_token / s.num_layers
        return Amount(nbytes, operations)


def _head_rows(plan: StepPlan) -> int:
    return sum(item.sample + max(0, item.score_to - item.score_from) for item in plan.items)


def floor_seconds(steps: Iterable[Step], work: Work, ceilings: Ceilings) -> float:
    """The least time that these steps take on a machine with these ceilings."""
    return sum(ceilings.floor(work.of(step.plan)) for step in steps)


def mean_profile(work: Work, profiled: Sequence[tuple[StepPlan, list[float]]]) -> list[OpTime]:
    """Times of ops, averaged over steps."""
    total: dict[str, OpTime] = {}
    for plan, seconds in profiled:
        for op in work.by_name(plan, seconds):
            each = total.setdefault(op.name, OpTime(op.name, 0.0, Amount()))
            each.seconds, each.work = each.seconds + op.seconds, each.work + op.work
    count = max(1, len(profiled))
    return [OpTime(op.name, op.seconds / count, op.work.divided(count)) for op in total.values()]
