"""The engine in a process of its own: how it is launched, and what it does.

Why it is not multiprocessing's spawn: that imports the caller's main module again, and so the web framework with it. Here
a fresh interpreter imports only this file and what computes.

Each of the two notices the other's end at once, however it comes: the child's standard input is a pipe that the parent
holds open, and a thread waits for its end; the parent waits on a pipe whose writing end only the child has, and on which
it says why it ends, if it still can.
"""

import gc
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from octavo.config import Config
from octavo.core.output import Delta
from octavo.engine import messages as m
from octavo.engine.console import LEVELS, LOGGER, show_log
from octavo.engine.core import EngineCore
from octavo.engine.report import LogReport, Report, phase
from octavo.errors import ConfigError, RequestError, WorkerDied
from octavo.scheduler.scheduler import Scheduler
from octavo.weights import hub

if TYPE_CHECKING:
    from octavo.observe.events import Event

BOOT = "import sys; sys.path[:] = sys.argv[1].split(sys.argv[2]); from octavo.engine.process import main; main(int(sys.argv[3]), sys.argv[4])"
LONGEST_ADDRESS = 100  # bytes; a Unix socket's path has room for 107 on Linux, 103 on macOS
PROGRESS_SECONDS = 0.1  # between two messages about the same transfer
KEEPING = "keeping the KV cache"  # a phase at the end, with a time of its own
FLUSH_MS = 1000  # that the last messages have to leave the process


class EngineHandle:
    """A launched engine process, as its parent sees it. Dropping it kills the process."""

    def __init__(self, process: "subprocess.Popen[bytes]", socket: Any, words: int, folder: str, path: Path) -> None:
        self.process = process
        self.socket = socket  # zmq PAIR
        self.words = words  # readable: the child's LastWords, then the end of file that is its death
        self.path = path  # of the model, on this machine
        self._clean = weakref.finalize(self, _clean, process, socket, words, folder)

    def close(self) -> None:
        """Kill the process if it lives, and give everything up. May be called twice."""
        self._clean()


def launch(config: Config, report: Report | None = None) -> EngineHandle:
    """Find the model (fetching it if need be), and start an engine process with it. Returns before that is ready.

    Raises: as hub.resolve does.
    """
    report = LogReport(LOGGER) if report is None else report
    with phase(report, "finding the model"):
        path = hub.resolve(config.model.model, config.model.revision, report.progress)
    import zmq

    folder = _private_folder()
    address = f"ipc://{folder}/engine"
    socket = zmq.Context().socket(zmq.PAIR)
    socket.set_hwm(0)  # the queue's bound is the caller's, and a batch is never thrown away
    socket.linger = 0
    socket.bind(address)
    words, child_end = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", BOOT, os.pathsep.join(entry or os.getcwd() for entry in sys.path), os.pathsep, str(child_end), folder],
            stdin=subprocess.PIPE, pass_fds=(child_end,), process_group=0,  # Ctrl-C in a terminal is the parent's business
        )
    except BaseException:
        os.close(words)
        socket.context.destroy(linger=0)
        _remove_folder(folder)
        raise
    finally:
        os.close(child_end)
    local = replace(config, model=replace(config.model, model=str(path.absolute()), revision=None))
    level = logging.getLevelName(LOGGER.level).lower()
    frame = m.encode(m.Boot(local, address, level if level in LEVELS else None))
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # dead already: the other pipe tells
        process.stdin.write(len(frame).to_bytes(4, "little") + frame)
        process.stdin.flush()
    return EngineHandle(process, socket, words, folder, path)


_folders: set[str] = set()  # this process' folders, known before they are made: a signal may come at any time


def remove_folders() -> None:
    """Remove what the engine processes of this one leave behind: for those who end without Python's own clearing up."""
    for folder in list(_folders):
        shutil.rmtree(folder, ignore_errors=True)


def _private_folder() -> str:
    """A folder that only this user can enter, with a name that is short enough for a socket in it."""
    for place in (tempfile.gettempdir(), "/tmp"):
        folder = os.path.join(place, f"octavo-{secrets.token_hex(8)}")
        if len(os.fsencode(folder)) <= LONGEST_ADDRESS - len("/engine"):
            _folders.add(folder)
            os.mkdir(folder, 0o700)
            return folder
    raise ConfigError("no folder for temporary files has a name short enough for a socket in it: set TMPDIR to a shorter one", "TMPDIR")


def _remove_folder(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _folders.discard(folder)


def _clean(process: "subprocess.Popen[bytes]", socket: Any, words: int, folder: str) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    socket.context.destroy(linger=0)
    os.close(words)
    _remove_folder(folder)


# -- the child


class EngineLoop:
    """Takes messages in, steps the core, sends one Batch per step. Its ways in and out are functions over bytes.

    ``receive(wait)`` returns the messages that are there; with ``wait``, at least one. All are taken before each step, so
    that an abort frees its blocks before anything more is computed. Nothing that a message says can end the loop, except Shutdown.
    """

    def __init__(self, core: EngineCore, scheduler: Scheduler, receive: Callable[[bool], list[bytes]], send: Callable[[bytes], None],
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._scheduler = scheduler
        self._receive = receive
        self._send = send
        self._clock = clock
        self._events: list[Event] = []
        self._refused: list[Delta] = []  # told with the next batch
        self._resets = 0  # likewise
        self._stopping = False
        core.observers.append(lambda event, _now: self._events.append(event))

    def run(self) -> None:
        """Work until told to stop. Raises: WorkerDied when a step breaks."""
        while not self._stopping:
            self.turn()

    def turn(self) -> None:
        """Take in what has come, waiting for it if there is nothing to do, and compute a step."""
        core, counters = self._core, self._core.counters
        for frame in self._receive(not (core.has_work or self._refused)):
            self._take(frame)
        if self._stopping:
            with phase(WireReport(self._send), KEEPING) if core.keeper else nullcontext():
                core.shutdown()
        elif core.failure is not None:
            raise WorkerDied(core.failure) from core.cause
        begun, steps, planned = self._clock(), counters.steps, counters.tokens_planned
        deltas = core.step() if core.has_work else []
        if core.failure is not None and not self._stopping:
            raise WorkerDied(core.failure) from core.cause
        if core.has_work and not deltas and counters.steps == steps:
            raise WorkerDied("no step could be planned, and requests are unfinished: this is a bug in the scheduler")
        refused, self._refused = self._refused, []
        events, self._events = self._events, []
        resets, self._resets = self._resets, 0
        if deltas or refused or events or resets or counters.steps != steps:
            batch = m.Batch(begun, self._clock(), counters.tokens_planned - planned, refused + deltas, events, self._stats(), resets)
            self._send(m.encode(batch))

    def _take(self, frame: bytes) -> None:
        try:
            message = m.decode_to_engine(frame)
        except msgspec.MsgspecError as error:
            LOGGER.error("a message that cannot be read is dropped: %s", error)
            self._refuse(_ids_in(frame), f"the request could not be read: {error}")
            return
        if isinstance(message, m.Add):
            for request in message.requests():
                try:
                    self._core.add(request)
                except RequestError as error:
                    self._refuse([request.id], error.message)
        elif isinstance(message, m.Abort):
            for request_id in message.ids:
                self._core.abort(request_id)
        elif isinstance(message, m.ResetCache):
            self._core.reset_prefix_cache()
            self._resets += 1
        else:
            self._stopping = True

    def _refuse(self, ids: list[str], message: str) -> None:
        self._refused.extend(Delta(request_id, finish_reason="error", error=message) for request_id in ids)

    def _stats(self) -> m.EngineStats:
        scheduler, counters = self._scheduler, self._core.counters
        ledger, lost = scheduler.kv.ledger(), scheduler.preemption_stats()
        return m.EngineStats(
            len(scheduler.running), scheduler.num_waiting, ledger.total, ledger.free, counters.steps, counters.tokens_planned,
            counters.tokens_sampled, lost.preemptions, lost.tokens_lost, ledger.cached, ledger.shared, ledger.logical, ledger.reserved_slots,
            counters.cache_queries, counters.cache_hits, lost.tokens_recomputed, lost.blocks_out, lost.blocks_in, lost.tier_blocks, lost.tier_used,
            lost.requests_swapped,
        )


def _ids_in(frame: bytes) -> list[str]:
    """Whom a damaged Add is about, as far as can be seen: they must hear something."""
    try:
        tag, ids, *_ = msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, TypeError, ValueError):
        return []
    return [name for name in ids if isinstance(name, str)] if tag == m.Add.__name__ and isinstance(ids, list) else []


class WireReport:
    """A Report that sends what it hears; progress a few times a second, and its end."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._told: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """A phase begins."""
        self._send(m.encode(m.Begin(phase)))

    def progress(self, what: str, done: int, total: int | None) -> None:
        """Bytes of the weights."""
        now = time.monotonic()
        if done == total or now - self._told.get(what, -1.0) >= PROGRESS_SECONDS:
            self._told[what] = now
            self._send(m.encode(m.Progress(what, done, total)))

    def end(self, phase: str, seconds: float) -> None:
        """The phase is over."""
        self._send(m.encode(m.End(phase, seconds)))

    def note(self, text: str) -> None:
        """A fact."""
        self._send(m.encode(m.Note(text)))


def main(words: int, folder: str) -> None:
    """The engine process: from Boot on standard input to LastWords on the pipe ``words``. ``folder``: its socket's, removed if the parent is gone."""
    # The parent drains before it ends this process; a terminal's or a service manager's signal to the whole group comes too soon.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(words, False)
    boot = m.decode_boot(_read(int.from_bytes(_read(4, folder), "little"), folder))
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    if boot.log is not None:
        os.environ["OCTAVO_LOG"] = boot.log
    last, code = m.LastWords(), 0
    try:
        show_log()
        _serve(boot)
    except BaseException as error:
        last, code = m.LastWords.of(error), 1
        if last.kind == WorkerDied.__name__:
            traceback.print_exc()
    os.write(words, m.encode(last))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: no thread of a library is waited for


def _serve(boot: m.Boot) -> None:
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(boot.address)
    lock = threading.Lock()  # progress may be told by another thread

    def send(frame: bytes) -> None:
        with lock:
            socket.send(frame)

    def receive(wait: bool) -> list[bytes]:
        frames = [socket.recv()] if wait else []
        with suppress(zmq.Again):
            while True:
                frames.append(socket.recv(zmq.NOBLOCK))
        return frames

    try:
        from octavo.engine import factory
        from octavo.models import registry
        from octavo.weights.checkpoint import open_checkpoint

        report = WireReport(send)
        with open_checkpoint(Path(boot.config.model.model)) as checkpoint:
            side = factory.build_core(boot.config, checkpoint, registry.read_spec(checkpoint), report)
        gc.collect()
        gc.freeze()  # what the start-up made stays: no collection need look at it again
        send(m.encode(m.Ready(side.config, side.ledger, side.isa, side.spec.reach is not None)))
        loop = EngineLoop(side.core, side.scheduler, receive, send)
        try:
            loop.run()
        finally:
            side.core.shutdown()
    finally:
        context.destroy(linger=FLUSH_MS)


def _read(count: int, folder: str) -> bytes:
    """Exactly so many bytes of standard input."""
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            _orphaned(folder)
        data += part
    return data


def _end_with_parent(folder: str) -> None:
    """Wait for the end of standard input: the parent is gone, however it went."""
    with suppress(OSError):
        while os.read(0, 1024):
            pass
    _orphaned(folder)


def _orphaned(folder: str) -> NoReturn:
    """Nobody is left to hear anything, or to remove the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
