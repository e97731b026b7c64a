"""Several engine requests as one stream of news, and work that ends when its client goes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from starlette.types import Receive

from octavo.core.output import RequestOutput

T = TypeVar("T")


class Disconnected(Exception):
    """The client is gone; nobody waits for an answer."""


class Merged:
    """The news of several generators as (prompt's index, news), in the order in which they come.

    Each is read ahead by one piece of news and no more, so that the engine's client coalesces what a slow reader has
    not taken yet. ``close`` ends every generator, and with it what it was running; it is safe at any time.
    """

    def __init__(self, generators: Sequence[AsyncGenerator[RequestOutput, None]]) -> None:
        self._generators = generators
        self._queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(maxsize=1)
        self._tasks: list[asyncio.Task[None]] = []

    async def news(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Everything that comes, until every generator has ended. Raises: what a generator raises."""
        if len(self._generators) == 1:  # without a queue between: this is what most streams are
            async for output in self._generators[0]:
                yield 0, output
            return
        self._tasks = [asyncio.ensure_future(self._pump(*pair)) for pair in enumerate(self._generators)]
        unfinished = len(self._tasks)
        while unfinished:
            index, item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield index, item

    async def close(self) -> None:
        """End everything that is unfinished."""
        for task in self._tasks:
            task.cancel()
        try:
            if running := [task for task in self._tasks if not task.done()]:
                await asyncio.wait(running)
        finally:
            for generator in self._generators:
                with suppress(RuntimeError):  # it runs still: a second cancellation cut the wait short, and the first one ends it
                    await generator.aclose()

    async def _pump(self, index: int, generator: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async for output in generator:
                await self._queue.put((index, output))
        except Exception as error:
            await self._queue.put((index, error))
        else:
            await self._queue.put((index, None))


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled, and awaited to its end, when the client goes first.

    ``receive`` must have given the whole body. Raises: Disconnected; what ``work`` raises.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait((task, gone))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
