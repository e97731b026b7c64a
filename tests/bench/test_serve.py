"""octavo bench serve: its load, its figures, and the command against the real server."""

import json
import random
import time
from pathlib import Path

import pytest
from tests.bench.test_serve_client import STREAM, chunk, event, saying
from tests.checkpoints import make_tiny
from tests.cli.conftest import Octavo, octavo  # noqa: F401 - a fixture

from octavo.bench.serve import facts, load
from octavo.bench.serve_client import Job, Result, drive
from octavo.bench.server import Server
from octavo.errors import ConfigError, RemoteError


def test_a_load_is_fixed_by_its_seed() -> None:
    jobs, again, other = (load("m", 50, 8, 4, 10.0, 500, seed) for seed in (1, 1, 2))
    assert jobs == again and [job.body["prompt"] for job in jobs] != [job.body["prompt"] for job in other]
    assert all(len(job.body["prompt"]) == 8 and max(job.body["prompt"]) < 500 for job in jobs)
    times = [job.at for job in jobs]
    assert times[0] == 0 and times == sorted(times) and 2 < times[-1] < 12  # 49 gaps of 0.1 s in the mean
    assert {job.at for job in load("m", 5, 8, 4, None, 500, 1)} == {0.0}
    for wrong in ((0, 1, 2, None), (1, 0, 2, None), (1, 1, 1, None), (1, 1, 2, 0.0), (1, 1, 2, float("nan"))):
        with pytest.raises(ConfigError):
            load("m", *wrong, 500, 0)


def stream(sent: float, *stamps: float, tokens: int | None = None, **more) -> Result:
    events = [json.dumps({"choices": [{"text": "x"}]}) for _ in stamps]
    if tokens is not None:
        events.append(json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}))
        stamps = (*stamps, stamps[-1])
    return Result(0, sent, **({"status": 200, "stamps": list(stamps), "events": events, "ended": stamps[-1] + 0.5, "end": "done"} | more))


def test_figures_are_their_definitions() -> None:
    found = facts([stream(10, 11, 12, 14), stream(10, 13, 15, tokens=5), stream(10, 11, end="failed"), stream(10, 99, status=500)])
    assert (found["requests"], found["failed"], found["output_tokens"], found["seconds"]) == (4, 2, 8, 5.5)
    assert found["ttft"] == {"mean": 2, "median": 2, "p90": 3, "p99": 3, "max": 3}
    assert found["tpot"]["max"] == 1.5 and found["tpot"]["mean"] == 1.0 and found["itl"]["median"] == 2 and found["e2e"]["max"] == 5.5
    assert found["requests_per_second"] == 2 / 5.5 and found["output_tokens_per_second"] == 8 / 5.5
    with pytest.raises(RemoteError, match="none of 1 requests was answered: no such model"):
        facts([Result(0, 1.0, 404, [2.0], ["no such model"], 2.0, "done")])


def test_no_request_is_sent_before_it_is_due() -> None:
    draw = random.Random(0)
    with saying(STREAM, chunk(event("a")), chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n") as (url, _):
        jobs = [Job(place, "/x", {}, at=at) for place, at in enumerate(sorted(draw.uniform(0, 0.4) for _ in range(6)))]
        began = time.monotonic()
        results = list(drive(url, jobs, 2))
    assert sorted(result.key for result in results) == list(range(6)) and all(result.end == "done" for result in results)
    assert all(result.sent - began >= jobs[result.key].at for result in results)


def test_the_command(octavo: Octavo, tmp_path: Path) -> None:  # noqa: F811
    model, saved = make_tiny(tmp_path / "tiny"), tmp_path / "out.json"
    args = ("--num-prompts", "6", "--input-len", "9", "--output-len", "5", "--vocab-size", "300")
    with Server(str(model), "--served-model-name", "m", "--api-key", "k") as server:
        done = octavo("bench", "serve", server.url, *args, "--request-rate", "50", "--api-key", "k", "--save", str(saved))
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found == json.loads(saved.read_text()) and found["benchmark"] == "serve" and found["model"] == "m"
        assert (found["results"]["requests"], found["results"]["failed"], found["results"]["output_tokens"]) == (6, 0, 30) and "TTFT" in done.stdout
        closed = octavo("bench", "serve", server.url, *args, "--max-concurrency", "2", "--api-key", "k", "--model", "m")
        assert json.loads(closed.stdout.splitlines()[-1])["results"]["output_tokens"] == 30
        unknown = octavo("bench", "serve", server.url, *args, "--api-key", "k", "--model", "n")
        assert unknown.returncode == 1 and "none of 6 requests was answered" in unknown.stderr and "'n'" in unknown.stderr
        large = octavo("bench", "serve", server.url, "--num-prompts", "2", "--api-key", "k")
        assert large.returncode == 1 and "none of 2 requests was answered" in large.stderr
    for url in ("https://127.0.0.1:1", "http://127.0.0.1:1/there/v1"):
        assert "plain http to a host and port (--url)" in octavo("bench", "serve", url, "--model", "m").stderr
