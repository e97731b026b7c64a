"""octavo chat through pipes, with a model in the process and with servers of our own making."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests.cli.conftest import Octavo

from octavo.bench.server import Server
from octavo.cli.remote import Remote
from octavo.errors import ConfigError, RemoteError


@contextmanager
def openai_like(*events: Any, status: int = 200, models: Any = None, close_early: bool = False) -> Iterator[tuple[str, list[Any]]]:
    """A server that answers every chat with these events. Yields its address and what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"], None))
            self._send(200, json.dumps(models if models is not None else {"data": [{"id": "served-1"}, {"id": "b"}]}))

        def do_POST(self) -> None:
            asked.append((self.path, self.headers["Authorization"], json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            if status != 200:
                self._send(status, events[0] if isinstance(events[0], str) else json.dumps(events[0]))
                return
            text = "".join(f"data: {each if isinstance(each, str) else json.dumps(each)}\n\n" for each in events)
            self._send(200, ": a comment\n\n" + text + ("" if close_early else "data: [DONE]\n\n"))

        def _send(self, code: int, text: str) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


USAGE = {"choices": [], "usage": {"completion_tokens": 9}}


def test_a_conversation_with_a_model_here(octavo: Octavo, tiny: str) -> None:
    lines = "/again\nhello\n/again\n/nonsense\n/system be brief\nhello\n/clear\n/help\n/exit\nnot reached\n"
    done = octavo("chat", tiny, "--max-tokens", "4", "--temperature", "0", stdin=lines)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tokens, first after") == 3 and "nothing to repeat yet" in done.stderr and "no command /nonsense" in done.stderr
    first, again, *_ = done.stdout.splitlines() or [""]
    assert first == again and len(done.stdout.splitlines()) >= 3  # the same turn, greedy: the same answer


def test_a_turn_that_does_not_fit_is_taken_back(octavo: Octavo, tiny: str) -> None:
    done = octavo("chat", tiny, "--max-tokens", "3", "--temperature", "0", stdin="word " * 3000 + "\nhello\n")
    alone = octavo("chat", tiny, "--max-tokens", "3", "--temperature", "0", stdin="hello\n")
    assert done.returncode == 0 and "/clear starts anew" in done.stderr and done.stdout.splitlines()[-1] == alone.stdout.splitlines()[-1]


def test_a_conversation_with_a_server(octavo: Octavo) -> None:
    with openai_like(delta("Guten "), delta("Tag ☕"), {"choices": [{"delta": {}, "finish_reason": "stop"}]}, USAGE) as (url, asked):
        done = octavo("chat", "--url", url, "--system", "S", "--max-tokens", "7", "--top-k", "3", stdin="hi\nagain\n", env={"OCTAVO_API_KEY": "k1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Guten Tag ☕\nGuten Tag ☕\n" and done.stderr.count("[9 tokens, first after") == 2
    assert asked[0][:2] == ("/v1/models", "Bearer k1")
    path, key, body = asked[2]
    assert (path, key) == ("/v1/chat/completions", "Bearer k1")
    assert body == {
        "model": "served-1", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 7, "top_k": 3,
        "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Guten Tag ☕"},
                     {"role": "user", "content": "again"}],
    }


def test_a_refused_turn_is_taken_back_and_the_conversation_goes_on(octavo: Octavo) -> None:
    with openai_like({"error": {"message": "too many tokens"}}, status=400) as (url, asked):
        done = octavo("chat", "--url", url, "--model", "m", stdin="one\ntwo\n")
    assert done.returncode == 1 and done.stderr.count("answered 400: too many tokens") == 2
    assert [len(body["messages"]) for _, _, body in asked] == [1, 1]


@pytest.mark.parametrize(("given", "says"), [
    ({"events": (delta("a"),), "close_early": True}, "closed the connection in the middle"),
    ({"events": (delta("a"), {"error": {"message": "the engine died"}})}, "ended the answer with an error: the engine died"),
    ({"events": ("{not json",)}, "no JSON object"),
    ({"events": ("<html>",), "status": 502}, "answered 502: Bad Gateway"),
])
def test_what_a_server_can_do_wrong(given: dict[str, Any], says: str) -> None:
    with openai_like(*given.pop("events"), **given) as (url, _), pytest.raises(RemoteError, match=says):
        list(Remote(url, model="m").stream_chat([{"role": "user", "content": "x"}], {}))


def test_the_model_list_is_checked() -> None:
    for models, says in (({"data": []}, "serves no model"), ({"nothing": 1}, "does not answer"), ([], "does not answer")):
        with openai_like(models=models) as (url, _), pytest.raises(RemoteError, match=says):
            Remote(url)


def test_addresses(octavo: Octavo) -> None:
    with openai_like(delta("x")) as (url, asked):
        for form in (url, url + "/", url + "/v1", url.removeprefix("http://"), url + "/v1/"):
            assert [piece.text for piece in Remote(form, model="m").stream_chat([], {})] == ["x"]
        assert {path for path, _, _ in asked} == {"/v1/chat/completions"}
    for bad in ("ftp://x", "http://", "http://x:port"):
        with pytest.raises(ConfigError):
            Remote(bad, model="m")
    with pytest.raises(RemoteError, match=r"cannot reach http://127\.0\.0\.1:9: Connection refused"):
        Remote("http://127.0.0.1:9")
    done = octavo("chat", "--url", "127.0.0.1:9", stdin="hi\n")
    assert done.returncode == 1 and done.stderr == "octavo: cannot reach http://127.0.0.1:9: Connection refused\n"


@pytest.mark.parametrize(("args", "says"), [
    ((), "give a MODEL to load here, or --url"), (("m", "--model", "x"), "--model names a model of a server"),
    (("--url", "http://h", "--num-threads", "2"), "the server's own settings hold"), (("a", "--url", "http://h", "--model", "b"), "two model names"),
])
def test_contradictions(octavo: Octavo, args: tuple[str, ...], says: str) -> None:
    done = octavo("chat", *args)
    assert done.returncode == 2 and says in done.stderr


def test_a_server_of_our_own_answers_as_the_model_here_does(octavo: Octavo, tiny: str) -> None:
    args = ("--max-tokens", "12", "--temperature", "0")
    here = octavo("chat", tiny, *args, stdin="hello\nand then?\n")
    with Server(tiny, "--served-model-name", "a", "--served-model-name", "b", "--api-key", "k1", "--api-key", "k2") as server:
        for more in (("--api-key", "k1"), ("--api-key", "k2", "--model", "b")):
            there = octavo("chat", "--url", server.url, *args, *more, stdin="hello\nand then?\n")
            assert there.stdout == here.stdout and there.stderr.count("[12 tokens, first after") == 2, there.stderr
        assert "API key" in octavo("chat", "--url", server.url, stdin="hello\n").stderr
        assert server.request("GET", "/metrics")[0] == 401 and server.request("GET", "/metrics", key="k2")[0] == 200
        assert server.request("GET", "/health")[0] == 200
        assert "hello" not in server.log()  # prompts are not logged


def test_a_key_that_no_header_can_carry() -> None:
    with pytest.raises(ConfigError, match="no HTTP header can carry"):
        Remote("http://127.0.0.1:1", "a\nb", "m")
