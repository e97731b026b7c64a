"""Thousands of requests of all kinds through one engine in this process: no block, slot or request is left behind, and memory stays flat.

By hand: ``python tests/soak/engine.py --requests 20000 --model DIR`` (any small model). A short version is a test, the long one is in `make matrix`.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams

WAVE = 50  # requests at once
EARLY = 0.1  # of the requests, after which memory must not grow
SETTINGS = {"num_kv_blocks": 40, "max_num_seqs": 32, "max_num_batched_tokens": 128, "max_model_len": 256, "scheduling_policy": "fair",
            "kv_swap_bytes": 2**20}
STOPS = ["e", "the", " ", "\n", "ab"]


@dataclass
class Told:
    """What the run found. Bytes of resident memory after a tenth of the requests and at the end."""

    ends: Counter[str] = field(default_factory=Counter)
    early: int = 0
    late: int = 0
    preemptions: int = 0
    swapped: int = 0  # blocks
    hits: int = 0
    seconds: float = 0.0

    @property
    def growth(self) -> float:
        """MB from a tenth of the requests to the end."""
        return (self.late - self.early) / 1e6

    def lines(self) -> str:
        """For people."""
        ends = ", ".join(f"{count:,} {end}" for end, count in sorted(self.ends.items()))
        return (f"ends        {ends}, in {self.seconds:.0f} s\n"
                f"preemptions {self.preemptions:,}, {self.swapped:,} blocks swapped; {self.hits:,} prompt tokens from the cache\n"
                f"memory      {self.early / 1e6:.1f} MB after a tenth, {self.late / 1e6:.1f} MB at the end: {self.growth:+.2f} MB")


def soak(llm: LLM, requests: int, seed: int = 0) -> Told:
    """Send requests in waves, streams that are read in part and dropped among them; look for leaks after each wave.

    Raises: AssertionError when something is left behind.
    """
    draw, told, began, sent = random.Random(seed), Told(), time.monotonic(), 0
    openings = [[draw.randrange(3, 250) for _ in range(48)] for _ in range(6)]
    while sent < requests:
        streams = [llm.stream(_prompt(draw, openings), _params(draw)) for _ in range(WAVE // 5)]
        for stream in streams:
            for _ in range(draw.randint(0, 3)):
                next(stream, None)
            if draw.random() < 0.5:
                stream.close()
                told.ends["dropped"] += 1
        prompts = [_prompt(draw, openings) for _ in range(WAVE - len(streams))]
        tenants = [f"tenant {draw.randrange(400)}" for _ in prompts]
        for out in llm.generate(prompts, [_params(draw) for _ in prompts], use_tqdm=False, tenant=tenants):
            told.ends.update(f"{sample.finish_reason}" for sample in out.outputs)
        for stream in streams:
            told.ends["streamed"] += bool(list(stream))
        sent += WAVE
        ledger, stats = llm.kv_ledger, llm.preemption_stats
        assert ledger.live == 0 and ledger.free + ledger.cached == ledger.total and not stats.tier_used, (ledger, stats)
        llm._running().scheduler.check()
        if not told.early and sent >= EARLY * requests:
            told.early = _resident()
    stats = llm.preemption_stats
    told.late, told.preemptions, told.swapped, told.hits = _resident(), stats.preemptions, stats.blocks_out, llm.prefix_cache_stats[1]
    told.seconds = time.monotonic() - began
    return told


def _prompt(draw: random.Random, openings: list[list[int]]) -> dict[str, Any]:
    length = draw.choice((1, 15, 16, 17, draw.randint(1, 90)))
    ids = [draw.randrange(3, 250) for _ in range(length)]
    if draw.random() < 0.5:
        ids = draw.choice(openings)[: draw.randint(8, 48)] + ids
    prompt: dict[str, Any] = {"prompt_token_ids": ids}
    if draw.random() < 0.3:
        prompt["cache_salt"] = draw.choice("abc")
    return prompt


def _params(draw: random.Random) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 1.0, "seed": draw.randrange(2**40)}, {"temperature": 0.8, "n": draw.randint(2, 4)},
        {"temperature": 1.0, "stop": draw.sample(STOPS, 2)}, {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3}, {"temperature": 1.0, "logit_bias": {7: 5.0}},
        {"temperature": 1.0, "bad_words": ["the"], "min_tokens": 1}, {"temperature": 1.0, "stop_token_ids": list(range(3, 40))},
        {"temperature": 0.0, "use_beam_search": True, "n": draw.randint(1, 2), "best_of": draw.randint(2, 4), "length_penalty": draw.random()},
    ]
    return SamplingParams(**{"max_tokens": draw.choice((1, 4, 12, 32)), "ignore_eos": draw.random() < 0.5} | draw.choice(kinds))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """The long version; the exit status says whether memory stayed flat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: a tiny random one")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--most", type=float, default=5.0, help="MB that memory may grow by")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a file, Python knows this folder only
            from tests.checkpoints import make_tiny

            args.model = str(make_tiny(folder))
        with LLM(args.model, **SETTINGS) as llm:
            told = soak(llm, args.requests)
    print(told.lines())
    sys.exit(told.growth > args.most)


if __name__ == "__main__":
    main()
