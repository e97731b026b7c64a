"""What a connection may send and hold, how the server ends around clients that do nothing, and who gets an address."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
import uvloop
from tests.checkpoints import make_tiny
from tests.server.test_shutdown import ENDLESS, NAME, open_streams, until

from octavo.bench.server import Server
from octavo.errors import ConfigError
from octavo.server import http, sockets

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
SPOKEN = {"Content-Type": "application/json", "Authorization": "Bearer k"}
T = TypeVar("T")
OURS = HEAD + b"Connection: close\r\nAuthorization: Bearer k\r\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("http") / "tiny", max_position_embeddings=16_384))


@pytest.fixture(scope="module")
def server(tiny: str) -> Iterator[Server]:
    with Server(tiny, *NAME, "--api-key", " k ") as server:
        yield server


def connect(server: Server, received: int | None = None) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    sock = socket.socket()
    if received is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received)
    sock.settimeout(30)
    sock.connect((host, int(port)))
    return sock


def read_all(sock: socket.socket) -> bytes:
    data = b""
    try:
        while part := sock.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data


def send_what_it_takes(sock: socket.socket, parts: Iterable[bytes]) -> None:
    """Send until the server will have no more."""
    try:
        for part in parts:
            sock.sendall(part)
    except OSError:
        pass


@pytest.mark.parametrize("parts", [
    (b"GET /ping HTTP/1.1\r\nX: ", b"a" * 70_000), (b"GET /ping HTTP/1.1\r\n", b"X: y\r\n" * 20_000), (b"GET /", b"a" * 70_000),
    (b"GET /ping HTTP/1.1\r\nX: ", b"a" * 70_000, b"\r\n\r\n"), (b"\r\n" * 40_000,),
])
def test_a_head_that_is_too_large_is_refused(server: Server, parts: tuple[bytes, ...]) -> None:
    with connect(server) as sock:
        send_what_it_takes(sock, parts)
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 431 ") and b"at most" in answer and answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\nX: ", OURS + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: "])
def test_a_line_without_end_is_not_kept(server: Server, start: bytes) -> None:
    before = server.rss()["api"]
    with connect(server) as sock:
        send_what_it_takes(sock, (start, *[b"a" * 2**20] * 64))
        assert server.rss()["api"] - before < 16 * 2**20
    assert server.request("GET", "/health")[0] == 200


def test_a_chunked_body_in_small_pieces_is_no_head(server: Server) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1}).encode() + b" " * 30_000  # six bytes for each: 180 kB
    with connect(server) as sock:
        sock.sendall(OURS + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 200 ")


def test_what_is_no_http_is_told_to_the_client_alone(server: Server) -> None:
    for text, status in ((b"nonsense\r\n\r\n", 400), (b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 200)):
        with connect(server) as sock:
            sock.sendall(text)
            answer = read_all(sock)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert "websocket" not in server.log().lower() and "Invalid HTTP" not in server.log()


def test_space_around_a_key_is_no_part_of_it(server: Server) -> None:
    assert server.request("GET", "/v1/models", key="k")[0] == 200 and server.request("GET", "/v1/models", key="x")[0] == 401


@pytest.mark.parametrize("sent", [b"", b"GET /", HEAD + b"Content-Length: 9\r\n\r\n{"])
def test_requests_that_never_become_whole(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """In a server of this process, whose clocks are set short."""
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(http, "BODY_SECONDS", 0.2)

    async def app(scope: object, receive: object, send: object) -> None:
        while (await receive())["type"] != "http.disconnect":  # type: ignore[operator]
            pass

    async def go() -> bytes:
        sock = sockets.bind("127.0.0.1", 0)
        address = sock.getsockname()
        server = http.make_server(app, lambda: True)
        task = asyncio.create_task(server.serve(sockets=[sock]))
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        server.should_exit = True
        await asyncio.wait_for(task, 20)
        return answer

    answer = asyncio.run(go())
    assert answer.startswith(b"HTTP/1.1 408 ") and answer.count(b"HTTP/1.1") == 1 if sent else answer == b""


def by_httpx(url: str, size: int) -> int:
    return httpx.post(url, content=b" " * size, headers=SPOKEN).status_code


def by_httpx_in_chunks(url: str, size: int) -> int:
    return httpx.post(url, content=iter([b" " * 2**20] * (size >> 20)), headers=SPOKEN).status_code


def by_urllib(url: str, size: int) -> int:
    with pytest.raises(urllib.error.HTTPError) as caught:  # it asks for the connection to be closed
        urllib.request.urlopen(urllib.request.Request(url, b" " * size, SPOKEN), timeout=30)
    assert json.load(caught.value)["error"]["code"] == "request_too_large"
    return caught.value.code


def by_http_client(url: str, size: int) -> int:
    connection = HTTPConnection(url.removeprefix("http://").partition("/")[0], timeout=30)
    connection.request("POST", "/v1/completions", b" " * size, SPOKEN)
    return connection.getresponse().status


def by_curl(url: str, size: int) -> int:
    headers = [part for name, value in SPOKEN.items() for part in ("-H", f"{name}: {value}")]
    done = subprocess.run(["curl", "-sS", "-o", os.devnull, "-w", "%{http_code}", *headers, "--data-binary", "@-", url], input=b" " * size,
                          capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("send", [by_httpx, by_httpx_in_chunks, by_urllib, by_http_client, by_curl])
def test_a_client_that_sends_too_much_is_told_so(server: Server, send: Callable[[str, int], int]) -> None:
    """Though it reads nothing before it has sent everything."""
    if send is by_curl and shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    for size in (33 * 2**20, 60 * 2**20):
        before = server.rss()["api"]
        assert send(server.url + "/v1/completions", size) == 413
        assert server.rss()["api"] - before < 48 * 2**20


async def talk(app: Callable[..., Awaitable[None]], client: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[T]]) -> tuple[T, float]:
    """A client of a server of this process. → what it gives, and the seconds in which the server then ends."""
    sock = sockets.bind("127.0.0.1", 0)
    address = sock.getsockname()
    server = http.make_server(app, lambda: False)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    reader, writer = await asyncio.open_connection(*address)
    found = await asyncio.wait_for(client(reader, writer), 20)
    began = time.monotonic()
    server.should_exit = True
    await asyncio.wait_for(task, 20)
    writer.close()
    return found, time.monotonic() - began


async def refusing(scope: object, receive: object, send: Callable[..., Awaitable[None]]) -> None:
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2"), (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": b"no"})


UNENDING = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n"


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_what_is_dropped_has_bounds(monkeypatch: pytest.MonkeyPatch, pause: float, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """In bytes, and in time."""
    monkeypatch.setattr(http, "MOST_DROPPED", 2**22)
    monkeypatch.setattr(http, "LINGER_SECONDS", 0.4 if pause else 600)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[bytes, int]:
        writer.write(UNENDING)
        answer, sent = await reader.read(), 0
        with pytest.raises(ConnectionError):
            while True:
                writer.write(b" " * (1000 if pause else 2**16))
                await writer.drain()
                await asyncio.sleep(pause)
                sent += 1
        return answer, sent

    with asyncio.Runner(loop_factory=loop) as runner:
        (answer, sent), _ = runner.run(talk(refusing, client))
    assert answer.endswith(b"\r\n\r\nno") and sent >= (3 if pause else 2**22 >> 16)


def test_who_still_sends_does_not_hold_up_the_end() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(UNENDING)
        return await reader.read()

    answer, seconds = asyncio.run(talk(refusing, client))
    assert answer.startswith(b"HTTP/1.1 413 ") and seconds < 10


def test_half_sent_requests_and_unread_answers_do_not_hold_up_the_end(tiny: str) -> None:
    with Server(tiny, *NAME, "--shutdown-timeout", "600") as server:  # far beyond every time-out here: it must not be used up
        idle = [connect(server) for _ in range(2)]
        for sock, sent in zip(idle, (b"GET /", HEAD + b"Content-Length: 9\r\n\r\n{"), strict=True):
            sock.sendall(sent)
        body = json.dumps(ENDLESS | {"max_tokens": 6000, "logprobs": 20}).encode()  # far more than the buffers between hold
        unread = [connect(server, 4096) for _ in range(1)]
        for sock in unread:
            sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: server.metrics()["generation_tokens_total"] == 6000, 240)
        server.process.send_signal(signal.SIGTERM)
        dripping = threading.Thread(target=send_what_it_takes, args=(idle[1], (time.sleep(0.1) or b" " for _ in range(5))))
        dripping.start()
        assert server.process.wait(30) == 0
        dripping.join()
        assert b"503 Service Unavailable" in read_all(idle[1])
        for sock in (*idle, *unread):
            sock.close()
        assert "Traceback" not in server.log() and "CancelledError" not in server.log()


def test_an_engine_that_does_not_answer_is_ended_and_not_called_out_of_memory(tiny: str) -> None:
    with Server(tiny, *NAME, "--shutdown-timeout", "0.2") as server:
        streams = open_streams(server, [ENDLESS] * 2)
        os.kill(server.engine_pid, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        for result in streams.join():
            message = json.loads(result.events[-1])["error"]["message"]
            assert result.end == "failed" and "shut down" in message and "signal" not in message
        assert "Traceback" not in server.log()


def test_of_two_servers_for_a_port_one_is_refused_at_once() -> None:
    with sockets.bind("127.0.0.1", 0) as first:
        with pytest.raises(ConfigError, match="in use"):
            sockets.bind(*first.getsockname())
        socket.create_connection(first.getsockname()).close()  # it listens


def test_of_four_servers_for_a_unix_socket_three_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    code = "import sys, time; from octavo.server.sockets import bind; sock = bind('', 0, sys.argv[1]); time.sleep(60)"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # all see it, and want to remove it
    racers = [subprocess.Popen([sys.executable, "-c", code, str(path)], stderr=subprocess.PIPE, text=True) for _ in range(4)]
    until(lambda: sum(each.poll() is not None for each in racers) == 3, 30)
    winner = next(each for each in racers if each.poll() is None)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
    winner.kill()
    winner.communicate()
    assert all("another process serves on" in each.communicate()[1] for each in racers if each is not winner)


def test_a_server_removes_its_own_socket_only(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with sockets.bind("", 0, str(path)), socket.socket(socket.AF_UNIX) as other:
        path.unlink()
        other.bind(str(path))
        sockets.remove_files()
        assert path.exists()
    path.unlink()
    with sockets.bind("", 0, str(path)):
        sockets.remove_files()
        assert not path.exists()


@pytest.mark.parametrize(("stage", "ends"), [
    ("socket", (signal.SIGTERM,)), ("socket", (signal.SIGINT,)), ("folder", (signal.SIGTERM, signal.SIGTERM)), ("folder", (signal.SIGKILL,)),
    ("ready", (signal.SIGTERM, signal.SIGTERM)), ("ready", (signal.SIGKILL,)),
])
def test_no_end_leaves_files(tiny: str, tmp_path: Path, stage: str, ends: tuple[int, ...]) -> None:
    path, temp = tmp_path / "s", tmp_path / "t"
    temp.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", "serve", tiny, *NAME, "--uds", str(path)], env=os.environ | {"TMPDIR": str(temp)}, stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    if stage == "ready":
        assert any("ready at" in line for line in process.stderr)
    else:
        until(lambda: path.exists() if stage == "socket" else list(temp.glob("octavo-*/engine")), 30)
        if signal.SIGKILL in ends:  # before there is an engine process, nobody is left to remove anything
            until(lambda: any(task.read_text() for task in Path(f"/proc/{process.pid}/task").glob("*/children")), 30)
    for number in ends:
        process.send_signal(number)
    process.wait(30)
    told = process.stderr.read()
    until(lambda: not list(temp.glob("octavo-*")), 30)
    assert "Traceback" not in told and (signal.SIGKILL in ends or not path.exists())


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="the system does not tell when bytes came")
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_request_arrives_when_its_bytes_do_not_when_they_are_read(loop: Callable[[], asyncio.AbstractEventLoop], kept: bool) -> None:
    arrivals: list[float] = []

    async def app(scope, receive, send) -> None:
        arrivals.append(scope["state"]["arrival"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def run() -> None:
        sock = sockets.bind("127.0.0.1", 0)
        server = http.make_server(app, lambda: False)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        with socket.create_connection(sock.getsockname()) as client:
            client.setblocking(False)
            for place in range(1 + kept):
                client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                sent = time.monotonic()
                time.sleep(0.3)  # the loop is busy
                while len(arrivals) == place:
                    await asyncio.sleep(0.01)
                assert arrivals[-1] < sent + 0.02, "later than a clock tick of the system"
                await asyncio.sleep(0.05)
                assert client.recv(1000).startswith(b"HTTP/1.1 200")
        server.should_exit = True
        await serving

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


def test_a_socket_that_tells_nothing_arrives_now(tmp_path: Path) -> None:
    async def run() -> None:
        app_sock = sockets.bind("", 0, str(tmp_path / "s"))
        seen: list[float] = []

        async def app(scope, receive, send) -> None:
            seen.append(scope["state"]["arrival"])
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

        server = http.make_server(app, lambda: False)
        serving = asyncio.create_task(server.serve(sockets=[app_sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        before = time.monotonic()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "s"))
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            while not seen:
                await asyncio.sleep(0.01)
        assert before <= seen[0] <= time.monotonic()
        server.should_exit = True
        await serving
        sockets.remove_files()

    asyncio.run(run())
