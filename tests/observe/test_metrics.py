from dataclasses import replace

import pytest

from octavo.config import Config, KvConfig, ModelConfig, RunnerConfig, SchedulerConfig
from octavo.core.output import Delta
from octavo.core.sampling import SamplingParams
from octavo.engine.messages import Batch, EngineStats
from octavo.observe import metrics as m
from octavo.observe.events import Admitted, Event, Preempted

CONFIG = Config(ModelConfig("m"), KvConfig(num_kv_blocks=40), SchedulerConfig(max_model_len=300), RunnerConfig())
STATS = EngineStats(running=2, waiting=1, kv_total=40, kv_free=30, steps=1, tokens_planned=5, tokens_sampled=1)


def made() -> m.Metrics:
    return m.Metrics("octavo-test", CONFIG)


def step(begun: float, ended: float, rows: int, deltas: list[Delta], events: list[Event] | None = None, stats: EngineStats = STATS) -> Batch:
    return Batch(begun, ended, rows, deltas, events or [], stats)


def samples(metrics: m.Metrics) -> dict[str, float]:
    """Sample name with its own labels → value, as a scraper reads it."""
    from prometheus_client.parser import text_string_to_metric_families

    text, kind = metrics.render()
    assert kind.startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            if not sample.name.startswith("octavo:"):
                continue
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "octavo-test" and labels.pop("engine") == "0"
            found[sample.name.removeprefix("octavo:") + "".join(f"{{{key}={value}}}" for key, value in sorted(labels.items()))] = sample.value
    return found


def test_the_times_of_one_sequence() -> None:
    """Binary fractions: every sum is exact."""
    metrics = made()
    metrics.arrived(["a"], 7, SamplingParams(n=1), 100.0)
    metrics.batch(step(100.25, 100.5, 7, [], [Admitted("a", 0, 0, False)]), 100.5)  # a first chunk: no token yet
    metrics.batch(step(100.5, 101.0, 3, [Delta("a", [5])]), 101.125)  # told an eighth of a second later
    metrics.first_tokens(1, 1.125)
    metrics.batch(step(101.0, 101.25, 1, [Delta("a", [6])]), 101.25)
    metrics.batch(step(101.25, 101.75, 1, [Delta("a", [7], finish_reason="length")]), 101.75)
    assert metrics.num_open == 1
    metrics.ended("a", "length", 102.0)
    assert metrics.num_open == 0
    got = samples(metrics)
    expected = {
        "time_to_first_token_seconds": (1, 1.125), "inter_token_latency_seconds": (2, 0.75), "request_time_per_output_token_seconds": (1, 0.375),
        "e2e_request_latency_seconds": (1, 2.0), "request_queue_time_seconds": (1, 0.25), "request_prefill_time_seconds": (1, 0.75),
        "request_decode_time_seconds": (1, 0.75), "request_inference_time_seconds": (1, 1.5), "request_prompt_tokens": (1, 7),
        "request_generation_tokens": (1, 3), "iteration_tokens_total": (4, 12), "request_params_n": (1, 1),
    }
    assert set(expected) == set(m.HISTOGRAMS)
    for name, (count, total) in expected.items():
        assert (got[f"{name}_count"], got[f"{name}_sum"]) == (count, total), name
        assert got[f"{name}_bucket{{le=+Inf}}"] == count
    assert (got["prompt_tokens_total"], got["generation_tokens_total"]) == (7, 3)
    assert got["inter_token_latency_seconds_bucket{le=0.2}"] == 0 and got["inter_token_latency_seconds_bucket{le=0.3}"] == 1
    assert got["inter_token_latency_seconds_bucket{le=0.4}"] == 1 and got["inter_token_latency_seconds_bucket{le=0.5}"] == 2


def test_gauges_counters_and_info() -> None:
    metrics = made()
    before = samples(metrics)
    assert before["num_requests_running"] == before["kv_cache_usage_perc"] == before["num_preemptions_total"] == 0
    assert [before[f"kv_blocks{{state={state}}}"] for state in ("live", "shared", "cached", "free")] == [0, 0, 0, 40]
    metrics.arrived([str(place) for place in range(7)], 4, SamplingParams(n=7), 0.0)
    stats = EngineStats(
        running=3, waiting=4, kv_total=40, kv_free=6, preemptions=5, tokens_lost=77, kv_cached=4, kv_shared=7, kv_logical=50, kv_reserved_slots=48,
        cache_queries=90, cache_hits=32, tokens_recomputed=61, blocks_out=9, blocks_in=8, tier_total=40, tier_used=10, swapped=2,
    )
    metrics.batch(step(1, 2, 0, [], [Preempted("a", "b needs 1 block", 70, 4)], stats), 2)
    got = samples(metrics)
    assert (got["num_requests_running"], got["num_requests_waiting"], got["kv_cache_usage_perc"]) == (3, 4, 0.75)
    assert (got["num_preemptions_total"], got["recomputed_tokens_total"]) == (5, 61)
    assert [got[f"swapped_blocks_total{{direction={direction}}}"] for direction in ("out", "in")] == [9, 8]
    assert (got["cpu_cache_usage_perc"], got["num_requests_swapped"]) == (0.25, 2)
    assert before["cpu_cache_usage_perc"] == before["swapped_blocks_total{direction=out}"] == 0
    assert [got[f"kv_blocks{{state={state}}}"] for state in ("live", "shared", "cached", "free")] == [30, 7, 4, 6]
    assert (got["kv_logical_blocks"], got["kv_reserved_slots"], got["kv_utilization"]) == (50, 48, 0.9)
    assert (got["prefix_cache_queries_total"], got["prefix_cache_hits_total"], got["prompt_tokens_cached_total"]) == (90, 32, 0)
    assert before["kv_utilization"] == 1
    for place in range(7):  # an engine that died says nothing more
        metrics.ended(str(place), "error", 3)
    assert (metrics.running, metrics.waiting) == (0, 0)
    assert got["iteration_tokens_total_count"] == 0  # a step that computed nothing is none
    assert got["cache_config_info{block_size=16}{cache_dtype=auto}{enable_prefix_caching=True}{kv_swap_bytes=0}{num_kv_blocks=40}"] == 1


def test_names_buckets_and_labels_are_those_that_dashboards_use() -> None:
    lines = set(made().render()[0].decode().splitlines())
    assert {
        "# TYPE octavo:num_requests_running gauge", "# TYPE octavo:prompt_tokens_total counter",
        "# TYPE octavo:inter_token_latency_seconds histogram",
        'octavo:request_success_total{engine="0",finished_reason="abort",model_name="octavo-test"} 0.0',
        'octavo:time_to_first_token_seconds_bucket{engine="0",le="0.04",model_name="octavo-test"} 0.0',
    } <= lines
    vllm = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
    assert tuple(bound for bound in m.PER_TOKEN if bound >= .01) == vllm and m.PER_TOKEN[0] <= .001
    assert m.TTFT[:4] == (.001, .005, .01, .02) and m.TTFT[-1] == 2560
    assert made().histograms["request_prompt_tokens"].bounds == (1, 2, 5, 10, 20, 50, 100, 200)  # up to the context of 300


@pytest.mark.parametrize(("value", "bucket"), [(0, 0), (1, 0), (1.0001, 1), (8, 1), (16384, 12), (16385, 13)])
def test_a_bucket_holds_its_upper_end(value: float, bucket: int) -> None:
    histogram = m.Histogram(m.ITERATION)
    histogram.observe(value)
    assert histogram.counts.index(1) == bucket and histogram.sum == value
    assert [count for _, count in histogram.cumulative()] == [float(place >= bucket) for place in range(len(m.ITERATION) + 1)]


def test_every_end_is_counted_and_nothing_is_kept() -> None:
    metrics = made()
    ids = [f"r-{place}" for place in range(5)]
    metrics.arrived(ids, 4, SamplingParams(n=5), 1.0)
    metrics.batch(step(2, 3, 20, [Delta(name, [1]) for name in ids[:4]], [Admitted(name, 0, 0, False) for name in ids[:4]]), 3)
    for name, reason in zip(ids, ("stop", "length", "abort", "error", "abort"), strict=True):
        metrics.ended(name, reason, 4)
    metrics.ended("r-0", "stop", 5)  # told twice: counted once
    metrics.ended("never seen", "stop", 5)
    metrics.batch(step(4, 5, 4, [Delta(name, [2]) for name in ids]), 5)  # tokens that came too late are nobody's
    got = samples(metrics)
    by = {reason: got[f"request_success_total{{finished_reason={reason}}}"] for reason in m.REASONS}
    assert by == {"stop": 1, "length": 1, "abort": 2, "error": 1}
    assert metrics.num_open == 0 and not metrics._open
    assert (got["generation_tokens_total"], got["prompt_tokens_total"]) == (4, 16)
    assert got["e2e_request_latency_seconds_count"] == 2  # of those that ended by themselves
    assert got["request_time_per_output_token_seconds_count"] == 0  # one token has no time per further token
    assert (got["request_params_n_count"], got["request_params_n_sum"]) == (1, 5)


def test_tokens_are_counted_by_tenant() -> None:
    metrics = made()
    for name, tenant in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "")):
        metrics.arrived([name], 4, SamplingParams(), 0.0, tenant)
        metrics.batch(step(1, 2, 4, [Delta(name, [1, 2, 3])]), 2)
    got = samples(metrics)
    for tenant, times in (("x", 2), ("y", 1), ("(none)", 1)):
        assert got[f"tenant_prompt_tokens_total{{tenant={tenant}}}"] == 4 * times
        assert got[f"tenant_generation_tokens_total{{tenant={tenant}}}"] == 3 * times


def test_however_many_tenants_there_are_labels_are_few() -> None:
    config = replace(CONFIG, scheduler=SchedulerConfig(tenant_weights=(("named", 2.0),)))
    metrics = m.Metrics("octavo-test", config)
    for place in range(1000):
        metrics.arrived([f"r{place}"], 1, SamplingParams(), 0.0, f"tenant {place}")
        metrics.batch(step(1, 2, 1, [Delta(f"r{place}", [1])]), 2)
        metrics.ended(f"r{place}", "stop", 2)
    metrics.arrived(["last"], 1, SamplingParams(), 0.0, "named")
    metrics.batch(step(1, 2, 1, [Delta("last", [1])]), 2)
    got = {name: value for name, value in samples(metrics).items() if name.startswith("tenant_prompt_tokens_total")}
    assert len(got) == m.MOST_TENANTS + 1 and sum(got.values()) == 1001
    assert got["tenant_prompt_tokens_total{tenant=named}"] == 1 and got["tenant_prompt_tokens_total{tenant=tenant 0}"] == 1
    assert got["tenant_prompt_tokens_total{tenant=(other)}"] == 1000 - (m.MOST_TENANTS - 2)


def test_a_preempted_sequence_keeps_its_first_times() -> None:
    metrics = made()
    metrics.arrived(["a"], 4, SamplingParams(), 0.0)
    metrics.batch(step(1, 2, 4, [Delta("a", [1])], [Admitted("a", 0, 0, False)]), 2)
    metrics.batch(step(2, 3, 0, [], [Preempted("a", "", 5, 1)]), 3)
    metrics.batch(step(5, 6, 5, [Delta("a", [2])], [Admitted("a", 1, 0, True)]), 6)
    metrics.ended("a", "stop", 6)
    got = samples(metrics)
    assert got["request_queue_time_seconds_sum"] == 1 and got["inter_token_latency_seconds_sum"] == 4 and got["prompt_tokens_total"] == 4


def test_several_tokens_at_once_are_one_gap() -> None:
    metrics = made()
    metrics.arrived(["a"], 1, SamplingParams(), 0.0)
    metrics.batch(step(0, 1, 1, [Delta("a", [1])], [Admitted("a", 0, 0, False)]), 1)
    metrics.batch(step(1, 3, 4, [Delta("a", [2, 3, 4, 5])]), 3)
    metrics.ended("a", "length", 3)
    got = samples(metrics)
    assert (got["inter_token_latency_seconds_count"], got["inter_token_latency_seconds_sum"]) == (1, 2)
    assert (got["generation_tokens_total"], got["request_time_per_output_token_seconds_sum"]) == (5, 0.5)


def test_a_beam_has_no_time_per_output_token() -> None:
    """All of its tokens come at once: that says nothing of how fast they came."""
    metrics = made()
    metrics.arrived(["a"], 1, SamplingParams(use_beam_search=True), 0.0)
    metrics.batch(step(0, 3, 1, [Delta("a", [1, 2, 3], finish_reason="length")], [Admitted("a", 0, 0, False)]), 3)
    metrics.ended("a", "length", 3)
    got = samples(metrics)
    assert got["generation_tokens_total"] == 3 and got["e2e_request_latency_seconds_sum"] == 3
    assert got["request_time_per_output_token_seconds_count"] == got["inter_token_latency_seconds_count"] == 0


def test_the_context_is_in_the_config() -> None:
    longer = replace(CONFIG, scheduler=SchedulerConfig(max_model_len=5000))
    assert m.Metrics("x", longer).histograms["request_generation_tokens"].bounds[-1] == 5000
