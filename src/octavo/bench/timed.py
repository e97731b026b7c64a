"""How long a scheduler plans and commits, measured from outside: it has no clock of its own."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from octavo.scheduler.scheduler import Scheduler


class PlanTimes:
    """While entered, ``plan`` and ``commit`` of a scheduler are timed. A context manager."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.plan = 0.0  # seconds
        self.commit = 0.0

    def __enter__(self) -> "PlanTimes":
        for name in ("plan", "commit"):
            setattr(self._scheduler, name, self._timed(name, getattr(self._scheduler, name)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        del self._scheduler.plan, self._scheduler.commit  # type: ignore[method-assign]  # the instance's; the class's show again

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*given)
            finally:
                setattr(self, name, getattr(self, name) + time.perf_counter() - began)

        return timed
