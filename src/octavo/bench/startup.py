"""`octavo bench startup`: from the start of a process to its first token, and the memory that is its own then.

    offline   a Python that makes an LLM and streams one answer
    serve     `octavo serve`, and a request as soon as it is ready
    first     the model lies on disk, nothing of it is packed yet
    again     its packed weights are kept from the start before
"""

import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo.bench import result
from octavo.bench.rig import tell
from octavo.bench.server import Server
from octavo.bench.tables import ranged, spread, table
from octavo.errors import OctavoError, WorkerDied
from octavo.weights import hub

PROMPT, TOKENS = "The capital of France is", 4
WAYS, TIMES = ("offline", "serve"), ("first", "again")
END_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Start:
    """One start. ``anonymous``: bytes of the process that computes which are neither a file's nor shared (RssAnon), behind the first token."""

    seconds: float
    anonymous: int
    facts: dict[str, Any]  # of offline ones: final settings, bytes of weights


def run(model: str, settings: dict[str, Any], repeat: int) -> tuple[str, dict[str, Any]]:
    """All ways to start in turn, ``repeat`` times, each with a cache folder of its own. → a table, and the result.

    Raises: as hub.resolve; WorkerDied, with what it wrote, when a process does not get to its first token.
    """
    path = str(hub.resolve(model))  # a short name is fetched now: it is not what is measured
    starts: dict[tuple[str, str], list[Start]] = {(way, when): [] for way in WAYS for when in TIMES}
    for number in range(repeat):
        with tempfile.TemporaryDirectory(prefix="octavo-startup-") as kept, tempfile.TemporaryDirectory(prefix="octavo-startup-") as empty:
            # What the offline process keeps serves the server, too: that one ends before its own packed weights are written.
            for way, when, cache in (("offline", "first", kept), ("offline", "again", kept), ("serve", "again", kept), ("serve", "first", empty)):
                start = (_offline if way == "offline" else _serve)(path, settings, cache)
                starts[way, when].append(start)
                tell(f"round {number + 1} of {repeat}: {way}, {when} {start.seconds:.2f} s")
    facts = starts["offline", "first"][0].facts
    facts["config"]["model"]["model"] = result.model_name(model)  # the processes were given its path
    results: dict[str, dict[str, Any]] = {way: {} for way in WAYS}
    rows = []
    for (way, when), found in starts.items():
        seconds, anonymous = [start.seconds for start in found], [float(start.anonymous) for start in found]
        results[way][when] = {"seconds": spread(seconds), "anonymous_bytes": spread(anonymous)}
        rows.append((f"{way}, {when}", ranged(seconds, form=".2f"), ranged(anonymous, 1e-6, ".0f")))
    text = table(("start", "seconds to the first token (range)", "anonymous MB (range)"), rows)
    text += f"Weights: {facts['weight_bytes'] / 1e6:.0f} MB. Anonymous memory holds them where they were just packed, not where mapped.\n"
    head = {"benchmark": "startup", **result.head(None), "config": facts["config"], "weight_bytes": facts["weight_bytes"], "ceilings": None}
    return text, head | {"repeat": repeat, "results": results}


def _offline(path: str, settings: dict[str, Any], cache: str) -> Start:
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "octavo.bench.startup", path, json.dumps(settings)], stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment(cache))
    assert process.stdout is not None
    line = process.stdout.readline()
    seconds = time.perf_counter() - began
    _, errors = process.communicate(timeout=END_SECONDS)  # it ends when the packed weights are written
    if process.returncode or not line:
        raise WorkerDied(f"the process ended with status {process.returncode}: {errors.strip()}")
    facts = json.loads(line)
    return Start(seconds, facts.pop("anonymous"), facts)


def _serve(path: str, settings: dict[str, Any], cache: str) -> Start:
    began = time.perf_counter()
    with Server(path, *_arguments(settings), env=_environment(cache)) as server:
        connection = server.connect()
        body = json.dumps({"model": path, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        line = _first_event(answer)
        seconds = time.perf_counter() - began
        if answer.status != 200 or not line.startswith(b"data: {"):
            raise WorkerDied(f"the server answered {answer.status}: {line.decode(errors='replace')}\n{server.log()}")
        answer.read()
        connection.close()
        return Start(seconds, _anonymous(server.engine_pid), {})


def _first_event(answer: http.client.HTTPResponse) -> bytes:
    while (line := answer.readline()) and not line.strip():
        pass
    return line


def _arguments(settings: dict[str, Any]) -> list[str]:
    """Settings as the options of a command."""
    found = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        found += [f"--{'' if value else 'no-'}{option}"] if isinstance(value, bool) else [f"--{option}", str(value)]
    return found


def _environment(cache: str) -> dict[str, str]:
    package = str(Path(__file__).parents[2])  # this Octavo, wherever it runs from
    inherited = os.environ.get("PYTHONPATH")
    return os.environ | {"OCTAVO_CACHE": cache, "PYTHONPATH": os.pathsep.join([package, *([inherited] if inherited else [])])}


def _anonymous(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def _child(model: str, settings: dict[str, Any]) -> None:
    """What is measured offline: a line at the first token."""
    from octavo import LLM, SamplingParams

    llm = LLM(model, **settings)
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True))
    next(stream)
    print(json.dumps({"anonymous": _anonymous(os.getpid()), "weight_bytes": llm.ledger.weights, "config": asdict(llm.config)}), flush=True)
    llm.shutdown()


if __name__ == "__main__":
    try:
        _child(sys.argv[1], json.loads(sys.argv[2]))
    except OctavoError as error:
        sys.exit(error.message)
