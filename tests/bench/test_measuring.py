"""What the benchmarks count: loads, steps, the work of a step; and the commands as a user runs them. No time is asserted."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.checkpoints import make_tiny
from tests.cli.conftest import Octavo, octavo  # noqa: F401 - a fixture
from typer.testing import CliRunner

from octavo.bench import kernels, latency, result, startup, throughput
from octavo.bench.ceilings import Amount, Ceilings
from octavo.bench.rig import Rig, busy
from octavo.bench.steps import OpTime, Work, mean_profile
from octavo.bench.tables import percentile, table
from octavo.bench.workloads import WORKLOADS, batch, decoding, make, named
from octavo.cli.bench import app
from octavo.config import SchedulerConfig
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.core.step import PlanItem, SlotResult, StepPlan, StepResult
from octavo.engine.console import LOGGER
from octavo.engine.report import LogReport
from octavo.errors import ConfigError, WorkerDied
from octavo.kv.manager import KvManager
from octavo.ops.recorder import OpInfo
from octavo.scheduler.scheduler import Scheduler


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("bench") / "tiny"))


@pytest.fixture(scope="module")
def rig(tiny: str):
    with Rig(tiny, {"num_threads": 2, "max_num_batched_tokens": 128}, LogReport(LOGGER)) as rig:
        yield rig


def test_loads_have_fixed_lengths_and_fresh_ids() -> None:
    load = make(WORKLOADS["mixed"], 49152, 1)
    assert (len(load.prompts), load.tokens_in, load.tokens_out) == (64, 12_994, 8_870)
    for name, workload in WORKLOADS.items():
        one, again, other = make(workload, 49152, 3, 1), make(workload, 49152, 3, 1), make(workload, 49152, 3, 2)
        assert one == again and one.outs == other.outs and [len(p) for p in one.prompts] == [len(p) for p in other.prompts]
        assert all(a[:16] != b[:16] for a, b in zip(one.prompts, other.prompts)), name
        assert all(1000 <= token < 40_000 for prompt in one.prompts for token in prompt)
    prefix = make(WORKLOADS["prefix"], 49152, 0)
    assert len({tuple(p[:768]) for p in prefix.prompts}) == 1 and len({tuple(p[768:]) for p in prefix.prompts}) == 32
    assert all(token < 320 for token in make(WORKLOADS["single"], 320, 0).prompts[0])


def test_a_workload_that_does_not_fit_is_refused_with_the_numbers() -> None:
    assert list(named("single, batch8", 256)) == ["single", "batch8"]
    with pytest.raises(ConfigError, match="long needs a context of 4160 tokens; here it is 2048"):
        named("single,long", 2048)
    with pytest.raises(ConfigError, match="no workload 'double'; there are single"):
        named("double", 2048)


def plan(*items: tuple[int, int, bool]) -> StepPlan:
    return StepPlan(0, [PlanItem(slot, 0, start, [0] * count, sample) for slot, (start, count, sample) in enumerate(items)])


def test_the_work_of_a_step_counts_weights_once_and_every_product(rig: Rig) -> None:
    assert rig.work is not None
    spec, act = rig.work.spec, 2
    d, f, v = spec.hidden, spec.ffn, spec.vocab
    qkv, o = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, spec.num_heads * spec.head_dim
    behind = o * d + d * 2 * f + f * d  # attention; in the last layer for rows that go to the head only
    layers = spec.num_layers * (d * qkv + behind)
    kv_token = 2 * spec.num_layers * spec.num_kv_heads * 32 * act  # a head of 16 takes 32 in the cache
    for items, heads in (([(0, 100, True)], 1), ([(99, 1, True), (7, 1, True)], 2), ([(16, 30, False)], 0)):
        tokens = sum(count for _, count, _ in items)
        nbytes, operations, *codes = rig.work.of(plan(*items))
        context = sum(start + count for start, count, _ in items)
        pairs = sum(start + i + 1 for start, count, _ in items for i in range(count))
        assert nbytes == act * (layers + (d * v if heads else -behind) + tokens * d) + context * kv_token
        assert operations == 2 * (tokens * (layers - behind) + heads * (behind + d * v)) + 4 * spec.num_layers * o * pairs and codes == [0, 0]
    many = StepPlan(0, [PlanItem(0, 0, 0, [0] * 100, True, score_from=0, score_to=99)])
    assert rig.work.of(many)[0] - rig.work.of(plan((0, 100, True)))[0] == act * d * v  # two tiles of rows: the head's matrix twice


def test_steps_add_up_to_the_load(rig: Rig) -> None:
    load = make(batch(3, 20, 8), rig.llm.vocab_size, 5)
    run = rig.run(load, profile=lambda plan: plan.num_tokens == 3)
    assert sum(step.plan.num_tokens for step in run.steps) == 3 * (20 + 7)
    assert sum(item.sample for step in run.steps for item in step.plan.items) == 24
    assert len(run.decode) == 7 == len(run.profiled) and all(0 < native <= took for took, native in run.decode)
    assert 0 < run.first_token < run.seconds and sum(step.native for step in run.steps) < run.seconds
    ops = mean_profile(rig.work, run.profiled)
    assert sum(op.seconds for op in ops) <= sum(native for _, native in run.decode) / 7
    want = sum((rig.work.of(plan) for plan, _ in run.profiled), Amount()).divided(7)
    assert sum((op.work for op in ops), Amount()) == pytest.approx(want)
    assert rig.llm.engine.core.executor is not run and rig.run(load).profiled == [], "measured only when asked"


def test_a_floor_is_the_worse_of_two() -> None:
    ceilings = Ceilings(10.0, 100.0, 400.0, 800.0)
    assert ceilings.floor(Amount(20, 500, 800, 800)) == 8
    assert ceilings.floor(Amount(20, 100, 0)) == 2 and ceilings.floor(Amount(20, 500, 0)) == 5 and ceilings.floor(Amount(20, 500, 800)) == 7
    ops = [OpInfo("linear", "T", 10, 30), OpInfo("linear", "T", 10, 30, 8), OpInfo("linear", "T", 10, 30, 4)]
    work = Work(ops, SimpleNamespace(windows=(), num_layers=1), 0)
    assert work.of(plan((0, 3, True))) == Amount(30, 180, 180, 180)


def test_mean_profile_of_steps_of_different_sizes() -> None:
    class Two(Work):
        def by_name(self, plan: StepPlan, seconds: list[float]) -> list[OpTime]:
            return [OpTime("a", seconds[0], Amount(plan.num_tokens, 1))]

    ops = mean_profile(Two([], None, 0), [(plan((0, 1, True)), [1.0]), (plan((0, 3, True)), [2.0])])
    assert ops == [OpTime("a", 1.5, Amount(2, 1))]


def test_a_busy_machine_is_told() -> None:
    assert busy(0.9, 2) == "" and "a load of 7.5 on 2 cores" in busy(7.5, 2)


def test_percentiles_and_tables() -> None:
    assert [percentile(range(1, 101), part) for part in (0, 0.5, 0.99, 1)] == [1, 50, 99, 100] and percentile([7], 0.99) == 7
    assert table(("name", "n"), [("a", 10), ("bcdef", None)]) == "name    n\na      10\nbcdef   –\n"


def test_quantized_layers_are_products_of_bytes(tiny: str) -> None:
    with Rig(tiny, {"num_threads": 1, "quantization": "int8"}, LogReport(LOGGER)) as rig:
        found = rig.work.of(plan((0, 2, True)))
        s = rig.work.spec
        behind = s.num_heads * s.head_dim * s.hidden + 3 * s.hidden * s.ffn  # in the last layer for one row of the two
        layers = s.num_layers * (s.hidden * (s.num_heads + 2 * s.num_kv_heads) * s.head_dim + behind)
        assert found.codes == 2 * (2 * layers - behind + s.hidden * s.vocab)
        assert found.operations == 4 * s.num_layers * s.num_heads * s.head_dim * 3, "attention stays one of numbers"
        assert rig.run(make(batch(1, 8, 3), rig.llm.vocab_size, 1)).seconds > 0


def test_results_have_every_sample(rig: Rig) -> None:
    text, found = throughput.run(rig, "single", 2, 0)
    single = found["results"]["single"]
    assert len(single["seconds"]["samples"]) == 2 == len(single["roofline"]["samples"]) and 0 < single["outside_native"]["median"] < 1
    assert "single" in text and "GB/s" in text and found["ceilings"]["read_bytes_per_second"] > 0
    text, found = latency.run(rig, [1, 4], 16, 8, 2, 1)
    assert set(found["results"]) == {"1", "4"} and {op["op"] for op in found["results"]["4"]["profile"]} >= {"attention", "head 64→320", "sample"}
    with pytest.raises(ConfigError, match="batch sizes must be from 1 to max_num_seqs"):
        latency.run(rig, [1, 1000], 16, 8, 2, 1)


def test_the_commands_end_with_a_line_of_json(octavo: Octavo, tiny: str, tmp_path: Path) -> None:  # noqa: F811
    for args in (("throughput", "--workloads", "single", "--repeat", "1", "--warmup", "0"),
                 ("latency", "--batch-size", "2", "--input-len", "8", "--output-len", "4", "--repeat", "1"),
                 ("kernels", "--rows", "1", "--rows", "3", "--rows", "70", "--context", "20", "--repeat", "1")):
        saved = tmp_path / f"{args[0]}.json"
        done = octavo("bench", args[0], tiny, *args[1:], "--save", str(saved), "--num-threads", "1")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["benchmark"] == args[0] and found == json.loads(saved.read_text()) and found["results"]
        assert found["build"]["compiler"] and found["machine"]["cpu"] and found["config"]["runner"]["num_threads"] == 1 and "commit" in found
    assert set(found["results"]) == {"1", "3", "70"}
    assert octavo("bench", "throughput", tiny, "--workloads", "long").stderr.endswith("here it is 2048 (--max-model-len) (--workloads)\n")


@pytest.mark.parametrize(("args", "says"), [
    (("throughput", "--workloads", "single,long"), "long needs a context of 4160 tokens; here it is 2048"),
    (("throughput", "--workloads", "single", "--max-model-len", "100"), "single needs a context of 256 tokens; here it is 100"),
    (("latency", "--input-len", "100000000"), "input_len 100000000 and output_len 128: at least 2 in, and at most 2048 together"),
    (("latency", "--output-len", "2000"), "input_len 128 and output_len 2000"), (("latency", "--batch-size", "257"), r"max_num_seqs \(256\), not"),
    (("kernels", "--rows", "513"), r"max_num_batched_tokens \(512\), not"), (("kernels", "--context", "100000000"), "not 100000000"),
    (("kernels", "--rows", "8", "--max-num-seqs", "4"), "8 rows are as many sequences"),
    (("latency", "--save", "/no/such/folder/x.json"), "save: /no/such/folder is no folder that is there"),
    (("throughput", "--save", "/proc"), "save: /proc is a folder"), (("kernels", "--save", "/proc/version/x"), "save: /proc/version is no folder"),
    (("startup", "--save", "/no/such/folder/x.json"), "make it first"),
])
def test_what_cannot_be_measured_is_told_before_the_weights_are_read(
    args: tuple[str, ...], says: str, tiny: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("octavo.bench.rig.LLM", None)
    monkeypatch.setattr("octavo.bench.startup.run", None)
    done = CliRunner().invoke(app, [args[0], tiny, *args[1:]])
    assert isinstance(done.exception, ConfigError), done
    assert re.search(says, done.exception.message)


def test_a_result_is_written_whole_and_is_not_lost_where_it_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result.hand_out("a table", {"found": 1}, tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == {"found": 1} and os.listdir(tmp_path) == ["x.json"]
    with pytest.raises(ConfigError, match="could not be written") as caught:
        result.hand_out("a table", {"found": 1}, tmp_path / "gone" / "x.json")
    assert caught.value.param == "save" and capsys.readouterr().out == 'a table\n{"found": 1}\n' * 2


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result.check_place(tmp_path / "x.json")
    monkeypatch.setattr(result.os, "access", lambda path, mode: False)  # to the superuser every folder is open
    with pytest.raises(ConfigError, match="cannot be written to"):
        result.check_place(tmp_path / "x.json")


@pytest.mark.parametrize("size", [1, 7, 32, 64])
@pytest.mark.parametrize("context", [2, 17, 128, 700])
def test_all_rows_of_the_kernels_bench_decode_together(size: int, context: int) -> None:
    """Whatever a step's budget is: enough steps, all at about the context asked for, and within the room that the bench asks for."""
    for budget in {size, size + 5, max(size, 100), 512, 4096}:
        load = make(decoding(size, context, kernels.STEPS, budget), 49152, 0)
        assert max(len(prompt) + out for prompt, out in zip(load.prompts, load.outs)) < context + kernels.ROOM
        scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=budget), KvManager(size * (context // 16 + 3)))
        for number, (prompt, out) in enumerate(zip(load.prompts, load.outs)):
            params = SamplingParams(max_tokens=out, ignore_eos=True)
            scheduler.add(Request(str(number), prompt, params, max_total=len(prompt) + out))
        found = []
        while (plan := scheduler.plan()) is not None:
            if kernels.measured(plan, size, context):
                found.append(plan)
            scheduler.commit(plan, StepResult(plan.number, [SlotResult(i.slot, i.epoch, [7] if i.sample else []) for i in plan.items]))
        assert not scheduler.has_unfinished and kernels.STEPS <= len(found) <= kernels.STEPS + 8
        assert all(abs(item.start - context) < kernels.ROOM for plan in found for item in plan.items)


def test_kernels_that_were_not_measured_are_an_error(tiny: str) -> None:
    with Rig(tiny, {"num_threads": 1, "max_num_batched_tokens": 128, "max_num_seqs": 40, "num_kv_blocks": 16}, LogReport(LOGGER)) as rig:
        _, found = kernels.run(rig, [4], 20, 1)
        assert found["results"]["4"], "few enough fit"
        with pytest.raises(ConfigError, match=r"no step had 32 rows.*16 KV blocks"):
            kernels.run(rig, [32], 20, 1)
        with pytest.raises(ConfigError, match=r"41 rows are as many sequences that decode; at most 40 run \(max_num_seqs\)"):
            kernels.run(rig, [41, 70], 20, 1)


def test_a_start_is_measured_to_its_first_token(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(startup.hub, "resolve", {"owner/its-name": Path(tiny)}.__getitem__)
    text, found = startup.run("owner/its-name", {"num_threads": 1, "max_model_len": 128, "enable_prefix_caching": False}, 1)
    assert {(way, when) for way, times in found["results"].items() for when in times} == {(w, t) for w in startup.WAYS for t in startup.TIMES}
    for times in found["results"].values():
        for measured in times.values():
            assert measured["seconds"]["median"] > 0 and measured["anonymous_bytes"]["median"] > 1 << 20
    assert found["config"]["scheduler"]["max_model_len"] == 128 and not found["config"]["kv"]["enable_prefix_caching"]
    assert found["config"]["model"]["model"] == "its-name" and "serve, again" in text
    assert not list((tmp_path / "kept").glob("packed/*")), "the user's own cache is left alone"
    with pytest.raises(WorkerDied, match=r"(?s)status 1: .*the model was made for 2048 tokens at most$"):
        startup.run("owner/its-name", {"max_model_len": 1 << 20}, 1)
