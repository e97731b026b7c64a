"""Switchboard: which request each of the engine's news belongs to, from a request's acceptance to its one end."""

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.engine.console import LOGGER
from octavo.engine.generation import Flight
from octavo.engine.messages import Abort, Add, Batch, EngineStats, ResetCache, ToEngine
from octavo.engine.outputs import Answer
from octavo.errors import InvalidRequest, QueueFull, WorkerDied
from octavo.observe.events import Admitted, Preempted

MOST_RETRY_SECONDS = 60


class Listener(Protocol):
    """Hears what happens to sequences, on the event loop; ``sequence`` is an id in the engine. Once each, in this order, but for the last:"""

    def arrived(self, sequences: Iterable[str], num_prompt: int, params: SamplingParams, arrival: float, tenant: str) -> None:
        """A request was accepted; its n sequences."""

    def batch(self, batch: Batch, now: float) -> None:
        """One step's news, before they are handed out."""

    def ended(self, sequence: str, reason: str, now: float) -> None:
        """A sequence is over, for the reason that its caller is told: stop (a stop string too), length, abort, error."""

    def first_tokens(self, count: int, seconds: float) -> None:
        """So long after their request's arrival its reader has dealt with the first tokens of ``count`` sequences; it may have ended by then."""


class Switchboard:
    """The open requests of one engine. Nothing is kept of one that has ended. One event loop uses it.

    ``most_queued`` bounds the sequences that wait: those that the scheduler has not admitted, and those whose texts are worked on.
    """

    def __init__(self, send: Callable[[ToEngine], None], most_queued: int | None = None) -> None:
        self.listeners: list[Listener] = []
        self.stats = EngineStats()
        self.flights: dict[str, Flight] = {}  # by request id; accepted and not ended
        self.sequences: dict[str, tuple[Flight, int]] = {}  # by id in the engine; its place among the n
        self.queued: set[str] = set()  # sequences that the scheduler has not admitted yet
        self.preparing = 0  # places held for what is being rendered or tokenized (Places)
        self.admissions: deque[float] = deque(maxlen=64)  # when the last ones were
        self.idle = asyncio.Event()  # nothing is open
        self.idle.set()
        self.progress = 0.0  # when the engine last showed life, or was given work after a pause
        self._send = send
        self._most_queued = most_queued
        self._resets: deque[asyncio.Future[None]] = deque()  # of the cache, asked for and not yet done, in their order
        self._numbers = itertools.count()  # of requests: an id in the engine is never used twice, so late news reach nobody else

    def name(self, given: Any) -> str:
        """The request id: the given one, if it is free, or a new one. Raises: InvalidRequest."""
        if given is None:
            while (made := f"request-{next(self._numbers)}") in self.flights:
                pass
            return made
        if not isinstance(given, str) or not given:
            raise InvalidRequest(f"request_id must be a non-empty string, not {given!r}", "request_id")
        if given in self.flights:
            raise InvalidRequest(f"request id {given!r} is in use by an unfinished request", "request_id")
        return given

    def engine_id(self, request_id: str) -> str:
        """What the request is called in the engine."""
        return f"{request_id}~{next(self._numbers)}"

    def check_room(self, n: int) -> None:
        """Whether ``n`` more sequences may wait. Where nobody waits, any number may. Raises: QueueFull."""
        waiting, most = len(self.queued) + self.preparing, self._most_queued
        if most is not None and waiting and waiting + n > most:
            retry = self._retry_after(waiting)
            raise QueueFull(f"{waiting} requests wait, and the queue has room for {most} (max_num_queued_reqs): try again in {retry} s", None, retry)

    def open(self, flight: Flight) -> None:
        """A request is accepted; until it is submitted it holds its places in the queue."""
        self.flights[flight.request_id] = flight
        self.idle.clear()

    def submit(self, flight: Flight, answer: Answer, requests: Sequence[Request], num_prompt: int) -> None:
        """Send an open request to the engine. From here on its sequences are known, until each has ended."""
        now = answer.metrics.arrival
        self._send(Add.of(requests))
        flight.places.give_back()  # its sequences wait themselves now
        flight.answer = answer
        if not self.sequences:
            self.progress = now
        for index, request in enumerate(requests):
            flight.open.add(request.id)
            self.queued.add(request.id)
            self.sequences[request.id] = flight, index
        self._tell("arrived", [request.id for request in requests], num_prompt, flight.params, now, requests[0].tenant)

    def reset_cache(self) -> "asyncio.Future[None]":
        """Let the engine forget all cached prefixes. The result comes when it has; WorkerDied when it never will."""
        done = asyncio.get_running_loop().create_future()
        self._resets.append(done)
        self._send(ResetCache())
        return done

    def deliver(self, batch: Batch) -> None:
        """Hand out one step's news."""
        now = self.progress = time.monotonic()
        self.stats = batch.stats
        self._tell("batch", batch, now)
        for event in batch.events:
            if isinstance(event, Admitted | Preempted) and (found := self.sequences.get(event.request_id)) is not None:
                self._on_event(event, found[0], batch.begun)
        stopped = []
        for delta in batch.deltas:
            found = self.sequences.get(delta.request_id)
            if found is None:
                continue  # its reader left, or a stop string ended it
            flight, index = found
            assert flight.answer is not None
            if delta.tokens and not flight.answer.samples[index].tokens:
                flight.begun += 1
            try:
                by_text = flight.answer.apply(index, delta, now)
            except Exception as error:  # one answer's text is at fault, nobody else's
                LOGGER.exception("the text of request %s could not be made", flight.request_id)
                self.fail(flight, WorkerDied(f"the text of this answer could not be made: {type(error).__name__}: {error}"))
                continue
            if by_text:
                stopped.append(delta.request_id)
            if by_text or delta.finish_reason is not None:
                self._end_sequence(flight, delta.request_id, flight.answer.samples[index].finish_reason or "error", now)
            flight.wake()
        if stopped:
            self._send(Abort(stopped))
        for _ in range(batch.resets):
            if not (done := self._resets.popleft()).done():  # whoever waited may be gone
                done.set_result(None)

    def _on_event(self, event: Admitted | Preempted, flight: Flight, at: float) -> None:
        assert flight.answer is not None
        metrics = flight.answer.metrics
        if isinstance(event, Preempted):
            metrics.preemptions += 1
            return
        if metrics.first_scheduled is None:
            metrics.first_scheduled = at
        if event.request_id in self.queued:
            self.queued.remove(event.request_id)
            self.admissions.append(at)

    def told(self, flight: Flight, count: int) -> None:
        """The reader has dealt with the first tokens of ``count`` of the request's sequences."""
        assert flight.answer is not None
        self._tell("first_tokens", count, time.monotonic() - flight.answer.metrics.arrival)

    # -- the end of a request

    def fail_all(self, error: WorkerDied) -> None:
        """The engine is gone: every reader gets the error, after what came before it."""
        for flight in list(self.flights.values()):
            self.fail(flight, WorkerDied(error.message), tell_engine=False)
        while self._resets:
            if not (done := self._resets.popleft()).done():
                done.set_exception(WorkerDied(error.message))

    def fail(self, flight: Flight, error: Exception, *, tell_engine: bool = True) -> None:
        """One request ends with an error."""
        flight.error = error
        if tell_engine and flight.open:
            self._send(Abort(list(flight.open)))
        self.forget(flight, "error")
        flight.wake()

    def leave(self, flight: Flight) -> None:
        """Its reader is gone: end what is unfinished."""
        if flight.open:
            self._send(Abort(list(flight.open)))
        self.forget(flight, "abort")

    def forget(self, flight: Flight, reason: str) -> None:
        """End what is open of it on this side."""
        now, flight.gone = time.monotonic(), True
        for sequence in list(flight.open):
            self._end_sequence(flight, sequence, reason, now)
        flight.places.give_back()
        self._drop(flight)

    def _end_sequence(self, flight: Flight, sequence: str, reason: str, now: float) -> None:
        flight.open.discard(sequence)
        self.queued.discard(sequence)
        del self.sequences[sequence]
        self._tell("ended", sequence, reason, now)
        if not flight.open:
            self._drop(flight)

    def _drop(self, flight: Flight) -> None:
        if self.flights.get(flight.request_id) is flight:
            del self.flights[flight.request_id]
            if not self.flights:
                self.idle.set()

    def _retry_after(self, waiting: int) -> int:
        """Seconds in which the queue should be through, at the pace of the last admissions."""
        span = time.monotonic() - self.admissions[0] if self.admissions else 0.0
        return 1 if span <= 0 else max(1, min(MOST_RETRY_SECONDS, math.ceil(waiting * span / len(self.admissions))))

    def _tell(self, what: str, *args: Any) -> None:
        for listener in self.listeners:
            try:
                getattr(listener, what)(*args)
            except Exception:  # who watches must not break what is watched
                LOGGER.exception("a listener failed in %s()", what)
