"""An `octavo serve` process for measurements and tests: started, waited for, scraped, ended."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any

from octavo.errors import WorkerDied

START_SECONDS = 120.0
READY = re.compile(r"ready at (\S+) in")


class Server:
    """A server on a free port, or on a Unix socket. A context manager; what it wrote is in ``log()``."""

    def __init__(self, model: str, *args: str, env: dict[str, str] | None = None) -> None:
        self._log = tempfile.NamedTemporaryFile("w+", prefix="octavo-serve-", suffix=".log")  # noqa: SIM115 (it lives as long as the server)
        where = () if "--uds" in args else ("--port", "0")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo", "serve", model, *where, *args], stdout=self._log, stderr=self._log,
            env={name: value for name, value in os.environ.items() if name != "OCTAVO_API_KEY"} | (env or {}), stdin=subprocess.DEVNULL,
        )
        self.url = ""

    def __enter__(self) -> "Server":
        try:
            self.url = self._wait()
        except BaseException:
            self.stop(signal.SIGKILL)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        self._log.close()

    def log(self) -> str:
        """Everything the server wrote."""
        with open(self._log.name, encoding="utf-8") as file:
            return file.read()

    def stop(self, number: int = signal.SIGTERM, seconds: float = 30.0) -> int:
        """Send a signal, if it lives, and wait. Returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    @property
    def engine_pid(self) -> int:
        """The engine's process."""
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children", encoding="ascii") as file:
            children = file.read().split()
        if len(children) != 1:
            raise WorkerDied(f"the server has {len(children)} child processes, not one")
        return int(children[0])

    def request(self, method: str, path: str, body: Any = None, *, key: str | None = None, seconds: float = 60.0) -> tuple[int, bytes]:
        """One request on a connection of its own: status and body. Raises: OSError."""
        connection = self.connect(seconds)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read()

    def connect(self, seconds: float = 60.0) -> http.client.HTTPConnection:
        """A connection to the server."""
        if not self.url.startswith("unix:"):
            return http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=seconds)
        connection = http.client.HTTPConnection("localhost", timeout=seconds)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(seconds)
        connection.sock.connect(self.url.removeprefix("unix:"))
        return connection

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name without the prefix, labels left out; those of several label sets are added up."""
        status, text = self.request("GET", "/metrics")
        if status != 200:
            raise WorkerDied(f"/metrics answered {status}")
        found: dict[str, float] = {}
        for line in text.decode().splitlines():
            if line and not line.startswith("#"):
                name = line.partition("{")[0].partition(" ")[0].removeprefix("octavo:")
                found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
        return found

    def rss(self) -> dict[str, int]:
        """Resident bytes of the API process and the engine's."""
        return {name: _rss(pid) for name, pid in (("api", self.process.pid), ("engine", self.engine_pid))}

    def _wait(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if found := READY.search(self.log()):
                return found[1]
            if self.process.poll() is not None:
                raise WorkerDied(f"the server ended with status {self.process.returncode} before it was ready:\n{self.log()}")
            time.sleep(0.01)  # a start is measured with it
        raise WorkerDied(f"the server was not ready after {START_SECONDS:.0f} s:\n{self.log()}")


def _rss(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
