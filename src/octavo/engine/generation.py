"""One answer on its way to an asynchronous caller: Flight is what the engine's side fills, Generation what the caller reads."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from octavo.core.output import RequestOutput
from octavo.core.sampling import SamplingParams
from octavo.engine.outputs import Answer
from octavo.engine.places import Places


class Flight:
    """A request between its acceptance and its end. Written by AsyncLLM only, on the event loop."""

    __slots__ = ("answer", "begun", "error", "gone", "news", "open", "params", "places", "request_id", "waiter")

    def __init__(self, request_id: str, params: SamplingParams, places: Places) -> None:
        self.request_id = request_id
        self.params = params
        self.answer: Answer | None = None  # None: not yet tokenized
        self.places = places  # in the queue, held until it is submitted
        self.open: set[str] = set()  # its sequences, by their ids in the engine, that have not ended
        self.begun = 0  # of its sequences: have their first token, which its reader has not been given yet
        self.gone = False  # over for its reader, or without one: must not be submitted any more
        self.error: Exception | None = None  # what its reader gets once it has read what came before
        self.news = False  # since the reader's last look
        self.waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """There is something to read."""
        self.news = True
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Generation(AsyncIterator[RequestOutput]):
    """The news of one request, as an async generator's user knows it.

    Nothing is queued for a reader: each step of the iteration gives all that came since the last. ``aclose()``, a
    cancellation while waiting, or dropping it aborts the request. One task reads it.

    A reader that comes back for more has dealt with what it was given: the server has written it to the client's socket. So that is
    when the first token of a sequence counts as told.
    """

    def __init__(
        self, flight: Flight, start: Callable[[], Awaitable[None]] | None, leave: Callable[[Flight], None],
        told: Callable[[Flight, int], None], *, deltas: bool, loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._flight = flight
        self._start = start  # tokenizes and submits; None: it is submitted
        self._leave = leave  # aborts
        self._told = told  # hears how many sequences' first tokens the reader has dealt with
        self._begun = 0  # sequences whose first tokens the reader was just given
        self._deltas = deltas
        self._loop = loop
        self._running = self._over = False

    @property
    def request_id(self) -> str:
        """The request's id, given or made."""
        return self._flight.request_id

    async def __anext__(self) -> RequestOutput:
        """The next news. Raises: RequestError for a bad prompt, WorkerDied, StopAsyncIteration at the end."""
        if self._running:
            raise RuntimeError("this generation is being read by another task")
        self._running = True
        try:
            self._tell()
            output = None if self._over else await self._next()
        except BaseException:
            self._close()
            raise
        finally:
            self._running = False
        if output is None:
            self._close()
            raise StopAsyncIteration
        return output

    async def _next(self) -> RequestOutput | None:
        if self._start is not None:
            start, self._start = self._start, None
            await start()
        flight = self._flight
        while not self._over:
            answer = flight.answer
            if flight.news and answer is not None:
                flight.news = False
                output = answer.news() if self._deltas else answer.output()
                if output is not None:
                    self._begun, flight.begun = flight.begun, 0
                    return output
            if flight.error is not None:
                raise flight.error
            if answer is not None and answer.finished:
                return None
            flight.waiter = self._loop.create_future()
            try:
                await flight.waiter
            finally:
                flight.waiter = None
        return None

    async def aclose(self) -> None:
        """Abort the request, if it has not ended. May be called at any time, again too."""
        self._close()

    def _tell(self) -> None:
        if self._begun:
            begun, self._begun = self._begun, 0
            self._told(self._flight, begun)

    def _close(self) -> None:
        if not self._over:
            self._over = True
            self._tell()
            self._leave(self._flight)
            if self._flight.waiter is not None:  # another task waits here: it must not wait for ever
                self._flight.wake()

    def __del__(self) -> None:
        # The collector may run in any thread.
        if not self._over and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._leave, self._flight)
