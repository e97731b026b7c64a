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
        with self.lock, _interrupt_after():
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


@contextmanager
def _interrupt_after() -> Iterator[None]:
    """Hold a first Ctrl-C back until the block is left; a second one comes at once.

    Only where Python's own handler is in place, in the main thread: anything else is the application's business.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pending = False

    def note(_signal: int, _frame: Any) -> None:
        nonlocal pending
        if pending:
            raise KeyboardInterrupt
        pending = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pending:
        raise KeyboardInterrupt
