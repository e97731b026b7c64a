"""The life of a server process: take the socket, start the engine, serve, drain, end.

The engine's process starts first and loads while this one imports the web framework. The socket is taken before both, so that
a port in use costs no load.

How it ends:

- SIGTERM or SIGINT: new connections are refused, open requests finish, for at most ``shutdown_timeout`` seconds; what is
  left then is aborted, which its clients are told in a proper end. Exit status 0. Nobody waits for requests that are not whole,
  nor for clients that do not read (server/http.py). After the time-out, an engine that answers takes no second, one that does
  not is killed; all in all the end comes ``PATIENCE + STOP_SECONDS + FLUSH`` and a second for handlers later at most.
- A second signal: at once, with status 128 + signal.
- The engine's process dies: open requests end with an error, /health and new requests get 503. The engine cannot come back
  here, so after ``LINGER`` seconds, enough for a load balancer's check to see the 503, the process ends with status 1 and leaves
  the restart to its supervisor.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import TYPE_CHECKING, Any

from octavo.errors import WorkerDied
from octavo.server.sockets import address_of, remove_files

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncLLM
    from octavo.server.http import Server
    from octavo.server.settings import ServerSettings

LOGGER = logging.getLogger("octavo")
LINGER = 5.0  # seconds that a server without an engine goes on answering 503
PATIENCE = 1.0  # seconds in which an engine that is well has ended what it was told to abort
FLUSH = 2.0  # seconds for what is ended to reach slow readers


def end_on_signals(clear: Callable[[], None] = lambda: None) -> None:
    """Until run() takes over: let SIGTERM end this process with nothing left behind. ``clear`` is called first.

    SIGINT is Python's KeyboardInterrupt already.
    """

    def end(number: int, frame: FrameType | None) -> None:
        clear()
        _end_now(number)

    signal.signal(signal.SIGTERM, end)


def clean_up() -> None:
    """Remove the files that this process would leave behind: its socket, and the folder it shares with the engine's process."""
    remove_files()
    if process := sys.modules.get("octavo.engine.process"):  # not imported for this
        process.remove_folders()


def run(llm: "AsyncLLM", settings: "ServerSettings", sock: socket.socket, *, shutdown_timeout: float, ready: Callable[[str], None]) -> int:
    """Serve until a signal or the engine's death. Returns the exit status. ``ready`` hears the address.

    Raises: what starting the engine raises.
    """
    import uvloop

    try:
        return uvloop.run(_Life(llm, settings, sock, shutdown_timeout).run(ready))
    finally:
        remove_files()
        sock.close()


class _Life:
    """One server from start to end."""

    def __init__(self, llm: "AsyncLLM", settings: "ServerSettings", sock: socket.socket, shutdown_timeout: float) -> None:
        self._llm = llm
        self._settings = settings
        self._sock = sock
        self._timeout = shutdown_timeout
        self._told = asyncio.Event()  # a signal came
        self._signal = 0
        self._over = False  # the time-out is: nothing need wait for answers that are made

    async def run(self, ready: Callable[[str], None]) -> int:
        """All of it; the engine is gone at the end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        log = None
        try:
            # The web framework: while the engine's process loads.
            from octavo.observe.metrics import Metrics
            from octavo.observe.traffic import Traffic
            from octavo.server.app import create_app
            from octavo.server.http import make_server

            if not await self._unless_told(self._llm.start()):
                return 128 + self._signal
            metrics = Metrics((*self._settings.served_model_names, self._llm.config.model.model)[0], self._llm.config)
            self._llm.listeners.append(metrics)
            server = make_server(create_app(self._llm, self._settings, metrics), lambda: self._llm.num_open > 0 and not self._over)
            gc.collect()
            gc.freeze()  # what start-up made lives as long as the process: no collection need walk it
            serving = asyncio.create_task(server.serve(sockets=[self._sock]), name="http")
            while not server.started:
                await asyncio.wait((serving,), timeout=0.01)
                self._check(serving)
            ready(address_of(self._sock))
            log = asyncio.create_task(Traffic(metrics, LOGGER).run(), name="log line")
            return await self._until_over(server, serving)
        finally:
            if log is not None:
                log.cancel()
            await self._llm.shutdown()

    async def _until_over(self, server: "Server", serving: "asyncio.Task[None]") -> int:
        """Wait for a reason to end, and end. Returns the exit status."""
        told, dead = asyncio.create_task(self._told.wait()), asyncio.create_task(self._llm.on_death.wait())
        await asyncio.wait((told, dead, serving), return_when=asyncio.FIRST_COMPLETED)
        self._check(serving)
        drain, status = self._timeout, 0
        if dead.done() and not told.done():
            LOGGER.error("%s; answering 503 for %.0f s, then ending with status 1", self._llm.failure, LINGER)
            await asyncio.wait((told,), timeout=LINGER)
            drain, status = 0.0, 1
        else:
            LOGGER.info("%s: refusing new connections, finishing %d open requests (for at most %g s; a second signal ends at once)",
                        signal.Signals(self._signal).name, self._llm.num_open, drain)
        remove_files()  # while the socket is open
        server.should_exit = True  # the socket closes, idle connections too, busy ones after their answer
        await asyncio.wait((serving, dead), timeout=drain, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            self._over = True
            if self._llm.num_open and not dead.done():
                LOGGER.warning("aborting %d requests that are still open", self._llm.num_open)
                await self._llm.abort_all()
                await asyncio.wait((serving,), timeout=PATIENCE)
                if self._llm.num_open:
                    LOGGER.warning("the engine does not answer: ending it, and %d requests with it", self._llm.num_open)
                    await self._llm.shutdown()
            await asyncio.wait((serving,), timeout=FLUSH)
            server.force_exit = True
            await asyncio.wait((serving,))
        for task in (told, dead):
            task.cancel()
        return status

    async def _unless_told(self, work: Coroutine[Any, Any, None]) -> bool:
        """Await ``work`` unless a signal comes first; whether it was done."""
        task, told = asyncio.create_task(work), asyncio.create_task(self._told.wait())
        await asyncio.wait((task, told), return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
            return False
        await task
        return True

    def _on_signal(self, number: int) -> None:
        if self._told.is_set():
            LOGGER.warning("%s again: ending at once", signal.Signals(number).name)
            _end_now(number)
        self._signal = number
        self._told.set()

    def _check(self, serving: "asyncio.Task[None]") -> None:
        """Say why the HTTP server ended by itself, if it did. Raises: WorkerDied."""
        if serving.done():
            error = serving.exception()
            raise WorkerDied(f"the HTTP server ended by itself: {error!r}") from error


def _end_now(number: int) -> None:
    """End for a signal's sake; the engine's process ends by itself when this one is gone."""
    clean_up()
    os._exit(128 + number)
