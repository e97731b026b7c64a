"""Server-sent events over ASGI: sends as fast as the client reads, ends when it goes, and tells a failure as its last event."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.errors import INTERNAL, api_error
from octavo.server.merge import Disconnected, while_connected

DONE = b"data: [DONE]\n\n"
LOGGER = logging.getLogger("octavo.server")


class EventStream(Response):
    """A response that is still being made. ``close`` is awaited on every way out."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything. ``send`` waits while the client's socket is full; the engine's news coalesce meanwhile."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with suppress(Disconnected):
                await while_connected(receive, self._send_all(send))
        finally:
            await self._close()

    async def _send_all(self, send: Send) -> None:
        try:
            async with aclosing(self._events) as events:  # type: ignore[type-var]
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            failure = api_error(error)
            if failure is None:
                LOGGER.exception("a stream broke off")
            body = (failure or INTERNAL).body()
            await send({"type": "http.response.body", "body": b"data: " + body + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
