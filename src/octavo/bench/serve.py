"""`octavo bench serve`: load on any server that speaks OpenAI's completions API, and what its clients see of it.

Closed loop: so many clients, each sends its next request when its last one is answered. Open loop: requests are sent at random times of a rate
(a Poisson process), whether others are answered or not. The client is a process of its own; its processor time is told, since it may share cores.

    TTFT   from sending a request to its first token          TPOT   (end − first token) / (tokens − 1), of each request
    ITL    between two chunks of a stream                     E2E    from sending to the end
"""

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from octavo.bench import result
from octavo.bench.serve_client import Job, Result, run, token_times
from octavo.bench.tables import percentile, table
from octavo.cli.remote import Remote
from octavo.errors import ConfigError, RemoteError

LOWEST = 1000  # token ids of prompts: those below are often special


def load(model: str, count: int, tokens_in: int, tokens_out: int, rate: float | None, vocab: int, seed: int) -> list[Job]:
    """Streamed completions of random token ids. ``rate``: requests a second, None for all at once. Raises: ConfigError."""
    if min(count, tokens_in) < 1 or tokens_out < 2 or vocab < 2:
        raise ConfigError(f"{count} requests of {tokens_in} tokens in and {tokens_out} out: at least 1, 1 and 2", "num_prompts")
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigError(f"request_rate must be a number above 0, not {rate}", "request_rate")
    draw, at, jobs = random.Random(seed), 0.0, []
    for place in range(count):
        body = {
            "model": model, "prompt": [draw.randrange(min(LOWEST, vocab // 2), vocab) for _ in range(tokens_in)], "max_tokens": tokens_out,
            "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }
        jobs.append(Job(place, "/v1/completions", body, at=at))
        at += draw.expovariate(rate) if rate is not None else 0.0
    return jobs


def facts(results: Sequence[Result]) -> dict[str, Any]:
    """What the clients saw. Times in seconds. Raises: RemoteError when no request was answered."""
    done = [(each, token_times(each)) for each in results if each.status == 200 and each.end == "done"]
    done = [(each, times) for each, times in done if times]
    if not done:
        why = next((event for each in results for event in each.events), "the connections broke")
        raise RemoteError(f"none of {len(results)} requests was answered: {why[:300]}")
    counts = [_tokens(each, times) for each, times in done]
    seconds = max(each.ended for each, _ in done) - min(each.sent for each in results)
    samples = {
        "ttft": [times[0] - each.sent for each, times in done],
        "tpot": [(times[-1] - times[0]) / (count - 1) for (_, times), count in zip(done, counts) if count > 1],
        "itl": [later - earlier for _, times in done for earlier, later in pairwise(times)],
        "e2e": [each.ended - each.sent for each, _ in done],
    }
    return {
        "requests": len(results), "failed": len(results) - len(done), "seconds": seconds, "output_tokens": sum(counts),
        "requests_per_second": len(done) / seconds, "output_tokens_per_second": sum(counts) / seconds,
        **{name: _summary(values) for name, values in samples.items() if values},
    }


def measure(
    url: str, model: str | None, *, num_prompts: int, tokens_in: int, tokens_out: int, concurrency: int | None, rate: float | None,
    vocab: int, seed: int, api_key: str | None,
) -> tuple[str, dict[str, Any]]:
    """Run one load. → a table, and the result. Raises: ConfigError, RemoteError."""
    if concurrency is not None and concurrency < 1:
        raise ConfigError(f"max_concurrency must be at least 1, not {concurrency}", "max_concurrency")
    jobs = load(model or "", num_prompts, tokens_in, tokens_out, rate, vocab, seed)
    remote = Remote(url, api_key, model)
    if not remote.url.startswith("http://") or url.removeprefix("http://").rstrip("/").removesuffix("/v1").count("/"):
        raise ConfigError(f"{url}: the load client speaks plain http to a host and port", "url")
    for job in jobs:
        job.body["model"] = remote.model
    sys.stderr.write(f"  {num_prompts} requests to {remote.model} at {remote.url}\n")
    try:
        results, cpu = run(remote.url, jobs, concurrency or num_prompts, api_key)
    except (OSError, subprocess.CalledProcessError) as error:  # the client's own process tells more on standard error
        raise RemoteError(f"the load client failed: {error}") from error
    found = {
        "benchmark": "serve", **result.head(None), "model": remote.model, "tokens_in": tokens_in, "tokens_out": tokens_out,
        "max_concurrency": concurrency, "request_rate": rate, "seed": seed, "client_cpu_seconds": cpu, "results": facts(results),
    }
    return _shown(found["results"], cpu), found


def _tokens(each: Result, times: Sequence[float]) -> int:
    """Output tokens, as the server counts them, or one per chunk where it does not."""
    for event in reversed(each.events):
        usage = json.loads(event).get("usage")
        if usage:
            return int(usage["completion_tokens"])
    return len(times)


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": statistics.fmean(values), "median": statistics.median(values), "p90": percentile(values, 0.9), "p99": percentile(values, 0.99),
        "max": max(values),
    }


def _shown(found: dict[str, Any], cpu: float) -> str:
    rows = [(name.upper(), *(f"{1e3 * found[name][part]:.1f}" for part in ("mean", "median", "p90", "p99", "max")))
            for name in ("ttft", "tpot", "itl", "e2e") if name in found]
    return (f"{found['requests']} requests, {found['failed']} failed, in {found['seconds']:.2f} s: {found['requests_per_second']:.2f} requests/s, "
            f"{found['output_tokens_per_second']:.1f} output tokens/s (client: {cpu:.2f} s of processor time)\n\n"
            + table(("ms", "mean", "median", "P90", "P99", "most"), rows))
