"""A loaded model under measurement: requests through LLM, as users make them; steps watched from outside."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from octavo import LLM, SamplingParams
from octavo.bench import result
from octavo.bench.ceilings import Ceilings, Probe
from octavo.bench.steps import Step, Watched, Work, floor_seconds
from octavo.bench.workloads import Load
from octavo.core.step import StepPlan
from octavo.engine import factory
from octavo.engine.report import Report
from octavo.engine.settings import make_config
from octavo.errors import WorkerDied
from octavo.models import registry
from octavo.ops.threads import allowed_threads
from octavo.weights import hub
from octavo.weights.checkpoint import open_checkpoint

BUSY = 0.5  # of a core: a higher load is somebody's


@dataclass(frozen=True, slots=True)
class Run:
    """One load, served. Times in seconds; ``began`` and the steps' ends are of one clock."""

    load: Load
    began: float
    seconds: float
    steps: list[Step]
    profiled: list[tuple[StepPlan, list[float]]]

    @property
    def decode(self) -> list[tuple[float, float]]:
        """The steps in which everybody decodes, behind another step: time since that one's end, and inside the native call."""
        return [(step.ended - last.ended, step.native) for last, step in zip(self.steps, self.steps[1:]) if step.decode]

    @property
    def first_token(self) -> float:
        """Seconds to the end of the first step that samples for the last of the prompts."""
        waiting = len(self.load.prompts)
        for step in self.steps:
            waiting -= sum(item.sample and len(item.tokens) > 1 for item in step.plan.items)
            if waiting <= 0:
                return step.ended - self.began
        return self.seconds


@dataclass(frozen=True, slots=True)
class Limits:
    """What a load has to fit."""

    context: int  # tokens
    max_num_seqs: int
    max_num_batched_tokens: int


def limits(model: str, settings: dict[str, Any], report: Report) -> Limits:
    """The limits as they are known before the weights are read; a small KV pool may leave less of the context. Raises: as LLM does."""
    config = make_config(model, **settings)
    with open_checkpoint(hub.resolve(config.model.model, config.model.revision, report.progress)) as checkpoint:
        context = factory.context_asked(config, registry.read_spec(checkpoint))
    return Limits(context, config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens)


class Rig:
    """LLM(model, **settings) with ceilings and watched steps. A context manager. Raises: as LLM does."""

    def __init__(self, model: str, settings: dict[str, Any], report: Report) -> None:
        load = os.getloadavg()[0]
        self.llm = LLM(model, report=report, **settings)
        if words := busy(load, allowed_threads()):
            tell(words)
        engine = self.llm.engine
        self._runner: Any = engine.core.executor
        config = self.llm.config
        self.limits = Limits(self.llm.max_model_len, config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens)
        self.native = config.runner.backend == "native"
        self.probe = Probe(config.runner.num_threads, engine.isa) if self.native else None
        blocks = config.kv.num_kv_blocks or 1
        kv_token = engine.ledger.kv // (blocks * config.kv.block_size)
        self.work = Work(self._runner.program.ops, engine.spec, kv_token) if self.native else None
        self.weight_bytes = engine.ledger.weights

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.llm.shutdown()

    def run(self, load: Load, profile: Callable[[StepPlan], bool] | None = None) -> Run:
        """Serve a load: greedy, to the last token asked for. ``profile``: whether to measure the ops of a plan. Raises: WorkerDied."""
        watched = Watched(self._runner, profile if self.native else None)
        core = self.llm.engine.core
        prompts = [{"prompt_token_ids": prompt} for prompt in load.prompts]
        params = [SamplingParams(max_tokens=out, temperature=0.0, ignore_eos=True) for out in load.outs]
        core.executor = watched
        try:
            began = time.perf_counter()
            outs = self.llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
        finally:
            core.executor = self._runner
        short = [out for out, wanted in zip(outs, load.outs) if len(out.outputs[0].token_ids) != wanted]
        if short:
            first = short[0].outputs[0]
            raise WorkerDied(f"{len(short)} of {len(outs)} requests ended early: {first.finish_reason}, {first.stop_reason}")
        return Run(load, began, seconds, watched.steps, watched.profiled)

    def sample_ceilings(self) -> None:
        """Measure the machine once more."""
        if self.probe is not None:
            self.probe.sample()

    def ceilings(self) -> Ceilings | None:
        """Medians of the samples; None where the kernels are not the native ones."""
        return self.probe.ceilings() if self.probe is not None else None

    def floor(self, run: Run, ceilings: Ceilings | None) -> float | None:
        """The least seconds that the steps of a run take here."""
        return floor_seconds(run.steps, self.work, ceilings) if self.work is not None and ceilings is not None else None

    def head(self, benchmark: str) -> dict[str, Any]:
        """The head of a result, with what was measured of the machine."""
        ceilings = self.ceilings()
        measured = None if ceilings is None else {
            "read_bytes_per_second": ceilings.bytes_per_second, "operations_per_second": ceilings.operations_per_second,
            "codes_per_second": ceilings.codes_per_second, "few_bits_per_second": ceilings.few_bits_per_second}
        return {"benchmark": benchmark, **result.head(self.llm.config), "weight_bytes": self.weight_bytes, "ceilings": measured}


def tell(text: str) -> None:
    """A line of progress, for whoever watches."""
    sys.stderr.write(f"  {text}\n")
    sys.stderr.flush()


def busy(load: float, threads: int) -> str:
    """What to say of a machine whose load, before anything was measured, is that of others; nothing when it is quiet."""
    if load <= BUSY * threads:
        return ""
    return f"the machine is busy: a load of {load:.1f} on {threads} cores before this began. Its figures, ceilings too, are worth little"


def ceilings_line(ceilings: Ceilings | None) -> str:
    """The ceilings in words."""
    if ceilings is None:
        return "No ceilings: they are of the native kernels.\n"
    return (f"Ceilings in this process, all threads (medians): reading {ceilings.bytes_per_second / 1e9:.1f} GB/s, "
            f"products in registers {ceilings.operations_per_second / 1e9:.0f} GFLOP/s, "
            f"of codes of 8 bits {ceilings.codes_per_second / 1e9:.0f} Gop/s, of fewer {ceilings.few_bits_per_second / 1e9:.0f}.\n")
