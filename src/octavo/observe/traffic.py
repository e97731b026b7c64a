"""The log line that a server writes every ten seconds: tokens in and out, who runs and waits, KV use. Never a prompt."""

import asyncio
import logging
import time
from collections.abc import Callable

from octavo.observe.metrics import Metrics, kv_use

SECONDS = 10.0


class Traffic:
    """Tells a logger what passed through since the last line. Says nothing while nothing happens."""

    def __init__(self, metrics: Metrics, logger: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._logger = logger
        self._clock = clock
        self._last = self._now()
        self._busy = False

    def tell(self) -> str | None:
        """Log one line about the time since the last call, and return it. None when that time and the one before were idle."""
        now, last = self._now(), self._last
        self._last = now
        stats = self._metrics.stats
        seconds, came, went, lost, asked, hits, again, out, back = (new - old for new, old in zip(now, last, strict=True))
        busy = bool(came or went or self._metrics.num_open)
        was_busy, self._busy = self._busy, busy
        if not (busy or was_busy) or seconds <= 0:
            return None
        line = (f"{came / seconds:.1f} tokens/s in, {went / seconds:.1f} tokens/s out, running {self._metrics.running}, "
                f"waiting {self._metrics.waiting}, KV use {100 * kv_use(stats):.1f} %")
        if asked:
            line += f", prefix cache hits {100 * hits / asked:.1f} %"
        if lost:
            line += f", preemptions {lost:g}"
        if again:
            line += f", recomputed {again:g} tokens"
        if out or back:
            line += f", swapped {out:g} blocks out and {back:g} in"
        self._logger.info("%s", line)
        return line

    async def run(self, every: float = SECONDS) -> None:
        """Tell until cancelled."""
        while True:
            await asyncio.sleep(every)
            self.tell()

    def _now(self) -> tuple[float, ...]:
        metrics, stats = self._metrics, self._metrics.stats
        said = ("preemptions", "cache_queries", "cache_hits", "tokens_recomputed", "blocks_out", "blocks_in")
        return self._clock(), metrics.prompt_tokens, metrics.generation_tokens, *(getattr(stats, name) for name in said)
