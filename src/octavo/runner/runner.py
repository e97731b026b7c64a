"""Runner: executes a StepPlan. Decides nothing: it fills arrays, runs the program and hands the tokens back."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from octavo.core.output import LogprobRow
from octavo.core.step import PlanItem, SlotResult, StepPlan, StepResult
from octavo.ops.table import KvStore, Program
from octavo.runner.batch import Batch, Rows
from octavo.runner.slots import Slots

Bind = Callable[[Batch, Slots], Program]


class Runner:
    """One model, one KV store, one set of slots: the Executor of an engine in this process."""

    def __init__(self, bind: Bind, *, kv: KvStore | None, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int,
                 max_logprobs: int, vocab: int, block_size: int) -> None:
        """``bind`` gives the program over the arrays of the batch and the slots. ``kv`` is only kept alive."""
        self.slots = Slots(max_num_seqs, -(-max_model_len // block_size), vocab)
        self.batch = Batch(max_tokens=max_num_batched_tokens, max_seqs=max_num_seqs, max_logprobs=max_logprobs, vocab=vocab, block_size=block_size)
        self._kv = kv
        self._program: Program | None = bind(self.batch, self.slots)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step.

        Raises: ValueError when the plan contradicts the slots; RuntimeError after shutdown.
        """
        if self._program is None:
            raise RuntimeError("the runner was shut down")
        began = time.perf_counter()
        slots = self.slots
        for slot in plan.freed:
            slots.free(slot)
        for item in plan.items:
            if item.init is not None:
                slots.init(item)
            if item.new_blocks:
                slots.extend(item.slot, item.new_blocks)
        results: list[SlotResult] = []
        if plan.items:
            rows = self.batch.fill(plan.items, slots)
            self._program.forward()
            if rows.num:
                self._program.sample()
            results = self._collect(plan.items, rows)
        return StepResult(number=plan.number, slots=results, seconds=time.perf_counter() - began)

    def shutdown(self) -> None:
        """Let go of the program, the weights behind it and the KV memory. May be called twice."""
        program, self._program, self._kv = self._program, None, None
        close: Any = getattr(program, "close", None)
        if close is not None:
            close()

    def _collect(self, items: list[PlanItem], rows: Rows) -> list[SlotResult]:
        """Read the outputs and note the new tokens in the slots."""
        sampled = self.batch.arrays["out_token"][rows.sampling]
        wants = self.batch.arrays["row_top"][rows.sampling].tolist()
        # After the raw results are read: penalties and masks of the next step see the token.
        self.slots.advance(rows.sampling_slots, sampled)
        tokens, places = iter(sampled.tolist()), iter(rows.sampling.tolist())
        wanted = iter(wants)
        results = []
        for i, item in enumerate(items):
            own: list[int] = []
            logprobs = None
            if item.sample:
                own, place = [next(tokens)], next(places)
                if next(wanted) >= 0:
                    logprobs = self._logprobs(place, place + 1)
            scored = rows.scored.get(i) if rows.scored else None
            prompt = self._logprobs(*scored) if scored is not None else None
            results.append(SlotResult(item.slot, item.epoch, own, logprobs, prompt))
        return results

    def _logprobs(self, first: int, end: int) -> list[LogprobRow]:
        """The log-probability rows of head rows [first, end)."""
        a = self.batch.arrays
        targets = a["row_target"][first:end]
        ids = np.where(targets < 0, a["out_token"][first:end], targets).tolist()
        rows = zip(range(first, end), ids, a["out_logprob"][first:end].tolist(), a["out_rank"][first:end].tolist(), a["row_top"][first:end].tolist())
        return [
            LogprobRow(token, logprob, rank, a["top_ids"][row, :top].tolist(), a["top_logprobs"][row, :top].tolist())
            for row, token, logprob, rank, top in rows
        ]
