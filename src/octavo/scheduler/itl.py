"""The budget that keeps a step short enough for those who decode: ``--target-itl-ms``.

A step's time is modelled as a + b · tokens (times.py). While somebody decodes, the step gets as many tokens
as the model allows within the target: the decodes all of theirs, prefill chunks the rest, and at least ``LEAST`` of them, so
that a target which the decodes alone exceed slows prompts down and stops none. While nobody decodes there is nobody to keep waiting, and
the budget is the whole one.
"""

from collections.abc import Sequence

from octavo.core.request import Request
from octavo.scheduler.times import StepTimes

LEAST = 16  # tokens of prefill in a step, however tight the target: a block


class ItlBudget:
    """The ``budget`` hook. ``running`` is the scheduler's list, ``most`` the whole budget, ``times`` hears of every step."""

    def __init__(self, target_ms: float, most: int, running: Sequence[Request], times: StepTimes) -> None:
        self._target = target_ms / 1000
        self._most = most
        self._running = running
        self._times = times

    def __call__(self, now: float) -> int:
        """Tokens of the next step."""
        decodes = 0
        for request in self._running:
            pending = request.num_pending
            if pending - len(request.draft) <= 1:
                decodes += pending
        line = self._times.fit()
        if not decodes or line is None:
            return self._most
        fixed, each = line
        fitting = int((self._target - fixed) / each) if each > 0 else self._most if fixed <= self._target else 0
        return min(self._most, max(fitting, decodes + LEAST))
