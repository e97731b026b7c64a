"""A request has one answer: the same tokens and log-probabilities, to the bit, in any batch, chunking, cache state and pool.

Claim: elsewhere 1,000 repeats of a greedy request under load gave 80 different answers. Source: He et al. 2025, "Defeating Nondeterminism in LLM
Inference", Thinking Machines Lab.
Switched: requests at once, chunk, cold or warm prefix cache, a roomy pool or a tight one that recomputes or swaps, in all combinations.
Counted are the different answers of each request. What it costs cannot be switched off in one build: the order of every sum is part of the
kernels (decision 0002).
"""

import itertools
from random import Random
from typing import Any

from octavo.bench.lab import EVERYTHING, Lab
from octavo.bench.outcome import Outcome
from octavo.core.sampling import SamplingParams
from octavo.runner.tier import MemoryTier
from octavo.simulate.drive import Job, Record

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"temperature": 0.8, "seed": 11}, {"temperature": 1.0, "seed": 12, "top_k": 20},
    {"temperature": 1.2, "seed": 13, "top_p": 0.8}, {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.7, "seed": 14, "min_p": 0.05, "frequency_penalty": 0.4},
)
BATCHES, CHUNKS, CACHES, POOLS = (1, 4, 64), (32, 512, EVERYTHING), ("cold", "warm"), ("roomy", "tight", "swapping")


def run(lab: Lab) -> Outcome:
    """All cells once; a request's prompt is the same in each."""
    draw, count, out = Random(5), 6 if lab.quick else 12, 8 if lab.quick else 16
    kinds = [SamplingParams(**kind, ignore_eos=True, logprobs=1) for kind in KINDS]
    jobs = [Job(0.0, lab.ids(draw, draw.randint(17, 40 if lab.quick else 120)), out, params=kinds[place % len(kinds)]) for place in range(count)]
    largest = max(-(-(len(job.prompt) + out) // 16) for job in jobs)
    batches, chunks = ((1, 64), (32, EVERYTHING)) if lab.quick else (BATCHES, CHUNKS)
    answers: list[set[Any]] = [set() for _ in jobs]
    tier = MemoryTier(count * largest, lab.block_bytes)
    cells = hits = preempted = swapped = 0
    for batch, chunk, cache, pool in itertools.product(batches, chunks, CACHES, POOLS):
        arm = lab.arm(max_num_seqs=batch, max_num_batched_tokens=chunk, num_kv_blocks=None if pool == "roomy" else largest + 2,
                      **({"tier": tier, "preemption_mode": "swap"} if pool == "swapping" else {}))
        if cache == "warm":
            arm.run([Job(0.0, job.prompt, 1) for job in jobs])
        found = arm.run(jobs)
        for answer, record in zip(answers, found.records, strict=True):
            answer.add(_bits(record))
        hits += found.counters.cache_hits > 0
        preempted += found.counters.preemptions > 0
        swapped += found.counters.blocks_in > 0
        cells += 1
        lab.tell(f"cell {cells}: {batch} at once, chunks of {chunk}, cache {cache}, pool {pool}: {max(map(len, answers))} answers so far")
    most = max(map(len, answers))
    tier.close()
    assert hits and preempted and swapped, "no cell was hit, preempted or swapped: nothing would be shown"
    rows = [["combinations", str(cells)], ["of them with cache hits", str(hits)], ["of them with preemptions", str(preempted)],
            ["of these with swaps", str(swapped)], ["requests", str(count)], ["different answers of a request, at most", str(most)]]
    finding = (f"{count} requests, greedy and sampled, gave {most} answer{'s' if most > 1 else ''} each in {cells} combinations of batch, chunk, "
               f"cache and pool ({hits} with hits, {preempted} with preemptions, {swapped} of these with swaps): tokens and "
               "log-probabilities to the bit")
    return Outcome(finding, ["", ""], rows, {"answers": [len(answer) for answer in answers], "cells": cells, "hits": hits, "preempted": preempted,
                                             "swapped": swapped})


def _bits(record: Record) -> Any:
    """Whatever could differ; floats by their exact value."""
    assert record.finish_reason == "length"
    rows = record.logprobs
    return tuple(record.ids), tuple((r.token, r.logprob.hex(), r.rank, tuple(r.top_ids), tuple(map(float.hex, r.top_logprobs))) for r in rows)


def draw(figure: Any, data: dict[str, Any]) -> None:
    """A bar per request."""
    from octavo.bench.picture import COLOURS

    axes = figure.subplots()
    axes.bar(range(1, len(data["answers"]) + 1), data["answers"], color=COLOURS[0], width=0.62)
    axes.axhline(data["cells"], color=COLOURS[3], linewidth=1, linestyle="--")
    axes.annotate("one per combination", (1, data["cells"]), xytext=(0, 3), textcoords="offset points", color="#666666", fontsize=9)
    axes.set(xlabel="request", ylabel="different answers", ylim=(0, data["cells"] * 1.1), xticks=range(1, len(data["answers"]) + 1))
