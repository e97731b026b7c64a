"""The life of a server process: take the socket, start the engine, serve, drain, end.

The engine's process starts first and loads while this one imports the web framework. The socket is taken before both, so that
a port in use costs no load; it listens only once the engine is ready.

How it ends:

- SIGTERM or SIGINT: new connections are refused, open requests finish, for at most ``shutdown_timeout`` seconds; what is
  left then is aborted, which its clients are told in a proper end. Exit status 0.
- A second signal: at once, with status 128 + signal.
- The engine's process dies: open requests end with an error, /health and new requests get 503. The engine cannot come back
  here, so after ``LINGER`` seconds, enough for a load balancer's check to see the 503, the process ends with status 1 and leaves
  the restart to its supervisor.
"""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import stat
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError, WorkerDied

if TYPE_CHECKING:
    import uvicorn

    from octavo.engine.async_engine import AsyncLLM
    from octavo.server.settings import ServerSettings

LOGGER = logging.getLogger("octavo")
LINGER = 5.0  # seconds that a server without an engine goes on answering 503
FLUSH = 5.0  # seconds for what is ended to reach slow readers
KEEP_ALIVE = 65  # seconds; longer than clients keep idle connections (5 to 60), so that theirs is the closing side
BACKLOG = 2048


def bind(host: str, port: int, uds: str | None = None) -> socket.socket:
    """A bound socket that does not listen yet. Raises: ConfigError when the address is in use or impossible."""
    if uds is not None:
        return _bind_path(uds)
    if not 0 <= port <= 65535:
        raise ConfigError(f"port must be between 0 and 65535, not {port}", "port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r}: {getattr(error, 'strerror', None) or error}", "host") from None
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _refused(error, host, port) from None
    return sock


def address_of(sock: socket.socket) -> str:
    """Where the socket is, as people and clients write it."""
    name = sock.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host = f"[{name[0]}]" if sock.family == socket.AF_INET6 else name[0]
    return f"http://{host}:{name[1]}"


def run(llm: "AsyncLLM", settings: "ServerSettings", sock: socket.socket, *, shutdown_timeout: float, ready: Callable[[str], None]) -> int:
    """Serve until a signal or the engine's death. Returns the exit status. ``ready`` hears the address.

    Raises: what starting the engine raises.
    """
    import uvloop

    path = sock.getsockname() if sock.family == socket.AF_UNIX else None
    try:
        return uvloop.run(_Life(llm, settings, sock, path, shutdown_timeout).run(ready))
    finally:
        sock.close()
        _remove(path)


class _Life:
    """One server from start to end."""

    def __init__(self, llm: "AsyncLLM", settings: "ServerSettings", sock: socket.socket, path: str | None, shutdown_timeout: float) -> None:
        self._llm = llm
        self._settings = settings
        self._sock = sock
        self._path = path
        self._timeout = shutdown_timeout
        self._told = asyncio.Event()  # a signal came
        self._signal = 0

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

            if not await self._unless_told(self._llm.start()):
                return 128 + self._signal
            metrics = Metrics((*self._settings.served_model_names, self._llm.config.model.model)[0], self._llm.config)
            self._llm.listeners.append(metrics)
            server = _server(create_app(self._llm, self._settings, metrics))
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

    async def _until_over(self, server: "uvicorn.Server", serving: "asyncio.Task[None]") -> int:
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
        server.should_exit = True  # the socket closes, idle connections too, busy ones after their answer
        await asyncio.wait((serving, dead), timeout=drain, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            if self._llm.num_open and not dead.done():
                LOGGER.warning("aborting %d requests that are still open", self._llm.num_open)
                await self._llm.abort_all()
            await asyncio.wait((serving,), timeout=FLUSH)
            server.force_exit = True
            await asyncio.wait((serving,), timeout=1)
        for task in (told, dead, serving):
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
            _remove(self._path)
            os._exit(128 + number)  # the engine's process ends by itself when this one is gone
        self._signal = number
        self._told.set()

    def _check(self, serving: "asyncio.Task[None]") -> None:
        """Say why the HTTP server ended by itself, if it did. Raises: ConfigError, WorkerDied."""
        if not serving.done():
            return
        error = serving.exception()
        if isinstance(error, OSError) and self._path is None:  # another process began to listen while the engine loaded
            raise _refused(error, *self._sock.getsockname()[:2]) from error
        raise WorkerDied(f"the HTTP server ended by itself: {error!r}") from error


def _server(app: Any) -> "uvicorn.Server":
    import uvicorn

    theirs = logging.getLogger("uvicorn")
    theirs.handlers, theirs.propagate = LOGGER.handlers, False

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # they are ours

    return Server(uvicorn.Config(
        app, loop="none", http="httptools", ws="none", lifespan="off", log_config=None, log_level="warning", access_log=False,
        server_header=False, backlog=BACKLOG, timeout_keep_alive=KEEP_ALIVE,
    ))


def _bind_path(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise ConfigError(f"{path} exists and is no socket", "uds")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) == 0:
                    raise ConfigError(f"another process serves on {path}", "uds")
            os.unlink(path)  # left behind by a server that was killed
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot make the socket {path}: {error.strerror or error}", "uds") from None
    except ConfigError:
        sock.close()
        raise
    return sock


def _refused(error: OSError, host: str, port: int) -> ConfigError:
    """The system's refusal, for people."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} on {host} is in use by another process: give another one, or 0 for any that is free", "port")
    if error.errno == errno.EACCES:
        return ConfigError(f"port {port} needs more rights than this process has; ports from 1024 on do not", "port")
    return ConfigError(f"cannot take port {port} on {host}: {error.strerror or error}", "host")


def _remove(path: str | None) -> None:
    if path is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
