import asyncio
import logging

from tests.observe.test_metrics import CONFIG, STATS, step

from octavo.core.output import Delta
from octavo.core.sampling import SamplingParams
from octavo.engine.messages import EngineStats
from octavo.observe.metrics import Metrics
from octavo.observe.traffic import Traffic


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_rates_since_the_last_line_and_silence_when_idle() -> None:
    metrics, clock = Metrics("m", CONFIG), Clock()
    traffic = Traffic(metrics, logging.getLogger("test"), clock=clock)
    clock.now = 10
    assert traffic.tell() is None  # nothing came yet
    metrics.arrived(["a"], 30, SamplingParams(), 10.0)
    metrics.arrived(["b", "c"], 30, SamplingParams(n=2), 10.0)
    metrics.batch(step(10, 11, 30, [Delta("a", [1])]), 11)
    metrics.batch(step(11, 12, 1, [Delta("a", [2, 3, 4])]), 12)
    clock.now = 20
    assert traffic.tell() == "3.0 tokens/s in, 0.4 tokens/s out, running 2, waiting 1, KV use 25.0 %"
    clock.now = 30
    assert traffic.tell() == "0.0 tokens/s in, 0.0 tokens/s out, running 2, waiting 1, KV use 25.0 %"  # open, and stuck: worth a line
    metrics.batch(step(12, 13, 1, [Delta("a", [5], finish_reason="stop")], stats=EngineStats(
        kv_total=40, kv_free=40, preemptions=2, tokens_recomputed=33, blocks_out=5, blocks_in=4)), 13)
    for sequence in ("a", "b", "c"):
        metrics.ended(sequence, "stop", 13)
    clock.now = 40
    assert traffic.tell() == "0.0 tokens/s in, 0.1 tokens/s out, running 0, waiting 0, KV use 0.0 %, preemptions 2, \
recomputed 33 tokens, swapped 5 blocks out and 4 in"
    clock.now = 50
    assert traffic.tell() == "0.0 tokens/s in, 0.0 tokens/s out, running 0, waiting 0, KV use 0.0 %"  # that it is over
    clock.now = 60
    assert traffic.tell() is None
    metrics.arrived(["d"], 30, SamplingParams(), 60.0)
    stats = EngineStats(
        running=1, kv_total=40, kv_free=20, kv_cached=18, preemptions=2, cache_queries=30, cache_hits=16, tokens_recomputed=33,
        blocks_out=5, blocks_in=4,
    )
    metrics.batch(step(62, 63, 14, [Delta("d", [1])], stats=stats), 63)
    clock.now = 70
    assert traffic.tell() == "3.0 tokens/s in, 0.1 tokens/s out, running 1, waiting 0, KV use 5.0 %, prefix cache hits 53.3 %"


def test_it_tells_the_log_at_its_pace(caplog) -> None:  # type: ignore[no-untyped-def]
    metrics = Metrics("m", CONFIG)
    metrics.stats = STATS
    metrics.arrived(["a", "b", "c"], 3, SamplingParams(n=3), 0.0)

    async def watch() -> None:
        task = asyncio.create_task(Traffic(metrics, logging.getLogger("octavo.test")).run(0.01))
        await asyncio.sleep(0.2)
        task.cancel()

    with caplog.at_level(logging.INFO, "octavo.test"):
        asyncio.run(watch())
    assert 2 <= len(caplog.messages) <= 20 and all("running 2, waiting 1" in line for line in caplog.messages)
