"""The load client against a server that sends exactly the bytes it is told, in the pieces it is told."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from tests.checkpoints import make_tiny

from octavo.bench.serve_client import Job, Result, drive, run, text_of, token_times
from octavo.bench.server import Server

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}, ensure_ascii=False).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextmanager
def saying(*pieces: bytes, hold: bool = False) -> Iterator[tuple[str, list[bytes]]]:
    """A server that answers each connection with these pieces. Yields its address and what it was sent."""
    heard: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):  # the client may leave first
                heard.append(connection.recv(65536))
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(0.002)
                while hold and connection.recv(1024):
                    pass

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", heard
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def one(url: str, drop_after: int | None = None) -> Result:
    return next(drive(url, [Job("k", "/p", {"x": "é"}, drop_after)], 1, "secret"))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_a_stream_cut_anywhere(size: int) -> None:
    """Chunks that are no events, events over several chunks, bytes in pieces of every size."""
    body = event("Ä1") + b": comment\n\n" + event("☕") + event("") + b"data: [DONE]\n\n"
    wire = STREAM + b"".join(chunk(body[at : at + 11]) for at in range(0, len(body), 11)) + b"0\r\n\r\n"
    with saying(*(wire[at : at + size] for at in range(0, len(wire), size))) as (url, heard):
        result = one(url)
    assert (result.key, result.status, result.end, text_of(result)) == ("k", 200, "done", "Ä1☕")
    assert len(result.stamps) == len(result.events) == 3 and len(token_times(result)) == 2
    assert result.sent <= result.stamps[0] <= result.stamps[-1] <= result.ended
    assert b"POST /p HTTP/1.1" in heard[0] and b"Authorization: Bearer secret" in heard[0]


def test_how_a_stream_can_end() -> None:
    for rest, end in ((b"0\r\n\r\n", "failed"), (b"", "broken"), (chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", "done")):
        with saying(STREAM, chunk(event("a")), rest) as (url, _):
            result = one(url)
        assert (result.end, len(result.events)) == (end, 1)
    with saying(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nfull") as (url, _):
        result = one(url)
        assert (result.end, result.status, result.events) == ("done", 429, ["full"])
    with saying() as (url, _):
        assert one(url).end == "broken"


def test_a_client_that_leaves() -> None:
    with saying(STREAM, *(chunk(event(str(place))) for place in range(5)), hold=True) as (url, _):
        result = one(url, drop_after=2)
        assert (result.end, text_of(result)) == ("dropped", "01")
        assert one(url, drop_after=0).end == "dropped"


def test_many_at_once_in_a_process_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Against the real server; the answers come in the jobs' order under the jobs' keys."""
    path = make_tiny(tmp_path_factory.mktemp("bench") / "tiny")
    jobs = [Job(["key", place], "/v1/completions", {"model": "m", "prompt": [5 + place], "max_tokens": 3 + place % 4, "stream": True,
                                                    "ignore_eos": True, "temperature": 0, "return_token_ids": True}) for place in range(12)]
    with Server(str(path), "--served-model-name", "m") as server:
        results, cpu = run(server.url, jobs, 5)
        again, _ = run(server.url, jobs, 12)
    assert [result.key for result in results] == [["key", place] for place in range(12)] and 0 < cpu < 5
    for place, result in enumerate(results):
        ids = [token for each in result.events for choice in json.loads(each)["choices"] for token in choice.get("token_ids") or ()]
        assert result.end == "done" and len(ids) == 3 + place % 4
    assert [text_of(result) for result in results] == [text_of(result) for result in again]


def test_the_comparison_with_offline_runs(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from octavo.bench import serve_ratio

    path = make_tiny(tmp_path_factory.mktemp("ratio") / "tiny")
    monkeypatch.setattr("sys.argv", ["x", str(path), "--rounds", "1", "--clients", "4", "--tokens", "8", "--max-num-seqs", "4"])
    serve_ratio.main()
    out = capsys.readouterr().out
    rows = {line[2:28].strip(): line[28:].split() for line in out.splitlines()}
    assert rows["same text as offline"] == ["yes"]
    assert float(rows["ratio (median of pairs)"][0]) > 0 and float(rows["offline"][0]) > 0 and "4 streaming clients" in rows


def test_a_round_whose_streams_came_at_once_is_reported() -> None:
    from octavo.bench import serve_ratio

    one = {
        "offline_seconds": 1.0, "seconds": 2.0, "cpu_seconds": 0.5, "same": True, "events": 4, "ttft": 0.5, "server_ttft": 0.25,
        "itl": 0.0, "server_itl": 0.001, "itl_median": 0.0, "itl_max": 0.0,
    }
    rows = {line[2:28].strip(): line[28:].strip() for line in serve_ratio.report([one, one], 8, 4).splitlines()}
    assert rows["inter-token time, mean"] == "0.00 ms client     1.00 ms server, – % (–, –)"
    assert rows["time to first token, mean"] == "500.00 ms client   250.00 ms server, -50.0 % (-50.0, -50.0)"
