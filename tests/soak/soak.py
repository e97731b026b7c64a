"""Many streams, a third of whose clients leave at random, against one server: nothing lost or mixed up, every block back, /health quick,
memory flat.

By hand, for minutes: ``python tests/soak/soak.py --seconds 120 --model smollm2``. A short version is a test (test_soak.py).
"""

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.serve_client import Job, Result, drive, text_of
from octavo.bench.server import Server

PROMPTS = 24
FILL = 70  # streams at the start
MiB = 2**20


@dataclass
class Told:
    """What the run found."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # streams whose text is not the one that their prompt has alone
    health: list[float] = field(default_factory=list)  # seconds; a failed probe counts as infinite
    rss: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)  # at the end, once quiet
    quiet_after: float = 0.0  # seconds from the last stream's end until all blocks were back

    def growth(self, process: str) -> float:
        """Bytes from a tenth of the run to its end, in MB."""
        seconds = self.rss[-1][0]
        early = next(rss for at, rss in self.rss if at >= seconds / 10)
        return (self.rss[-1][1][process] - early[process]) / 1e6

    def _tenths(self) -> list[dict[str, int]]:
        return [next(rss for at, rss in self.rss if at >= self.rss[-1][0] * tenth / 10) for tenth in range(11)]

    def lines(self) -> list[str]:
        """The findings, for people."""
        health = sorted(self.health)
        tenths = ", ".join(f"{rss['engine'] / 1e6:.0f}" for rss in self._tenths())
        return [
            f"streams    {', '.join(f'{count} {end}' for end, count in sorted(self.ends.items()))}; {len(self.wrong)} with a wrong text",
            f"/health    {len(health)} probes, median {1e3 * statistics.median(health):.1f} ms, P99 {1e3 * quantile(health, .99):.1f} ms, "
            f"longest {1e3 * health[-1]:.1f} ms",
            f"memory     API {self.growth('api'):+.1f} MB, engine {self.growth('engine'):+.1f} MB from a tenth of the run to its end "
            f"(engine by tenths: {tenths} MB)",
            f"at the end running {self.metrics['num_requests_running']:.0f}, waiting {self.metrics['num_requests_waiting']:.0f}, KV use "
            f"{self.metrics['kv_cache_usage_perc']:.4f} after {self.quiet_after:.2f} s; preemptions {self.metrics['num_preemptions_total']:.0f}",
        ]


def quantile(ordered: list[float], part: float) -> float:
    """The value that ``part`` of the ordered ones do not exceed."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def soak(server: Server, *, clients: int, seconds: float, longest: int, seed: int = 0) -> Told:
    """Keep ``clients`` streams open for ``seconds``, then let them finish. Answers have up to ``longest`` tokens."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, 250) for _ in range(draw.choice((4, 15, 16, 17, 60, 200)))] for _ in range(PROMPTS)]
    alone = {result.key[0]: text_of(result) for result in drive(server.url, [_job(prompts, place, longest, None) for place in range(PROMPTS)], 8)}
    assert len(set(alone.values())) > PROMPTS // 2, "the prompts' answers do not tell them apart"
    fill = [[draw.randrange(3, 250) for _ in range(200)]]  # touches the pool's memory: 17 blocks each, all at once
    assert all(result.end == "done" for result in drive(server.url, [_job(fill, 0, 64, None)] * FILL, FILL))
    told, began = Told(), time.monotonic()
    before = server.metrics()
    probe = subprocess.Popen([sys.executable, __file__, "--probe", server.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def jobs() -> Iterator[Job]:
        while time.monotonic() - began < seconds:
            place, tokens = draw.randrange(PROMPTS), draw.randint(1, longest)
            yield _job(prompts, place, tokens, draw.choice((0, 1, draw.randint(1, tokens))) if draw.random() < 1 / 3 else None)

    try:
        for result in drive(server.url, jobs(), clients):
            told.ends[result.end if result.status in (0, 200) else f"status {result.status}"] += 1
            _check(result, alone, told)
            at = time.monotonic() - began
            if not told.rss or at - told.rss[-1][0] > 0.25:
                told.rss.append((at, server.rss()))
        ended = time.monotonic()
        deadline = ended + 10
        while True:
            told.metrics = server.metrics()
            if not (told.metrics["num_requests_running"] or told.metrics["num_requests_waiting"] or told.metrics["kv_cache_usage_perc"]):
                break
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        told.quiet_after = time.monotonic() - ended
        told.rss.append((time.monotonic() - began, server.rss()))
    finally:
        out, _ = probe.communicate("")
    told.health = json.loads(out)
    told.metrics |= {"ended": told.metrics["request_success_total"] - before["request_success_total"]}
    return told


def _job(prompts: list[list[int]], place: int, tokens: int, drop_after: int | None) -> Job:
    body = {"model": "m", "prompt": prompts[place], "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    return Job([place, tokens], "/v1/completions", body, drop_after)


def _check(result: Result, alone: dict[int, str], told: Told) -> None:
    place, _ = result.key
    if result.end == "broken" or result.status not in (0, 200):
        told.wrong.append(f"{result.key}: {result.end}, status {result.status}, {result.events[-1:]}")
        return
    text = text_of(result)
    # What is cut off in the middle of a character ends in U+FFFD; alone it went on.
    if not alone[place].startswith(text.rstrip("\ufffd")):
        told.wrong.append(f"{result.key}: {text!r} is no beginning of {alone[place]!r}")
    if result.end == "done" and not any(choice.get("finish_reason") == "length" for event in result.events for choice in _choices(event)):
        told.wrong.append(f"{result.key}: no finish_reason length")


def _choices(event: str) -> list[Any]:
    return json.loads(event).get("choices", [])


def probe(url: str) -> None:
    """Ask /health on new connections, fifty times a second, until standard input ends; write the latencies."""
    import select

    server = object.__new__(Server)
    server.url = url
    found = []
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        began = time.monotonic()
        status = 0
        with contextlib.suppress(OSError):
            status, _ = server.request("GET", "/health", seconds=10)
        found.append(time.monotonic() - began if status == 200 else float("inf"))
    sys.stdout.write(json.dumps(found))


def main() -> None:
    """The long version: everything that issue 3 asks for is judged; the exit status says whether it held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--longest", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--probe", metavar="URL", help=argparse.SUPPRESS)
    args, settings = parser.parse_known_args()
    # A pool that is filled at the start: KV memory is committed when it is first used, and a peak that comes late looks like a leak.
    settings = settings or ["--num-kv-blocks", "800"]
    if args.probe:
        probe(args.probe)
        return
    with Server(args.model, "--served-model-name", "m", *settings) as server:
        told = soak(server, clients=args.clients, seconds=args.seconds, longest=args.longest)
        status = server.stop()
    print("\n".join(told.lines()), f"exit       {status}", *told.wrong[:5], sep="\n")
    health = sorted(told.health)
    held = {
        "nothing lost or mixed up": not told.wrong, "all blocks back": told.metrics["kv_cache_usage_perc"] == 0,
        "/health P99 under 50 ms": quantile(health, .99) < .05, "/health never over 500 ms": health[-1] < .5,
        "memory flat to 5 MB": max(told.growth("api"), told.growth("engine")) <= 5, "exit status 0": status == 0,
    }
    for what, well in held.items():
        print(f"{'held  ' if well else 'BROKEN'}     {what}")
    sys.exit(not all(held.values()))


if __name__ == "__main__":
    main()
