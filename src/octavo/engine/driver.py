"""Driver: steps an EngineCore in the caller's thread and brings each delta to the answer that it belongs to."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from octavo.core.output import Delta
from octavo.core.request import Request
from octavo.engine.core import EngineCore
from octavo.engine.outputs import Answer
from octavo.errors import WorkerDied
from octavo.observe.events import Admitted, Event, Preempted


class Driver:
    """Runs requests for callers in this process.

    Several callers may have requests at once (a stream left half read, other threads): whoever steps, every answer gets
    its deltas. An interrupt (Ctrl-C) waits until the step is over, because half a step could not be taken back.
    """

    def __init__(self, core: EngineCore, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._clock = clock
        self.lock = threading.RLock()  # held while the core works: take it to look into the core
        self._open: dict[str, tuple[Answer, int]] = {}  # by the request's id in the core
        self._interrupts = _Interrupts()
        core.observers.append(self._observe)

    def submit(self, batch: Sequence[tuple[Answer, Sequence[Request]]]) -> None:
        """Give requests to the engine: all of them or, when one is refused, none.

        Raises: RequestError as EngineCore.add does; WorkerDied.
        """
        with self.lock:
            try:
                for answer, requests in batch:
                    for index, request in enumerate(requests):
                        self._core.add(request)
                        self._open[request.id] = answer, index
            except BaseException:
                self.abort([answer for answer, _ in batch])
                raise

    def step(self) -> None:
        """Compute one step and hand its news out. Raises: WorkerDied, after every open answer got its end."""
        with self._interrupts.held():
            self._step()

    def run(self, answers: Sequence[Answer], tick: Callable[[], None]) -> None:
        """Step until these answers are complete, and call ``tick`` after each step. Raises: as step() does."""
        with self._interrupts.held():  # once: at each step it would cost as much as the scheduler
            waiting = list(answers)
            while waiting:
                if waiting[-1].finished:  # the others are looked at once it is gone
                    waiting.pop()
                    continue
                self._step()
                self._interrupts.release()
                tick()

    def _step(self) -> None:
        with self.lock:
            steps = self._core.counters.steps
            deltas = self._core.step()
            self._deliver(deltas)
            if self._core.failure is not None:
                raise WorkerDied(f"the engine stopped in a step and takes nothing more: {self._core.failure}") from self._core.cause
            if not deltas and self._core.counters.steps == steps and self._open:
                raise WorkerDied(f"no step could be planned, and {len(self._open)} requests are unfinished: this is a bug in the scheduler")

    def abort(self, answers: Sequence[Answer]) -> None:
        """Take back what is unfinished of these answers; nothing more is heard of it."""
        with self.lock:
            gone = {id(answer) for answer in answers}
            for request_id in [name for name, (answer, _) in self._open.items() if id(answer) in gone]:
                del self._open[request_id]
                self._core.abort(request_id)

    def shutdown(self) -> None:
        """End every answer and the engine with it. May be called twice."""
        with self.lock:
            self._core.shutdown()
            if self._core.has_work:
                self._deliver(self._core.step())

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        now = self._clock()
        for delta in deltas:
            answer, index = self._open.get(delta.request_id, (None, 0))
            if answer is None:
                continue  # ended by a stop string, or taken back
            stopped = answer.apply(index, delta, now)
            if stopped:
                self._core.abort(delta.request_id)
            if stopped or delta.finish_reason is not None:
                del self._open[delta.request_id]

    def _observe(self, event: Event, now: float) -> None:
        """Keep the times that only the scheduler knows."""
        if not isinstance(event, Admitted | Preempted) or event.request_id not in self._open:
            return
        metrics = self._open[event.request_id][0].metrics
        if isinstance(event, Preempted):
            metrics.preemptions += 1
        elif metrics.first_scheduled is None:
            metrics.first_scheduled = now


class _Interrupts:
    """Holds a first Ctrl-C back while the engine works; a second one comes at once.

    Only where Python's own handler is in place, in the main thread: anything else is the application's business.
    """

    def __init__(self) -> None:
        self._held = self._pending = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Until the block is left, a first Ctrl-C is only noted; it is raised by ``release``, or at the end of the outermost block that holds."""
        if self._held or not _in_main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        self._pending = False
        signal.signal(signal.SIGINT, self._note)
        self._held = True
        try:
            yield
        finally:
            self._held = False
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.release()

    def release(self) -> None:
        """Raise what was noted; to be called where nothing is half done. In other threads than the main one nothing happens."""
        if self._pending and _in_main_thread():
            self._pending = False
            raise KeyboardInterrupt

    def _note(self, _signal: int, _frame: Any) -> None:
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt
        self._pending = True


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
