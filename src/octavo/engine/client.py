"""EngineClient: what AsyncLLM speaks to. Here: the one over an engine process; tests have scripted ones."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import msgspec
import zmq

from octavo.engine.console import LOGGER
from octavo.engine.messages import Begin, End, FromEngine, LastWords, Ready, Shutdown, ToEngine, decode_from_engine, decode_last_words, encode
from octavo.engine.process import EngineHandle
from octavo.errors import OctavoError, WorkerDied

GRACE = 0.1  # seconds after the process' end in which its last batches may still come in
HINTS = {signal.SIGKILL: " (out of memory?)", signal.SIGBUS: " (a file that was mapped, as packed weights are, was cut short, or its disk failed?)"}
TURN = 0.005  # seconds of the event loop's time that messages may take at once
STOP_SECONDS = 2.0  # that an engine has to end by itself
KEEP_SECONDS = 120.0  # more, for one that says that it is writing its cache to a disk


class EngineClient(Protocol):
    """The way to an engine and back, on one event loop."""

    def attach(self, on_message: Callable[[FromEngine], None], on_end: Callable[[OctavoError], None]) -> None:
        """Begin to hand over what comes, on the running event loop, in order. ``on_end`` comes last, once, with the reason."""

    def send(self, message: ToEngine) -> None:
        """Send a message; never blocks. Messages to an engine that has ended are lost: ``on_end`` tells."""

    async def stop(self) -> None:
        """End the engine, in good order if it can; ``on_end`` has been called when this returns. May be called twice."""


class ProcessClient:
    """The client of an engine process. No thread and no task: the event loop watches two file descriptors."""

    def __init__(self, handle: EngineHandle) -> None:
        self._handle = handle
        self._socket = handle.socket
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[FromEngine], None] = lambda message: None
        self._on_end: Callable[[OctavoError], None] = lambda error: None
        self._last = b""
        self._ended: asyncio.Event | None = None
        self._started = self._closed = self._killed = False
        self._in_phase = False  # it has told the beginning of something, and not its end

    def attach(self, on_message: Callable[[FromEngine], None], on_end: Callable[[OctavoError], None]) -> None:
        """Watch the socket and the process."""
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self._on_message, self._on_end = on_message, on_end
        self._loop.add_reader(self._socket.fileno(), self._read_socket)
        self._loop.add_reader(self._handle.words, self._read_words)
        self._loop.call_soon(self._read_socket)  # what is there already makes no edge

    def send(self, message: ToEngine) -> None:
        """Send without blocking: the queue to the engine has no bound of its own."""
        frame = encode(message)
        if self._closed:
            return
        with suppress(zmq.Again):  # the peer is gone, and its pipe is about to tell
            self._socket.send(frame, zmq.NOBLOCK)
        # ZMQ's descriptor tells of a change once, and a send may be what swallows it.
        if self._loop is not None and self._socket.get(zmq.EVENTS) & zmq.POLLIN:
            self._loop.call_soon(self._read_socket)

    async def stop(self) -> None:
        """Ask the process to end and, where it does not or still loads, kill it."""
        if self._ended is None or self._closed:  # never attached, or over
            self._close()
            return
        if self._started:
            self.send(Shutdown())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), STOP_SECONDS)
            if self._in_phase:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), KEEP_SECONDS)
        if not self._ended.is_set():
            self._killed = True
            self._handle.process.kill()
            await self._ended.wait()

    def _read_socket(self) -> None:
        assert self._loop is not None
        until = self._loop.time() + TURN
        while self._read_one():
            if self._loop.time() > until:
                self._loop.call_soon(self._read_socket)  # others first
                return

    def _read_one(self) -> bool:
        """Hand a message over; False when none is there."""
        if self._closed:
            return False
        try:
            frame = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        try:
            message = decode_from_engine(frame)
            self._started = self._started or isinstance(message, Ready)
            if isinstance(message, Begin | End):
                self._in_phase = isinstance(message, Begin)
            self._on_message(message)
        except Exception:  # a bug on this side; the engine's other news must still come through
            LOGGER.exception("a message from the engine could not be handled")
        return True

    def _read_words(self) -> None:
        data = os.read(self._handle.words, 65536)
        self._last += data
        if not data:
            assert self._loop is not None
            self._loop.remove_reader(self._handle.words)
            self._loop.call_later(GRACE, self._end)

    def _end(self) -> None:
        if self._closed:
            return
        while self._read_one():
            pass
        error = self._reason()
        self._close()
        self._on_end(error)
        assert self._ended is not None
        self._ended.set()

    def _reason(self) -> OctavoError:
        """Why the process ended: by its own words or, failing that, by its exit status."""
        if self._last:
            try:
                words = decode_last_words(self._last)
            except msgspec.MsgspecError:
                words = LastWords("WorkerDied", "the engine process ended in the middle of its last words")
            return WorkerDied("the engine was shut down") if words.kind is None else words.error()
        if self._killed:
            return WorkerDied("the engine was shut down")
        code = self._handle.process.wait()  # its pipe is closed: it is gone, or will be in no time
        how = f"was killed by signal {-code}{HINTS.get(-code, '')}" if code < 0 else f"ended with status {code}"
        return WorkerDied(f"the engine process (pid {self._handle.process.pid}) {how}")

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_reader(self._handle.words)
        self._handle.close()
