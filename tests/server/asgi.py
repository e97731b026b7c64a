"""A client for an app without sockets, and the events of a stream."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def client(app: Any, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://octavo.test", headers=headers)


def events(response: httpx.Response) -> list[Any]:
    """The JSON of each event; the end mark as text."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8" and "content-length" not in response.headers
    blocks = response.text.split("\n\n")
    assert blocks.pop() == "" and all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


def joined(chunks: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream, of either API."""
    texts = []
    for choice in [choice for chunk in chunks if isinstance(chunk, dict) for choice in chunk["choices"]]:
        if choice["index"] == index:
            texts.append(choice["delta"].get("content") or "" if "delta" in choice else choice["text"])
    return "".join(texts)


class Wire:
    """One request by hand: what the app sends is read when the test wants, and the client can go at any time."""

    def __init__(self, app: Any, path: str, body: Any, *, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._incoming: asyncio.Queue[Any] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": data, "more_body": False})
        self.sent: asyncio.Queue[Any] = asyncio.Queue()
        self.reading = asyncio.Event()  # a slow reader's socket is full until this is set
        self.reading.set()
        given = {"content-type": "application/json", **(headers or {})}
        self.scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "server": ("octavo.test", 80), "client": ("10.0.0.1", 1),
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()], "state": {},
        }
        self.task = asyncio.ensure_future(app(self.scope, self._incoming.get, self._send))

    async def _send(self, message: Any) -> None:
        await self.reading.wait()
        self.sent.put_nowait(message)

    def go(self) -> None:
        """The client disconnects."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def bodies(self) -> AsyncIterator[bytes]:
        """The body's parts as they are sent."""
        while True:
            message = await asyncio.wait_for(self.sent.get(), 5)
            if message["type"] == "http.response.body":
                if message.get("body"):
                    yield message["body"]
                if not message.get("more_body"):
                    return


async def settled(check: Any, seconds: float = 5.0) -> None:
    """Wait until ``check()`` is true."""
    end = asyncio.get_running_loop().time() + seconds
    while not check():
        assert asyncio.get_running_loop().time() < end, "did not come to be in time"
        await asyncio.sleep(0.002)
