"""The processor time that a scheduler takes, measured from outside: it has no clock of its own."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from octavo.scheduler.scheduler import Scheduler


class PlanTimes:
    """While entered, ``plan`` and ``commit`` of a scheduler are timed, in processor seconds of the thread that steps. A context manager."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.planning = 0.0  # in both
        self.all = 0.0  # of the thread, from entering to leaving

    def __enter__(self) -> "PlanTimes":
        self._scheduler.plan = self._timed(self._scheduler.plan)  # type: ignore[method-assign]
        self._scheduler.commit = self._timed(self._scheduler.commit)  # type: ignore[method-assign]
        self.all = -time.thread_time()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.all += time.thread_time()
        del self._scheduler.plan, self._scheduler.commit  # the instance's; the class's show again

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*given)
            finally:
                self.planning += time.thread_time() - began

        return timed
