"""/metrics of a real server, against what its clients counted."""

from collections.abc import Iterator

import pytest
from tests.checkpoints import make_tiny

from octavo.bench.serve_client import Job, drive, token_times
from octavo.bench.server import Server
from octavo.observe.metrics import HISTOGRAMS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = make_tiny(tmp_path_factory.mktemp("metrics") / "tiny")
    with Server(str(path), "--served-model-name", "tiny", "--max-num-seqs", "16", "--num-kv-blocks", "64", "--kv-swap-bytes", str(8 << 20),
                "--preemption-mode", "swap", env={"OCTAVO_LOG": "info"}) as server:
        yield server


def body(**more: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": [5, 6, 7, 8, 9], "ignore_eos": True, "stream": True, "temperature": 0} | more


def test_counts_and_times_are_what_the_clients_saw(server: Server) -> None:
    before = server.metrics()
    jobs = [Job(place, "/v1/completions", body(max_tokens=20 + place, return_token_ids=True)) for place in range(8)]
    jobs.append(Job("two", "/v1/completions", body(max_tokens=10, n=2, temperature=1)))
    results = list(drive(server.url, jobs, 9))
    assert all(result.end == "done" for result in results)
    after = server.metrics()
    rise = {name: after[name] - before[name] for name in after}
    generated = sum(20 + place for place in range(8)) + 2 * 10
    assert rise["generation_tokens_total"] == generated and rise["prompt_tokens_total"] == 10 * 5
    assert rise["request_success_total"] == rise["e2e_request_latency_seconds_count"] == rise["time_to_first_token_seconds_count"] == 10
    assert rise["inter_token_latency_seconds_count"] == generated - 10
    assert (rise["request_params_n_count"], rise["request_params_n_sum"]) == (9, 10)
    assert (rise["request_generation_tokens_sum"], rise["request_prompt_tokens_sum"]) == (generated, 50)
    assert rise["iteration_tokens_total_sum"] == generated - 10 + 50 - 4 - rise["prompt_tokens_cached_total"]  # the last token of each is never
    # computed, and of the prompt of "two" all but the last row once only
    assert rise["prompt_tokens_cached_total"] == rise["prefix_cache_hits_total"]
    # Client's times contain the server's.
    alone = [result for result in results if result.key != "two"]
    assert 0 < rise["time_to_first_token_seconds_sum"] <= sum(min(token_times(r)) - r.sent for r in alone) + 10 * 0.25
    whole = rise["request_prefill_time_seconds_sum"] + rise["request_decode_time_seconds_sum"]
    assert whole == pytest.approx(rise["request_inference_time_seconds_sum"])
    assert rise["request_inference_time_seconds_sum"] + rise["request_queue_time_seconds_sum"] <= rise["e2e_request_latency_seconds_sum"] + 1e-6
    assert after["num_requests_running"] == after["num_requests_waiting"] == after["kv_cache_usage_perc"] == 0


def test_a_client_that_leaves_is_an_abort_and_its_blocks_come_back(server: Server) -> None:
    before = server.metrics()
    dropped = list(drive(server.url, [Job(place, "/v1/completions", body(max_tokens=900), drop_after=3) for place in range(4)], 4))
    assert [result.end for result in dropped] == ["dropped"] * 4
    import time

    deadline = time.monotonic() + 20
    while (after := server.metrics())["request_success_total"] < before["request_success_total"] + 4 or (
        after["num_requests_running"] or after["kv_cache_usage_perc"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    text = server.request("GET", "/metrics")[1].decode()
    aborts = [line for line in text.splitlines() if line.startswith('octavo:request_success_total{engine="0",finished_reason="abort"')]
    assert len(aborts) == 1 and float(aborts[0].split()[-1]) == 4
    assert after["e2e_request_latency_seconds_count"] == before["e2e_request_latency_seconds_count"]


def test_preemptions_are_counted(server: Server) -> None:
    """64 blocks hold 1,024 tokens; four sequences of 400 do not fit."""
    before = server.metrics()
    results = list(drive(server.url, [Job(place, "/v1/completions", body(max_tokens=400)) for place in range(4)], 4))
    assert all(result.end == "done" for result in results)
    after = server.metrics()
    assert after["num_preemptions_total"] > before["num_preemptions_total"] and after["swapped_blocks_total"] > before["swapped_blocks_total"]
    assert after["recomputed_tokens_total"] == before["recomputed_tokens_total"]  # all of it came back from the tier
    assert after["cpu_cache_usage_perc"] == after["num_requests_swapped"] == 0
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == 1600


def test_everything_is_there_under_its_name(server: Server) -> None:
    status, text = server.request("GET", "/metrics")
    assert status == 200
    for name in HISTOGRAMS:
        assert f"# TYPE octavo:{name} histogram" in text.decode()
    assert 'model_name="tiny"' in text.decode() and "process_resident_memory_bytes" in text.decode()
