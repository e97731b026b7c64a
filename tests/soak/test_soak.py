from pathlib import Path

from tests.checkpoints import make_tiny
from tests.soak.soak import soak

from octavo.bench.server import Server


def test_streams_whose_clients_leave_at_random(tmp_path: Path) -> None:
    """Eight seconds on a tiny model, with a pool that forces preemptions. The limits on time and memory are generous: the machine is shared."""
    path = make_tiny(tmp_path / "tiny")
    with Server(str(path), "--served-model-name", "m", "--num-kv-blocks", "200") as server:
        told = soak(server, clients=200, seconds=8, longest=64)
        print("\n".join(told.lines()))
        assert server.stop() == 0
    assert told.wrong == [] and set(told.ends) == {"done", "dropped"}
    assert told.ends["dropped"] > 0.2 * told.ends["done"] > 20
    assert told.metrics["num_requests_running"] == told.metrics["num_requests_waiting"] == told.metrics["kv_cache_usage_perc"] == 0
    assert told.metrics["num_preemptions_total"] > 0
    assert told.ends["done"] <= told.metrics["ended"] <= told.ends["done"] + told.ends["dropped"]
    assert len(told.health) > 20 and sorted(told.health)[len(told.health) // 2] < 0.5 and max(told.health) < 5
    assert told.growth("engine") < 50 and told.growth("api") < 50
