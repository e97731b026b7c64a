"""How `octavo serve` starts and ends: its own processes, real signals, a tiny model."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import make_tiny

from octavo.bench.serve_client import Job, Result, drive
from octavo.bench.server import Server
from octavo.errors import ConfigError
from octavo.server import run

NAME = ("--served-model-name", "tiny", "--max-num-seqs", "8")
ENDLESS = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 10_000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a long context: a stream of it lasts for many seconds unless something ends it."""
    return str(make_tiny(tmp_path_factory.mktemp("shutdown") / "tiny", max_position_embeddings=16_384))


class Streams:
    """Streams read in the background; ``events`` counts what has come."""

    def __init__(self, url: str, bodies: list[dict[str, Any]]) -> None:
        self.results: list[Result] = []
        jobs = [Job(place, "/v1/completions", body) for place, body in enumerate(bodies)]
        self._thread = threading.Thread(target=lambda: self.results.extend(drive(url, jobs, len(jobs))), daemon=True)
        self._thread.start()

    def join(self, seconds: float = 30.0) -> list[Result]:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "streams are still open"
        return sorted(self.results, key=lambda result: result.key)


def until(what: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def open_streams(server: Server, bodies: list[dict[str, Any]]) -> Streams:
    """Begin streams and wait until the engine runs all of them."""
    streams = Streams(server.url, bodies)
    until(lambda: server.metrics()["num_requests_running"] == len(bodies))
    return streams


def finish_reasons(result: Result) -> list[str]:
    return [choice["finish_reason"] for event in result.events for choice in json.loads(event).get("choices", ()) if choice["finish_reason"]]


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_open_requests_finish_and_exits_0(tiny: str, number: int) -> None:
    with Server(tiny, *NAME, "--shutdown-timeout", "120") as server:
        engine = server.engine_pid
        streams = open_streams(server, [ENDLESS | {"max_tokens": 600 + place} for place in range(3)])
        idle = server.connect()
        idle.request("GET", "/ping")
        idle.getresponse().read()
        server.process.send_signal(number)
        until(lambda: refused(server.url))  # new connections, while the streams go on
        results = streams.join()
        assert server.process.wait(10) == 0
        idle.close()
        log = server.log()
    assert [finish_reasons(result) for result in results] == [["length"]] * 3 and all(result.end == "done" for result in results)
    assert not alive(engine)
    assert f"{signal.Signals(number).name}: refusing new connections, finishing 3 open requests" in log


def test_what_outlasts_the_shutdown_timeout_is_aborted_with_a_proper_end(tiny: str) -> None:
    with Server(tiny, *NAME, "--shutdown-timeout", "0.3") as server:
        streams = open_streams(server, [ENDLESS] * 2)
        began = time.monotonic()
        assert server.stop(signal.SIGTERM) == 0
        assert time.monotonic() - began < 30  # a time-out; it takes 0.5 s
        results = streams.join()
    for result in results:  # the answer is whole HTTP, and its last event says what happened
        assert result.end == "failed" and json.loads(result.events[-1])["error"]["code"] == "aborted"


def test_a_second_signal_ends_at_once(tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with Server(tiny, *NAME, "--uds", str(path)) as server:
        engine = server.engine_pid
        streams = open_streams(server, [ENDLESS])
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(2) == 128 + signal.SIGTERM
        assert streams.join(2)[0].end == "broken"
    until(lambda: not alive(engine), 2)
    assert not path.exists()


def test_the_engines_death_ends_every_stream_within_two_seconds(tiny: str) -> None:
    with Server(tiny, *NAME) as server:
        streams = open_streams(server, [ENDLESS] * 4)
        os.kill(server.engine_pid, signal.SIGKILL)
        began = time.monotonic()
        results = streams.join(2)
        status, body = server.request("GET", "/health")
        assert time.monotonic() - began < 30  # a time-out; promised are 2 s
        assert status == 503 and "killed by signal 9" in json.loads(body)["reason"]
        for result in results:
            assert result.end == "failed" and "killed" in json.loads(result.events[-1])["error"]["message"]
        status, body = server.request("POST", "/v1/completions", ENDLESS)
        assert status == 503 and "killed" in json.loads(body)["error"]["message"]
        assert server.request("GET", "/ping")[0] == 200 and server.metrics()["num_requests_running"] == 0
        assert server.process.wait(run.LINGER + 5) == 1  # a supervisor's turn
        assert time.monotonic() - began > run.LINGER - 1


def test_a_signal_after_the_engines_death_is_obeyed(tiny: str) -> None:
    with Server(tiny, *NAME) as server:
        os.kill(server.engine_pid, signal.SIGKILL)
        until(lambda: server.request("GET", "/health")[0] == 503, 2)
        assert server.stop(signal.SIGTERM) == 1


def test_the_engine_does_not_outlive_the_api_process(tiny: str) -> None:
    with Server(tiny, *NAME) as server:
        engine = server.engine_pid
        streams = open_streams(server, [ENDLESS])
        server.process.kill()
        until(lambda: not alive(engine), 2)
        assert streams.join(2)[0].end == "broken"


def test_a_signal_while_the_model_loads(tiny: str) -> None:
    process = subprocess.Popen([sys.executable, "-m", "octavo", "serve", tiny, "--port", "0"], stderr=subprocess.PIPE, text=True)
    time.sleep(0.7)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=10)
    assert process.returncode in (0, 128 + signal.SIGTERM, -signal.SIGTERM), told
    assert "Traceback" not in told


def test_a_unix_socket(tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # left behind by a server that was killed
    with Server(tiny, *NAME, "--uds", str(path)) as server:
        assert server.url == f"unix:{path}" and server.request("GET", "/health")[0] == 200
        assert [r.end for r in drive(server.url, [Job(0, "/v1/completions", ENDLESS | {"max_tokens": 3})], 1)] == ["done"]
        with pytest.raises(ConfigError, match="another process serves on"):
            run.bind("", 0, str(path))
        assert server.stop() == 0
    assert not path.exists()


def test_addresses_that_cannot_be_had(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use by another process") as raised:
            run.bind("127.0.0.1", port)
        assert raised.value.param == "port"
    with pytest.raises(ConfigError, match="between 0 and 65535, not 99999"):
        run.bind("127.0.0.1", 99999)
    with pytest.raises(ConfigError, match=r"^host ") as raised:
        run.bind("no.such.host.invalid", 80)
    assert raised.value.param == "host"
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is no socket"):
        run.bind("", 0, str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="cannot make the socket"):
        run.bind("", 0, str(tmp_path / "no" / "folder"))


def test_a_port_in_use_is_told_before_anything_loads(tiny: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([sys.executable, "-m", "octavo", "serve", tiny, "--port", port], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1  # no phase of a start
    assert done.stderr.startswith(f"octavo: port {port} on 127.0.0.1 is in use by another process") and done.stderr.endswith("(--port)\n")


@pytest.mark.parametrize(("args", "says"), [
    (("--max-model-len", "99999"), "the model was made for 16384 tokens at most (--max-model-len)"),
    (("--num-kv-blocks", "999999999"), "num_kv_blocks must be between"), (("--api-key", ""), "API key 1 is empty"),
    (("--num-kv-blocks", "90000000"), "are available"),
])
def test_an_engine_that_cannot_start_is_told_as_the_commands_tell_it(tiny: str, args: tuple[str, ...], says: str) -> None:
    done = subprocess.run([sys.executable, "-m", "octavo", "serve", tiny, "--port", "0", *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and says in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def server(tiny: str) -> Iterator[Server]:
    with Server(tiny, *NAME) as server:
        yield server


def test_the_start_is_told(server: Server) -> None:
    lines = server.log().splitlines()
    assert any(line.startswith("  loading 0 M weights as bfloat16") for line in lines) and any("KV pool" in line for line in lines)
    assert lines[-1].startswith(f"  ready at {server.url} in ") and "Config(" not in server.log()


def refused(url: str) -> bool:
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0
