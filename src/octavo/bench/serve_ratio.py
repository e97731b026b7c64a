"""How much of the offline throughput survives HTTP: ``python -m octavo.bench.serve_ratio MODEL``.

One run: the engine offline, then the server with as many streaming clients, the same requests, again and again in turn; only one of the
two computes at a time. The client is a process of its own, on the same cores.

What the server's metrics say about latency is compared with the client's clock, which starts when it sends a request (on a connection that it
has) and stops when it has read a token's event. Means are compared, since a histogram knows its sum exactly and its median to a bucket only;
of the runs' means, the median.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from octavo.bench.serve_client import Job, run, text_of, token_times
from octavo.bench.server import Server

OPENINGS = ("The history of", "A short story about", "How to repair", "What everybody should know about", "Three questions about",
            "A letter to a friend about", "The chemistry of", "Instructions for a beginner in")
THINGS = ("bread, from the grain to the oven", "the printing press and the people who ran it", "a lighthouse on a rocky coast",
          "rivers that change their course")


def requests(count: int, tokens: int) -> list[dict[str, Any]]:
    """Completions of different prompts, greedy, ``tokens`` long."""
    found = []
    for place in range(count):
        opening, thing = OPENINGS[place % len(OPENINGS)], THINGS[place // len(OPENINGS) % len(THINGS)]
        prompt = f"{place}. {opening} {thing}. " + "It was written for readers who have an hour and a cup of tea. " * (1 + place % 4)
        found.append({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True})
    return found


class Offline:
    """LLM.generate in a process that stays: a round costs no start-up."""

    def __init__(self, model: str, batch: list[dict[str, Any]], settings: list[str]) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", __spec__.name, "--offline", model, *settings], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._batch = batch

    def round(self) -> tuple[float, list[str]]:
        """Run the batch. Returns the seconds and the texts."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(self._batch) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer["seconds"], answer["texts"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve_offline(model: str, settings: list[str]) -> None:
    """The other side of Offline: a batch a line on standard input."""
    import msgspec

    from octavo import LLM, SamplingParams

    with LLM(model, **dict(_pairs(settings))) as llm:
        for line in sys.stdin:
            batch = json.loads(line)
            params = [msgspec.convert({name: value for name, value in each.items() if name != "prompt"}, SamplingParams) for each in batch]
            began = time.perf_counter()
            outs = llm.generate([each["prompt"] for each in batch], params, use_tqdm=False)
            seconds = time.perf_counter() - began
            sys.stdout.write(json.dumps({"seconds": seconds, "texts": [out.outputs[0].text for out in outs]}) + "\n")
            sys.stdout.flush()


def measure(server: Server, batch: list[dict[str, Any]]) -> dict[str, Any]:
    """One round through the server: throughput, the client's latencies and the server's."""
    jobs = [Job(place, "/v1/completions", {"model": "m", "stream": True, **each}) for place, each in enumerate(batch)]
    before = server.metrics()
    results, cpu = run(server.url, jobs, len(jobs))
    after = server.metrics()
    broken = [result for result in results if result.status != 200 or result.end != "done"]
    if broken:
        raise RuntimeError(f"{len(broken)} of {len(results)} streams failed; the first: {broken[0].status} {broken[0].events[-1:]}")
    times = [token_times(result) for result in results]
    gaps = [later - earlier for stream in times for earlier, later in itertools.pairwise(stream)] or [0.0]  # each stream came at once
    # Per token, as the server counts: events hold more than one where tokens waited for each other, or for the rest of a character.
    per_token = sum(stream[-1] - stream[0] for stream in times) / sum(each["max_tokens"] - 1 for each in batch)
    return {
        "seconds": max(result.ended for result in results) - min(result.sent for result in results),
        "cpu_seconds": cpu, "texts": [text_of(result) for result in results], "events": sum(len(stream) for stream in times),
        "ttft": statistics.fmean(stream[0] - result.sent for stream, result in zip(times, results, strict=True)),
        "itl": per_token, "itl_median": statistics.median(gaps), "itl_max": max(gaps),
        "server_ttft": _mean(before, after, "time_to_first_token_seconds"), "server_itl": _mean(before, after, "inter_token_latency_seconds"),
    }


def report(rounds: list[dict[str, Any]], tokens: int, clients: int) -> str:
    """The table, from the rounds of one run."""
    def middle(name: str) -> float:
        return statistics.median(each[name] for each in rounds)

    ratio = statistics.median(each["offline_seconds"] / each["seconds"] for each in rounds)
    pairs = ", ".join(f"{100 * each['offline_seconds'] / each['seconds']:.0f}" for each in rounds)
    same = all(each["same"] for each in rounds)
    rows = [
        ("offline", f"{tokens / middle('offline_seconds'):8.1f} tokens/s"),
        (f"{clients} streaming clients", f"{tokens / middle('seconds'):8.1f} tokens/s"),
        ("ratio (median of pairs)", f"{100 * ratio:8.1f} % ({pairs})"),
        ("client's processor time", f"{100 * statistics.median(e['cpu_seconds'] / e['seconds'] for e in rounds):8.1f} % of one core"),
        ("same text as offline", f"{'yes' if same else 'NO':>8}"),
        ("events per token", f"{middle('events') / tokens:8.3f}"),
    ]
    for name, what in (("ttft", "time to first token"), ("itl", "inter-token time")):
        mine, theirs = middle(name), middle(f"server_{name}")
        each = ", ".join(_apart(round[f"server_{name}"], round[name]) for round in rounds)
        rows.append((f"{what}, mean", f"{1e3 * mine:8.2f} ms client {1e3 * theirs:8.2f} ms server, {_apart(theirs, mine)} % ({each})"))
    rows.append(("inter-token time, client", f"{1e3 * middle('itl_median'):8.2f} ms median {1e3 * middle('itl_max'):8.2f} ms longest"))
    return "\n".join(f"  {name:26}{value}" for name, value in rows)


def _apart(theirs: float, mine: float) -> str:
    """By how many percent; a dash where all tokens of each stream came at once, so that there is no time between them."""
    return f"{100 * (theirs / mine - 1):+.1f}" if mine else "–"


def _mean(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return (after[f"{name}_sum"] - before[f"{name}_sum"]) / (after[f"{name}_count"] - before[f"{name}_count"])


def _pairs(settings: list[str]) -> list[tuple[str, Any]]:
    """Flags as LLM's keywords."""
    names, values = settings[::2], settings[1::2]
    return [(name.removeprefix("--").replace("-", "_"), int(value) if value.isdigit() else value) for name, value in zip(names, values, strict=True)]


def main() -> None:
    """The command. Options it does not know go to both engines: ``--max-num-seqs 64``."""
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.serve_ratio", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    args, settings = parser.parse_known_args()
    if args.offline:
        serve_offline(args.model, settings)
        return
    batch = requests(args.clients, args.tokens)
    engine = Offline(args.model, batch, settings)
    try:
        with Server(args.model, "--served-model-name", "m", *settings) as server:
            engine.round()  # both warm
            measure(server, batch)
            rounds = []
            for number in range(args.rounds):
                seconds, texts = engine.round()
                got = measure(server, batch)
                rounds.append(got | {"offline_seconds": seconds, "same": got.pop("texts") == texts})
                sys.stderr.write(f"  round {number + 1}: offline {seconds:.2f} s, served {got['seconds']:.2f} s\n")
    finally:
        engine.close()
    sys.stdout.write(report(rounds, args.clients * args.tokens, args.clients) + "\n")


if __name__ == "__main__":
    main()
