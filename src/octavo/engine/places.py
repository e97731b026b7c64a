"""Places in the queue of those whose request is still made ready: rendered, tokenized, handed over."""

from typing import Protocol, Self


class Queue(Protocol):
    """Whose places they are: the switchboard."""

    preparing: int

    def check_room(self, n: int) -> None:
        """Raises: QueueFull where there is none for so many more."""


class Places:
    """Places in the queue, held for sequences that do not wait there themselves yet.

    They are taken in the moment in which room is found, so that no burst gets past the bound while its texts are worked on. Leaving the
    context gives back what nobody took over.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._held = 0

    def take(self, n: int = 1) -> None:
        """Hold ``n`` more. Raises: QueueFull; then none of them is held."""
        self._queue.check_room(n)
        self._queue.preparing += n
        self._held += n

    def split(self, n: int) -> "Places":
        """``n`` of these for somebody else; those that are missing are taken. Raises: QueueFull."""
        if n > self._held:
            self.take(n - self._held)
        part = Places(self._queue)
        self._held, part._held = self._held - n, n
        return part

    def give_back(self) -> None:
        """Hold none any more."""
        self._queue.preparing -= self._held
        self._held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.give_back()
