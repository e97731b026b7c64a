import math
import subprocess
import sys
from pathlib import Path

import pytest
from tests.checkpoints import make_tiny
from tests.soak import engine
from tests.soak.soak import soak

from octavo import LLM
from octavo.bench.server import Server


def test_streams_whose_clients_leave_at_random(tmp_path: Path) -> None:
    """Eight seconds on a tiny model, with a pool that forces preemptions. The limit on memory is generous: the machine is shared."""
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
    assert told.health and max(told.health) < math.inf  # every probe was answered; how soon is for the whole soak to show, on a quiet machine
    assert told.growth("engine") < 50 and told.growth("api") < 50


def test_some_hundred_requests_of_all_kinds_leave_nothing_behind(tmp_path: Path) -> None:
    with LLM(str(make_tiny(tmp_path / "tiny")), **engine.SETTINGS) as llm:
        told = engine.soak(llm, 600)
    assert told.preemptions > 0 and told.hits > 0 and told.ends["stop"] > 0 and told.ends["length"] > 0 and told.ends["dropped"] > 0
    assert not told.ends["error"] and not told.ends["None"]


@pytest.mark.matrix
def test_memory_is_flat_over_twenty_thousand_requests(tmp_path: Path) -> None:
    """In a process of its own: the test's own has grown by then, and may shrink."""
    model = make_tiny(tmp_path / "tiny")
    done = subprocess.run([sys.executable, engine.__file__, "--model", str(model)], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
