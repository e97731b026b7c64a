"""Runner: executes a StepPlan. Decides nothing: it fills arrays, runs the program and hands the tokens back."""

import time
from collections.abc import Callable
from typing import Any

from octavo.core.output import LogprobRow
from octavo.core.step import COPY, IN, OUT, Move, PlanItem, SlotResult, StepPlan, StepResult
from octavo.ops.table import KvStore, Program
from octavo.runner.batch import Batch, Rows
from octavo.runner.slots import Slots
from octavo.runner.tier import TierMemory

PROBES = 4  # blocks that are moved at start to see how long that takes
Bind = Callable[[Batch, Slots], Program]


class Runner:
    """One model, one KV store, one set of slots: the Executor of an engine in this process."""

    def __init__(self, bind: Bind, *, kv: KvStore | None, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int,
                 max_logprobs: int, vocab: int, block_size: int, tier: TierMemory | None = None) -> None:
        """``bind`` gives the program over the arrays of the batch and the slots. ``kv``: whose blocks the plans name; ``tier``:
        where they may be moved."""
        self.slots = Slots(max_num_seqs, -(-max_model_len // block_size), vocab)
        self.batch = Batch(max_tokens=max_num_batched_tokens, max_seqs=max_num_seqs, max_logprobs=max_logprobs, vocab=vocab, block_size=block_size)
        self._kv = kv
        self.tier = tier
        self._program: Program | None = bind(self.batch, self.slots)

    @property
    def program(self) -> Program:
        """What runs, for measuring. Raises: RuntimeError after shutdown."""
        if self._program is None:
            raise RuntimeError("the runner was shut down")
        return self._program

    @property
    def program_bytes(self) -> int | None:
        """What the program's buffers take; None where the backend does not count them."""
        return getattr(self._program, "activation_bytes", None)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step.

        Raises: ValueError when the plan contradicts the slots; RuntimeError after shutdown.
        """
        program = self.program
        began = time.perf_counter()
        slots = self.slots
        for slot in plan.freed:
            slots.free(slot)
        for item in plan.items:
            if item.init is not None:
                slots.init(item)
            if item.new_blocks:
                slots.extend(item.slot, item.new_blocks)
        swap_seconds, failed, why = self._move(plan.moves) if plan.moves else (0.0, [], "")
        results: list[SlotResult] = []
        if plan.items:
            rows = self.batch.fill(plan.items, slots)
            program.run()
            results = self._collect(plan.items, rows)
        return StepResult(plan.number, results, time.perf_counter() - began, swap_seconds, failed, why)

    def seconds_per_move(self) -> float:
        """What moving a block out or in takes, tried with a few before the first step. Raises: OSError."""
        assert self._kv is not None and self.tier is not None
        blocks = range(min(PROBES, self._kv.num_blocks, self.tier.num_slots))
        moves = [Move(kind, place, place) for place in blocks for kind in (OUT, IN)]
        self._move(moves)  # the first time commits memory
        seconds, _, why = self._move(moves)
        if why:
            raise OSError(why)
        return seconds / len(moves)

    def shutdown(self) -> None:
        """Let go of the program, the weights behind it, the KV memory and the swap tier. May be called twice."""
        program, self._program, self._kv = self._program, None, None
        tier, self.tier = self.tier, None
        if tier is not None:
            tier.close()
        close: Any = getattr(program, "close", None)
        if close is not None:
            close()

    def _move(self, moves: list[Move]) -> tuple[float, list[int], str]:
        """Move blocks, strictly in this order. Returns the seconds of moves out and in, the places of those that failed, and why.

        Raises: ValueError without the memory that they name.
        """
        kv, tier = self._kv, self.tier
        if kv is None or (tier is None and any(move.kind != COPY for move in moves)):
            raise ValueError("the plan moves blocks, and this runner has no KV store, or no tier, to move them")
        seconds, failed, why = 0.0, [], ""
        for place, move in enumerate(moves):
            if move.kind == COPY or tier is None:
                kv.copy_block(move.source, move.target)
                continue
            began = time.perf_counter()
            try:
                if move.kind == OUT:
                    tier.write(move.target, kv.read_block(move.source))
                else:
                    kv.write_block(move.target, tier.read(move.source))
            except OSError as error:
                failed.append(place)
                why = why or f"a block could not be moved {move.kind}: {error}"
            seconds += time.perf_counter() - began
        return seconds, failed, why

    def _collect(self, items: list[PlanItem], rows: Rows) -> list[SlotResult]:
        """Read the outputs and note the new tokens in the slots."""
        out, top, sampling = self.batch.out_token, self.slots.top, iter(rows.sampling)
        results = []
        for i, item in enumerate(items):
            tokens: list[int] = []
            logprobs = prompt_logprobs = None
            if item.sample:
                row = next(sampling)
                token = out[row]
                tokens = [token]
                # A broken row's request ends with this step; a plan that was made before is still to find a token in its slot.
                self.slots.advance(item.slot, max(token, 0))
                if token >= 0 and top[item.slot] >= 0:
                    logprobs = self._logprobs(row, row + 1)
            if i in rows.scored:
                prompt_logprobs = self._logprobs(*rows.scored[i])
            if broken := _first_broken(tokens, prompt_logprobs, item):
                results.append(SlotResult(item.slot, item.epoch, error=broken))
                continue
            results.append(SlotResult(item.slot, item.epoch, tokens, logprobs, prompt_logprobs))
        return results

    def _logprobs(self, first: int, end: int) -> list[LogprobRow]:
        """The log-probability rows of head rows [first, end)."""
        a = self.batch.arrays
        rows = zip(range(first, end), *(a[name][first:end].tolist() for name in ("out_token", "out_logprob", "out_rank", "row_top")))
        return [
            LogprobRow(token, logprob, rank, a["top_ids"][row, :top].tolist(), a["top_logprobs"][row, :top].tolist())
            for row, token, logprob, rank, top in rows
        ]


def _first_broken(tokens: list[int], scored: list[LogprobRow] | None, item: PlanItem) -> str | None:
    """What to tell of an item with a row whose logits are no numbers; None when it has none."""
    places = [item.score_from + place + 1 for place, row in enumerate(scored or ()) if row.token < 0]
    if tokens and tokens[0] < 0:
        places.append(item.start + len(item.tokens))
    if not places:
        return None
    return f"the model's logits for the token at position {places[0]} are no numbers (NaN or infinite): it cannot go on from this text"
