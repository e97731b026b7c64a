"""A load client on raw sockets: many streams in one thread, each event stamped as it is read. It shares two cores with the server that
it measures, so it parses nothing while it runs but the framing, and tells its own processor time.

As a process of its own (``run``, or ``python -m octavo.bench.serve_client``) it reads one JSON line on standard input and writes one.
"""

import json
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

SILENCE = 120.0  # seconds without any event on any stream: the server hangs


@dataclass(slots=True)
class Job:
    """One request. ``drop_after``: close the connection after so many events, as a client that leaves does; 0: once it is sent.
    ``at``: seconds after the first moment, before which it is not sent."""

    key: Any
    path: str
    body: dict[str, Any]
    drop_after: int | None = None
    at: float = 0.0


@dataclass(slots=True)
class Result:
    """What came of a job. Times are of the monotonic clock.

    ``end``: done; failed (a whole answer, but a stream without its [DONE]: the last event is an error); broken (cut off); dropped (by us).
    """

    key: Any
    sent: float
    status: int = 0
    stamps: list[float] = field(default_factory=list)  # of the events, in order
    events: list[str] = field(default_factory=list)  # their data; for an answer that is no stream: its body
    ended: float = 0.0
    end: str = "broken"


class _Stream:
    """One connection: bytes in, events out."""

    def __init__(self, job: Job, address: Any, family: int, headers: str) -> None:
        body = json.dumps(job.body).encode()
        request = f"POST {job.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        self.job = job
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        self.sock.connect(address)
        if family != socket.AF_UNIX:
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.result = Result(job.key, time.monotonic())
        self.sock.sendall(request.encode() + body)
        self.sock.setblocking(False)
        self._buffer = bytearray()
        self._text = bytearray()  # dechunked and not yet an event
        self._left: int | None = None  # bytes of a body with a length
        self._headed = self._chunked = self._stream = False

    def read(self) -> bool:
        """Take in what is there. True when it is over."""
        result = self.result
        try:
            data = self.sock.recv(65536)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        now = time.monotonic()
        if not data:
            return self._over(now)
        self._buffer += data
        if not self._headed and not self._head():
            return False
        if not self._chunked:
            self._text += self._buffer
            self._buffer.clear()
            if self._left is not None and len(self._text) >= self._left:
                result.end = "done"
                return self._over(now)
            return False
        ended = self._dechunk()
        if self._stream:
            while (cut := self._text.find(b"\n\n")) >= 0:
                event = self._text[:cut]
                del self._text[: cut + 2]
                if not event.startswith(b"data:"):
                    continue
                if event[5:].strip() == b"[DONE]":
                    result.end = "done"
                    continue
                result.stamps.append(now)
                result.events.append(event[5:].decode())
                if self.job.drop_after is not None and len(result.stamps) >= self.job.drop_after:
                    result.end = "dropped"
                    return self._over(now)
        if ended and result.end == "broken":
            result.end = "failed" if self._stream else "done"
        return self._over(now) if ended else False

    def _over(self, now: float) -> bool:
        self.result.ended = now
        if self._text and not self._stream:
            self.result.events.append(self._text.decode(errors="replace"))
        return True

    def _head(self) -> bool:
        cut = self._buffer.find(b"\r\n\r\n")
        if cut < 0:
            return False
        first, *rest = bytes(self._buffer[:cut]).decode("latin-1").split("\r\n")
        del self._buffer[: cut + 4]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
        self.result.status = int(first.split(" ")[1])
        self._chunked = headers.get("transfer-encoding") == "chunked"
        self._stream = headers.get("content-type", "").startswith("text/event-stream")
        self._left = int(headers["content-length"]) if "content-length" in headers else None
        self._headed = True
        return True

    def _dechunk(self) -> bool:
        """Move whole chunks from the buffer to the text. True after the last one."""
        while (line := self._buffer.find(b"\r\n")) >= 0:
            size = int(self._buffer[:line], 16)
            if size == 0:
                return True
            if len(self._buffer) < line + size + 4:
                return False
            self._text += self._buffer[line + 2 : line + 2 + size]
            del self._buffer[: line + size + 4]
        return False


def drive(url: str, jobs: Iterable[Job], concurrency: int, api_key: str | None = None) -> Iterator[Result]:
    """Run jobs, at most ``concurrency`` at once, each as soon as it is due and one is over; yields results as they come.

    ``jobs`` may be endless: close the generator to end. Raises: TimeoutError when nothing comes for two minutes; OSError when the
    server does not take a connection.
    """
    address, family = _address(url)
    headers = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
    source, running = iter(jobs), 0
    job = next(source, None)
    began = heard = time.monotonic()
    with selectors.DefaultSelector() as selector:
        try:
            while running or job is not None:
                while job is not None and running < concurrency and began + job.at <= time.monotonic():
                    stream, job = _Stream(job, address, family, headers), next(source, None)
                    if stream.job.drop_after == 0:
                        stream.sock.close()
                        stream.result.end, stream.result.ended = "dropped", time.monotonic()
                        yield stream.result
                        continue
                    selector.register(stream.sock, selectors.EVENT_READ, stream)
                    running += 1
                    heard = time.monotonic()
                due = began + job.at - time.monotonic() if job is not None and running < concurrency else SILENCE
                ready = selector.select(min(max(due, 0.0), SILENCE))
                if ready:
                    heard = time.monotonic()
                elif running and time.monotonic() - heard >= SILENCE:
                    raise TimeoutError(f"{running} streams, and nothing came for {SILENCE:.0f} s")
                for key, _ in ready:
                    stream = key.data
                    if stream.read():
                        selector.unregister(stream.sock)
                        stream.sock.close()
                        running -= 1
                        yield stream.result
        finally:
            for key in list(selector.get_map().values()):
                key.data.sock.close()


def run(url: str, jobs: list[Job], concurrency: int, api_key: str | None = None) -> tuple[list[Result], float]:
    """Run jobs in a process of their own. Returns the results, in the jobs' order, and the process' own seconds of processor time."""
    task = {"url": url, "concurrency": concurrency, "api_key": api_key, "jobs": [asdict(job) | {"key": place} for place, job in enumerate(jobs)]}
    done = subprocess.run([sys.executable, "-m", __spec__.name], input=json.dumps(task) + "\n", stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(done.stdout)
    return [Result(**each | {"key": job.key}) for job, each in zip(jobs, answer["results"], strict=True)], answer["cpu_seconds"]


def text_of(result: Result) -> str:
    """The text that a streamed completion or chat added up to."""
    parts = []
    for event in result.events:
        for choice in json.loads(event).get("choices", ()):
            parts.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
    return "".join(parts)


def token_times(result: Result) -> list[float]:
    """When each event with text or tokens came: not the ones that carry a role or the usage alone."""
    times = []
    for stamp, event in zip(result.stamps, result.events, strict=True):
        choices = json.loads(event).get("choices", ())
        if any(choice.get("text") or choice.get("token_ids") or (choice.get("delta") or {}).get("content") for choice in choices):
            times.append(stamp)
    return times


def _address(url: str) -> tuple[Any, int]:
    if url.startswith("unix:"):
        return url.removeprefix("unix:"), socket.AF_UNIX
    parts = urlsplit(url)
    family, _, _, _, address = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)[0]
    return address, family


def _main() -> None:
    task = json.loads(sys.stdin.readline())
    began = time.process_time()
    results = sorted(drive(task["url"], [Job(**each) for each in task["jobs"]], task["concurrency"], task["api_key"]), key=lambda result: result.key)
    cpu = time.process_time() - began
    sys.stdout.write(json.dumps({"results": [asdict(result) for result in results], "cpu_seconds": cpu}) + "\n")


if __name__ == "__main__":
    _main()
