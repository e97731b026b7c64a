"""EngineCore: the step loop. Requests in, Deltas out, over a scheduler and an executor."""

import time
from collections.abc import Callable
from typing import Protocol

from octavo.core.output import Delta
from octavo.core.request import Request
from octavo.engine.executor import Executor
from octavo.errors import InvalidRequest, RequestError, WorkerDied
from octavo.observe.events import Event, Finished
from octavo.scheduler.scheduler import Counters, Scheduler

Observer = Callable[[Event, float], None]


class Keeper(Protocol):
    """Keeps what the prefix cache holds for a later engine. Never raises."""

    def save(self) -> None:
        """Keep it, now that nothing runs."""

    def forget(self) -> None:
        """The cache was reset: what was kept must not come back."""


class EngineCore:
    """Drives plan → execute → commit. One thread owns it.

    Every accepted request ends in exactly one Delta with a finish_reason, whatever happens: the core keeps its own
    list of those that have not, and answers them itself when a step breaks. After a break (``failure`` says why) the
    deltas that are left can still be fetched with ``step``; then ``add`` and ``step`` raise WorkerDied.

    ``observers`` are called with each event and the time (engine's clock, seconds) of the step that it happened in. An
    observer's exception comes out of the call that it happened in, but costs the other observers no event and nobody a
    delta: the next ``step`` returns them.

    ``keeper`` saves the prefix cache at the shutdown, unless a step broke.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, clock: Callable[[], float] = time.monotonic) -> None:
        self.observers: list[Observer] = []
        self.failure: str | None = None
        self.cause: BaseException | None = None  # what was raised at a break
        self.keeper: Keeper | None = None
        self._scheduler = scheduler
        self.executor = executor  # a bench may put another scheduler over it, once this core has no work
        self._clock = clock
        self._open: set[str] = set()  # accepted, last delta not yet in the outbox
        self._outbox: list[Delta] = []

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to compute or to hand out."""
        return bool(self._open or self._outbox)

    @property
    def counters(self) -> Counters:
        """Totals since the start; written by the scheduler."""
        return self._scheduler.counters

    def add(self, request: Request) -> None:
        """Accept a request.

        Raises: RequestError when it cannot be served (it then gets no delta); WorkerDied after a break.
        """
        self._refuse_if_dead()
        if request.id in self._open:
            raise InvalidRequest(f"request id {request.id!r} is in use by an unfinished request", "request_id")
        self._scheduler.add(request)
        self._open.add(request.id)

    def abort(self, request_id: str) -> bool:
        """End a request now, and with a beam its whole search; the last deltas come with the next ``step``. False when it has ended, or was
        never here."""
        if request_id not in self._open or self.failure is not None:
            return False
        try:
            deltas = self._scheduler.abort(request_id)
            assert deltas, f"{request_id} is open here and unknown to the scheduler"
            self._put(deltas)
            events = self._scheduler.take_events()
        except Exception as error:
            events = self._break(error)
        self._publish(events, self._clock())
        return True

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; requests lose nothing. Returns how many blocks became free. Raises: WorkerDied after a break."""
        self._refuse_if_dead()
        if self.keeper is not None:
            self.keeper.forget()
        return self._scheduler.reset_cache()

    def step(self) -> list[Delta]:
        """Compute one step and return the news of all requests. Empty when nobody can get on now.

        Raises: WorkerDied after a break, once every request has been answered.
        """
        if not self._outbox:
            self._refuse_if_dead()
        events: list[Event] = []
        now = self._clock()
        if self.failure is None and self._scheduler.has_unfinished:
            try:
                self._advance(now, events)
            except BaseException as error:
                events.extend(self._break(error))
                if not isinstance(error, Exception):  # an interrupt is the caller's; the answers wait in the outbox
                    self._publish(events, now)
                    raise
        self._publish(events, now)
        deltas, self._outbox = self._outbox, []
        return deltas

    def shutdown(self) -> None:
        """End what is unfinished (``step`` hands it out) and give up the executor. May be called twice."""
        keeper, self.keeper = self.keeper, None  # it holds the KV memory
        if self.failure is None:
            if keeper is not None:
                keeper.save()
            self.failure = "it was shut down"
            events = self._answer_all("abort", None)
            self.executor.shutdown()
            self._publish(events, self._clock())
        else:
            self.executor.shutdown()

    def _advance(self, now: float, events: list[Event]) -> None:
        """One step: its deltas go to the outbox, its events into ``events``."""
        plan = self._scheduler.plan(now)
        if plan is None:
            events.extend(self._scheduler.take_events())
            return
        events.extend(plan.events)
        try:
            result = self.executor.execute(plan)
        except RequestError as error:
            deltas = self._scheduler.fail(plan, error.message)
        else:
            deltas = self._scheduler.commit(plan, result, self._clock())
        self._put(deltas)
        events.extend(self._scheduler.take_events())

    def _break(self, error: BaseException) -> list[Event]:
        """Answer everybody and stop for good: what executor and scheduler hold can no longer be trusted to agree."""
        self.failure, self.cause = f"{type(error).__name__}: {error}", error
        return self._answer_all("error", f"the engine stopped in a step: {self.failure}")

    def _answer_all(self, reason: str, message: str | None) -> list[Event]:
        """The last delta for everybody who has none yet."""
        ended = sorted(self._open)
        self._put([Delta(request_id, finish_reason=reason, error=message) for request_id in ended])
        return [Finished(request_id, reason) for request_id in ended]

    def _put(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                self._open.remove(delta.request_id)
            self._outbox.append(delta)

    def _publish(self, events: list[Event], now: float) -> None:
        failure: Exception | None = None
        for event in events:
            for observer in self.observers:
                try:
                    observer(event, now)
                except Exception as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    def _refuse_if_dead(self) -> None:
        if self.failure is not None:
            raise WorkerDied(f"the engine has stopped and takes nothing more: {self.failure}")
