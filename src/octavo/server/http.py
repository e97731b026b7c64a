"""uvicorn's server and HTTP protocol, with bounds on what a connection may send and hold, and an end that takes no longer than told.

Why here and not in the app: a request's head is held in memory before the app, and with it the API key's check, sees anything.
"""

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.server.errors import ApiError
from octavo.server.sockets import BACKLOG

LOGGER = logging.getLogger("octavo")
KEEP_ALIVE = 65  # seconds; longer than clients keep idle connections (5 to 60), so that theirs is the closing side
MOST_HEAD = 64 * 1024  # bytes of a request line with its headers, or of what lies between a body's parts
HEAD_SECONDS = 60.0  # from a connection's or request's first moment to the end of its head
BODY_SECONDS = 300.0  # from the head's end to the body's
LINGER_SECONDS = 30.0  # that a client which was answered in the middle of its request may take to send the rest of it, which is dropped
MOST_DROPPED = 64 * 2**20  # bytes of such a rest
STALL_SECONDS = 1.0  # at the end: what a client may take to finish its request, or to read some more of its answer
POLL_SECONDS = 0.05  # between two looks at what still has to end
TASK_SECONDS = 1.0  # for handlers whose connections are closed

LAST_DATA_RECV = 52  # place of tcpi_last_data_recv (milliseconds, 32 bits) in Linux's struct tcp_info
IDLE, HEAD, BODY = range(3)
_REFUSALS = {
    400: "this is no HTTP request", 408: "the request did not come in time", 503: "the server is shutting down",
    431: f"the request line and the headers may have {MOST_HEAD} bytes at most",
}


class Protocol(HttpToolsProtocol):
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, not for ever."""
        super().connection_made(transport)
        self._stage = IDLE  # of the request that comes in; the answer to one before it may be under way
        self._head = 0  # bytes of its request line and headers, trailers included
        self._held = 0  # bytes since the parser last handed anything on
        self._timer: asyncio.TimerHandle | None = None
        self._ended: float | None = None  # since when nothing more is answered here, and all that comes is dropped
        sock = transport.get_extra_info("socket")
        self._tcp = sock if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_INFO") else None
        self._unsent, self._moved = 0, 0.0  # what the client had not read when last looked at, and when that changed
        self._arm(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """No clock runs on."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, within the bounds. What is wrong is told to the client alone: anybody could fill the log."""
        if self._ended is not None:
            self._held += len(data)
            if self._held > MOST_DROPPED:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        self._held += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.cycle.keep_alive = False  # to what is not spoken here: the request is answered as any other, as the last one
            return
        except httptools.HttpParserError:
            self.refuse(431 if self._head > MOST_HEAD else 400)
            return
        if self._held > MOST_HEAD:
            self.refuse(431)
        elif self._timer is None and self._stage == IDLE:  # what came is no request yet
            self._arm(HEAD_SECONDS)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope["state"]["arrival"] = time.monotonic() - self._waited()
        self._stage, self._head = HEAD, 0
        self._arm(HEAD_SECONDS)

    def on_url(self, url: bytes) -> None:
        """A part of the request line."""
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        self._count(name, value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        super().on_headers_complete()
        self.cycle.transport = _Answering(self)  # type: ignore[assignment]
        self._held, self._stage = 0, BODY
        self._arm(BODY_SECONDS)

    def on_chunk_header(self) -> None:
        """A chunk begins."""
        self._held = 0

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._held = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._held, self._stage = 0, IDLE
        self._disarm()
        super().on_message_complete()

    def refuse(self, status: int) -> None:
        """Answer what has not been answered yet, and close."""
        self._ended = time.monotonic()
        self._disarm()
        cycle = self.cycle
        if self.transport.is_closing():
            return
        if cycle is not None and (cycle.response_started if self._stage == BODY else not cycle.response_complete):
            self.transport.close()  # an answer in between would be taken for a part of the one under way
            return
        body = ApiError(status, _REFUSALS[status]).body()
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            % (status, HTTPStatus(status).phrase.encode(), len(body)) + body
        )
        if cycle is not None and self._stage == BODY:
            cycle.disconnected = True  # the app shall not answer as well
            cycle.message_event.set()
        self._end_answers(STALL_SECONDS)

    def finish(self) -> None:
        """The last answer is out: close, where its request is whole; else when its client has seen it."""
        if self._stage == BODY and not self.transport.is_closing():
            self._end_answers(LINGER_SECONDS)
        else:
            self.transport.close()

    def _end_answers(self, seconds: float) -> None:
        """Closed at once, with bytes unread, the system would reset the connection, and the client might never see the answer."""
        self._disarm()
        self._ended, self._held = time.monotonic(), 0
        self.transport.write_eof()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def end(self, began: float, now: float, *, waiting: bool) -> None:
        """The server ends since ``began``: close what nobody need wait for. ``waiting``: answers may still be made.

        Closed are requests that are not whole, and answers that their clients do not read (those that are still made count only once
        no answer is).
        """
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent or self._moved < began:
            self._unsent, self._moved = unsent, now
        if self._ended is not None:
            if now - max(self._ended, began) > STALL_SECONDS:
                self.transport.abort()
            return
        if self._stage != IDLE and now - began > STALL_SECONDS and not self._waits():
            self.refuse(503)
        elif unsent and now - self._moved > STALL_SECONDS and not waiting:
            self.transport.abort()

    def _waits(self) -> bool:
        """Whether the client waits for us: for the answer to an earlier request, or for us to read on."""
        return self.flow.read_paused or (self._stage != BODY and self.cycle is not None and not self.cycle.response_complete)

    def _waited(self) -> float:
        """Seconds that the last bytes lay in the system's buffers before the event loop turned to them: a burst's waiting is the server's.

        To a clock tick of the system, a few milliseconds. 0 where the system does not tell.
        """
        if self._tcp is None:
            return 0.0
        try:
            info = self._tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_DATA_RECV + 4)
        except OSError:  # the connection is over already
            return 0.0
        return int.from_bytes(info[LAST_DATA_RECV:], sys.byteorder) / 1000 if len(info) == LAST_DATA_RECV + 4 else 0.0

    def _count(self, *parts: bytes) -> None:
        self._head += sum(map(len, parts))
        if self._head > MOST_HEAD:
            raise ValueError("the head is too large")  # which the parser makes its own error

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._too_slow, seconds)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self, seconds: float) -> None:
        self._timer = None
        if self._waits():
            self._arm(seconds)
        elif self._stage == IDLE:
            self.transport.close()
        else:
            self.refuse(408)


class _Answering:
    """A connection as uvicorn answers a request on it. It closes behind the last answer, whether its client still sends or not."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self.write, self.is_closing = protocol.transport.write, protocol.transport.is_closing

    def close(self) -> None:
        """Behind the last answer, or one that broke off."""
        self._protocol.finish()


class Server(uvicorn.Server):
    """uvicorn's, without its signal handlers and with an end of our own. ``busy`` says whether answers are still being made."""

    def __init__(self, config: uvicorn.Config, busy: Callable[[], bool]) -> None:
        super().__init__(config)
        self._busy = busy

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are run.py's."""
        yield

    async def shutdown(self, sockets: Any = None) -> None:
        """Take no more connections and wait until those there are have ended; with ``force_exit``, end them."""
        for server in self.servers:
            server.close()
        for sock in sockets or ():
            sock.close()
        state, began = self.server_state, time.monotonic()
        for connection in list(state.connections):
            connection.shutdown()
        while (state.connections or state.tasks) and not self.force_exit:
            waiting, now = self._busy(), time.monotonic()
            for connection in list(state.connections):
                connection.end(began, now, waiting=waiting)  # type: ignore[union-attr]
            await asyncio.sleep(POLL_SECONDS)
        for connection in list(state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        if state.tasks:
            _, left = await asyncio.wait(set(state.tasks), timeout=TASK_SECONDS)
            if left:
                LOGGER.warning("%d requests did not end with their connections", len(left))
                logging.getLogger("uvicorn").disabled = logging.getLogger("uvicorn.error").disabled = True  # it would show each one's stack


def make_server(app: Any, busy: Callable[[], bool]) -> Server:
    """A server for the app that is given its sockets."""
    theirs = logging.getLogger("uvicorn")
    theirs.handlers, theirs.propagate = list(LOGGER.handlers), False
    return Server(uvicorn.Config(
        app, loop="none", http=Protocol, ws="none", lifespan="off", log_config=None, log_level="warning", access_log=False,
        server_header=False, backlog=BACKLOG, timeout_keep_alive=KEEP_ALIVE,
    ), busy)
