"""Metrics: what Prometheus scrapes, under vLLM's names with the prefix ``octavo:``, so that its dashboards port.

A subscriber of the async engine's news. Numbers are kept in plain lists and read out at a scrape, because a batch of 64
deltas must cost microseconds: one thread (the event loop's) writes and reads, so nothing is locked.

What a number means, where that is a choice:

- One *sequence* is counted where vLLM counts a request: n > 1 are n sequences, each with its own times; ``request_params_n`` alone
  is observed once per request.
- ``prompt_tokens`` rises when a sequence's first token is there, not when it arrives.
- Latencies and token histograms are of sequences that ended by themselves (stop, length); ``request_success`` counts every end under
  its reason: also abort (the client left) and error.
- A request arrives when its bytes reach this machine (server/http.py). Time to first token runs from there until the first token has been dealt
  with by its reader: written to the client's socket, or taken in where the answer is not streamed. End-to-end time runs until the API
  process has the last token in hand. Everything else is on the engine's clock (the same monotonic clock): queue until first scheduled, prefill
  until the first token, decode until the last one.
- Tokens per tenant are counted as the totals are. Clients choose their names, so only ``MOST_TENANTS`` get a label: those that the
  setting tenant_weights names, then the first ones seen; all others are counted together as "(other)", those without a name as "(none)".
- A delta of several tokens (speculation) is one gap of ``inter_token_latency_seconds``. A beam, all of whose tokens come together, has neither gaps
  nor a time per output token. Each beam is a sequence, also one that is not told (best_of above n).
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from octavo.engine.messages import EngineStats
from octavo.observe.events import Admitted

if TYPE_CHECKING:
    from octavo.config import Config
    from octavo.core.output import Delta
    from octavo.core.sampling import SamplingParams
    from octavo.engine.messages import Batch

PREFIX = "octavo:"
REASONS = ("stop", "length", "abort", "error")
TTFT = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
# vLLM's, with finer steps below 10 ms: a CPU with a small model is faster than that.
PER_TOKEN = (.0005, .001, .0015, .002, .003, .004, .005, .006, .0075,
             .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST = (.005, .01, .025, .05, .1, .2, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PARAM_N = (1, 2, 5, 10, 20)
MOST_TENANTS = 64  # labels
NO_TENANT, OTHER_TENANTS = "(none)", "(other)"

HISTOGRAMS: dict[str, tuple[tuple[float, ...] | None, str]] = {  # None: token counts, up to the context
    "time_to_first_token_seconds": (TTFT, "Arrival to first token, written to the client where the answer is streamed."),
    "inter_token_latency_seconds": (PER_TOKEN, "Between tokens of one sequence."),
    "request_time_per_output_token_seconds": (PER_TOKEN, "Mean time of a sequence's tokens after the first ones."),
    "e2e_request_latency_seconds": (REQUEST, "Arrival to last token."),
    "request_queue_time_seconds": (REQUEST, "Arrival to first scheduled."),
    "request_prefill_time_seconds": (REQUEST, "First scheduled to first token."),
    "request_decode_time_seconds": (REQUEST, "First to last token."),
    "request_inference_time_seconds": (REQUEST, "First scheduled to last token."),
    "request_prompt_tokens": (None, "Prompt tokens of a sequence."),
    "request_generation_tokens": (None, "Generated tokens of a sequence."),
    "iteration_tokens_total": (ITERATION, "Tokens computed in one step."),
    "request_params_n": (PARAM_N, "The parameter n of a request."),
}


class Histogram:
    """Counts per bucket and a sum. ``bounds`` are inclusive upper ends, ascending; one more bucket holds what is above."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """Values observed."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Take a value in."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus' shape: (upper end as text, values at most that), ending with +Inf."""
        total, buckets = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        return buckets


class _Times:
    """One open sequence: what its last numbers are computed from."""

    __slots__ = ("arrival", "first", "last", "num_first", "num_prompt", "num_tokens", "scheduled", "tenant")

    def __init__(self, arrival: float, num_prompt: int, tenant: list[int]) -> None:
        self.arrival = arrival
        self.tenant = tenant
        self.num_prompt = num_prompt
        self.num_tokens = self.num_first = 0  # in all, and of them: came together with the first
        self.scheduled = self.first = self.last = -1.0  # the engine's clock; -1: not yet


class Metrics(Collector):
    """All numbers of one engine, and their text for a scraper. Call it from one thread only.

    ``arrived`` once per accepted request, ``batch`` with each batch from the engine, ``ended`` once per sequence, in this
    order; ``first_tokens`` at any time. Nothing is kept of a sequence that has ended.
    """

    def __init__(self, model_name: str, config: "Config", *, engine: int = 0) -> None:
        self.prompt_tokens = self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.ended_by: dict[str, int] = dict.fromkeys(REASONS, 0)
        blocks = config.kv.num_kv_blocks or 0
        self.stats = EngineStats(kv_total=blocks, kv_free=blocks)  # the engine's last word about itself; before that, an idle one's
        context = config.scheduler.max_model_len
        self.histograms = {name: Histogram(_to_context(context) if bounds is None else bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self._labels = {"model_name": model_name, "engine": str(engine)}
        self._cache = {
            "block_size": str(config.kv.block_size), "cache_dtype": config.kv.kv_cache_dtype,
            "enable_prefix_caching": str(config.kv.enable_prefix_caching), "num_kv_blocks": str(config.kv.num_kv_blocks),
            "kv_swap_bytes": str(config.kv.kv_swap_bytes),
        }
        named = [name for name, _ in config.scheduler.tenant_weights][: MOST_TENANTS - 1]
        self.tenants: dict[str, list[int]] = {name: [0, 0] for name in (NO_TENANT, *named)}  # label → prompt tokens, generated tokens
        self._open: dict[str, _Times] = {}
        self._gap = self.histograms["inter_token_latency_seconds"]
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # this process' memory, CPU time and open files

    @property
    def num_open(self) -> int:
        """Sequences that have arrived and not ended."""
        return len(self._open)

    @property
    def running(self) -> int:
        """Sequences running, by the engine's last word; never more than are open, as an engine that died says nothing more."""
        return min(self.stats.running, len(self._open))

    @property
    def waiting(self) -> int:
        """Sequences in the queue, likewise."""
        return min(self.stats.waiting, len(self._open))

    # -- what happens

    def arrived(self, sequences: Iterable[str], num_prompt: int, params: "SamplingParams", arrival: float, tenant: str = "") -> None:
        """A request was accepted; ``sequences`` are the ids of its n parts in the engine."""
        self.histograms["request_params_n"].observe(params.n)
        counts = self._tenant(tenant)
        for sequence in sequences:
            self._open[sequence] = _Times(arrival, num_prompt, counts)

    def batch(self, batch: "Batch", now: float) -> None:
        """One step's news, at ``now`` when the API process has them."""
        self.stats = batch.stats
        if batch.num_tokens:
            self.histograms["iteration_tokens_total"].observe(batch.num_tokens)
        for event in batch.events:
            if isinstance(event, Admitted) and (times := self._open.get(event.request_id)) is not None and times.scheduled < 0:
                times.scheduled = batch.begun
        for delta in batch.deltas:
            if delta.tokens:
                self._tokens(delta, batch.ended)

    def ended(self, sequence: str, reason: str, now: float) -> None:
        """A sequence is over, for the reason that its caller was told. Unknown ones are ignored: they were refused or told already."""
        times = self._open.pop(sequence, None)
        if times is None:
            return
        self.ended_by[reason] += 1
        if reason not in ("stop", "length") or times.first < 0:
            return
        put = self.histograms
        put["e2e_request_latency_seconds"].observe(now - times.arrival)
        put["request_prompt_tokens"].observe(times.num_prompt)
        put["request_generation_tokens"].observe(times.num_tokens)
        put["request_decode_time_seconds"].observe(times.last - times.first)
        if times.scheduled >= 0:
            put["request_queue_time_seconds"].observe(times.scheduled - times.arrival)
            put["request_prefill_time_seconds"].observe(times.first - times.scheduled)
            put["request_inference_time_seconds"].observe(times.last - times.scheduled)
        if later := times.num_tokens - times.num_first:
            put["request_time_per_output_token_seconds"].observe((times.last - times.first) / later)

    def first_tokens(self, count: int, seconds: float) -> None:
        """The first tokens of ``count`` sequences have been dealt with, so long after their request's arrival."""
        for _ in range(count):
            self.histograms["time_to_first_token_seconds"].observe(seconds)

    def _ledger(self, stats: EngineStats) -> Iterator[Metric]:
        """Where the KV blocks are: live, cached and free ones are all of the pool."""
        names, values = list(self._labels), list(self._labels.values())
        blocks = GaugeMetricFamily(
            PREFIX + "kv_blocks", "KV blocks: live + cached + free is the pool; shared ones are live.", labels=[*names, "state"],
        )
        counts = stats.kv_live, stats.kv_shared, stats.kv_cached, stats.kv_free
        for state, count in zip(("live", "shared", "cached", "free"), counts, strict=True):
            blocks.add_metric([*values, state], count)
        yield blocks
        for name, value, text in (
            ("kv_logical_blocks", stats.kv_logical, "KV blocks that the sequences would take without sharing."),
            ("kv_reserved_slots", stats.kv_reserved_slots, "Token slots of live KV blocks that are not used yet."),
            ("kv_utilization", utilization(stats, int(self._cache["block_size"])), "Live tokens over the token slots of live KV blocks."),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=names)
            gauge.add_metric(values, value)
            yield gauge

    def _tokens(self, delta: "Delta", at: float) -> None:
        times = self._open.get(delta.request_id)
        if times is None:
            return  # ended for its caller by a stop string or a disconnect: nobody gets these tokens
        count = len(delta.tokens)
        self.generation_tokens += count
        times.tenant[1] += count
        if times.first < 0:
            times.first, times.num_first = at, count
            self.prompt_tokens += times.num_prompt
            self.prompt_tokens_cached += delta.num_cached
            times.tenant[0] += times.num_prompt
        else:
            self._gap.observe(at - times.last)
        times.last = at
        times.num_tokens += count

    def _tenant(self, name: str) -> list[int]:
        """[prompt tokens, generated tokens] of a tenant, or of those that share a label."""
        counts = self.tenants.get(name or NO_TENANT)
        if counts is None:
            label = (name or NO_TENANT) if len(self.tenants) < MOST_TENANTS else OTHER_TENANTS
            counts = self.tenants.setdefault(label, [0, 0])
        return counts

    # -- the scraper

    def render(self) -> tuple[bytes, str]:
        """The text of all metrics and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """Everything as Prometheus' families."""
        names, values = list(self._labels), list(self._labels.values())
        stats = self.stats
        gauges = {
            "num_requests_running": (self.running, "Sequences running."), "num_requests_waiting": (self.waiting, "Sequences in the queue."),
            "num_requests_swapped": (min(stats.swapped, len(self._open)), "Waiting sequences that have KV blocks in the swap tier."),
            "kv_cache_usage_perc": (kv_use(stats), "Part of the KV blocks in use: 1 is all."),
            "cpu_cache_usage_perc": (
                stats.tier_used / stats.tier_total if stats.tier_total else 0.0, "Part of the swap tier's blocks in use: 1 is all."),
        }
        for name, (value, text) in gauges.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        yield from self._ledger(stats)
        info = GaugeMetricFamily(PREFIX + "cache_config_info", "The KV cache's settings, as labels.", labels=[*names, *self._cache])
        info.add_metric([*values, *self._cache.values()], 1)
        yield info
        counters = {
            "num_preemptions": (stats.preemptions, "Times that a sequence lost its blocks to another."),
            "recomputed_tokens": (stats.tokens_recomputed, "Computed tokens that were computed once more, after a preemption."),
            "prompt_tokens": (self.prompt_tokens, "Prompt tokens, cached ones too."),
            "prompt_tokens_cached": (self.prompt_tokens_cached, "Prompt tokens that were not computed, as the prefix cache had them."),
            "prefix_cache_queries": (stats.cache_queries, "Prompt tokens looked up in the prefix cache."),
            "prefix_cache_hits": (stats.cache_hits, "Prompt tokens found in the prefix cache."),
            "generation_tokens": (self.generation_tokens, "Tokens generated."),
        }
        for name, (value, text) in counters.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=names)
            counter.add_metric(values, value)
            yield counter
        text = "KV blocks moved to the swap tier (out) and back (in)."
        swapped = CounterMetricFamily(PREFIX + "swapped_blocks", text, labels=[*names, "direction"])
        for direction, count in (("out", stats.blocks_out), ("in", stats.blocks_in)):
            swapped.add_metric([*values, direction], count)
        yield swapped
        for place, (name, text) in enumerate((("prompt", "Prompt tokens by tenant, all of them."), ("generation", "Generated tokens by tenant."))):
            tokens = CounterMetricFamily(f"{PREFIX}tenant_{name}_tokens", text, labels=[*names, "tenant"])
            for tenant, counts in self.tenants.items():
                tokens.add_metric([*values, tenant], counts[place])
            yield tokens
        success = CounterMetricFamily(PREFIX + "request_success", "Sequences ended, by reason.", labels=[*names, "finished_reason"])
        for reason, count in self.ended_by.items():
            success.add_metric([*values, reason], count)
        yield success
        for name, histogram in self.histograms.items():
            family = HistogramMetricFamily(PREFIX + name, HISTOGRAMS[name][1], labels=names)
            family.add_metric(values, buckets=histogram.cumulative(), sum_value=histogram.sum)
            yield family


def utilization(stats: EngineStats, block_size: int) -> float:
    """Live tokens over allocated token slots, 0 to 1; 1 when nothing is allocated."""
    return 1 - stats.kv_reserved_slots / (stats.kv_live * block_size) if stats.kv_live else 1.0


def kv_use(stats: EngineStats) -> float:
    """The part of the KV blocks that sequences hold, 0 to 1. What is merely cached gives way at need, so it does not count (as in vLLM)."""
    return stats.kv_live / stats.kv_total if stats.kv_total else 0.0


def _to_context(context: int) -> tuple[int, ...]:
    """Buckets of token counts: 1, 2, 5, 10, 20, 50 … up to the context."""
    bounds, scale = [], 1
    while scale <= context:
        bounds.extend(scale * step for step in (1, 2, 5) if scale * step <= context)
        scale *= 10
    return tuple(bounds)
