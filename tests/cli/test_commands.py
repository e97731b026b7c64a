"""The commands as a user runs them: their own processes, exit status, both output streams."""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.conftest import Octavo


def test_help_and_version_are_there_and_light(octavo: Octavo) -> None:
    done = octavo("--help")
    assert done.returncode == 0 and all(name in done.stdout for name in ("serve", "chat", "generate", "inspect", "pull", "bench"))
    import octavo as package

    assert octavo("--version").stdout == f"octavo {package.__version__}\n"
    probe = ("import sys; import octavo.cli.main; "
             "print({'numpy', 'fastapi', 'uvicorn', 'tokenizers', 'huggingface_hub', 'zmq', 'rich.progress', 'http.client'} & set(sys.modules))")
    heavy = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    assert heavy == "set()\n"


def test_the_servers_process_reads_a_model_without_numpy(tiny: str) -> None:
    """It starts beside the engine's, on the same cores: what it imports is waited for."""
    probe = """
import sys
from pathlib import Path
import octavo.server.app
from octavo.config import *
from octavo.engine.textside import read_text
read_text(Config(ModelConfig(""), KvConfig(), SchedulerConfig(), RunnerConfig()), Path(sys.argv[1]))
print({"numpy", "fastapi"} & set(sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", probe, tiny], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_every_engine_option_has_its_line(octavo: Octavo, command: str) -> None:
    from octavo.cli.options import ENGINE_OPTIONS

    text = octavo(command, "--help", env={"COLUMNS": "160"}).stdout
    for name, (kind, told, names) in ENGINE_OPTIONS.items():
        if kind is bool:
            assert names[0].partition("/")[2] in text, name
        if not told:
            continue
        wanted = f"--{name.replace('_', '-')}" if command == "serve" and name == "seed" else (names or (f"--{name.replace('_', '-')}",))[0]
        assert wanted.partition("/")[0] in text, wanted


def test_one_prompt_streams_text_to_stdout_and_the_rest_to_stderr(octavo: Octavo, tiny: str) -> None:
    done = octavo("generate", tiny, "--prompt", "The quick", "--max-tokens", "6", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert "6 tokens in" in done.stderr and "ready in" in done.stderr and "Config(" not in done.stderr and "tokens/s" not in done.stdout
    assert done.stdout.endswith("\n") and len(done.stdout) > 1
    assert "settings" in octavo("generate", tiny, "--prompt", "a", "--max-tokens", "1", "-v").stderr


def test_json_has_what_the_library_returns(octavo: Octavo, tiny: str) -> None:
    from octavo import LLM, SamplingParams

    args = ("--max-tokens", "5", "--temperature", "0.7", "--seed", "3", "--n", "2", "--logprobs", "1")
    done = octavo("generate", tiny, "--prompt", "The quick", "--prompt", "a block", "--json", *args)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    with LLM(tiny) as llm:
        outs = llm.generate(["The quick", "a block"], SamplingParams(max_tokens=5, temperature=0.7, seed=3, n=2, logprobs=1), use_tqdm=False)
    assert len(rows) == 2
    for row, out in zip(rows, outs, strict=True):
        assert [sample["token_ids"] for sample in row["outputs"]] == [sample.token_ids for sample in out.outputs]
        assert [sample["text"] for sample in row["outputs"]] == [sample.text for sample in out.outputs]
        assert len(row["outputs"][0]["logprobs"]) == 5


def test_prompts_from_a_file_and_from_standard_input(octavo: Octavo, tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    done = octavo("generate", tiny, "--prompts-file", str(file), "--max-tokens", "2", "--temperature", "0")
    assert done.stdout.count(">>> ") == 2 and ">>> one\n" in done.stdout and ">>> two\n" in done.stdout
    piped = octavo("generate", tiny, "--max-tokens", "3", "--temperature", "0", "--json", stdin="one")
    assert json.loads(piped.stdout)["prompt"] == "one"


@pytest.mark.parametrize(("args", "says"), [
    (("--max-model-len", "99999"), "max_model_len is 99999; the model was made for 2048 tokens at most (--max-model-len)"),
    (("--block-size", "32"), "block_size must be 16"),
    (("--scheduling-policy", "lottery"), "scheduling_policy must be fcfs or priority or lpm or fair, not 'lottery'"),
    (("--tenant-weights", "a=2"), "tenant_weights are shares under scheduling_policy"),
    (("--scheduling-policy", "fair", "--tenant-weights", "a=0"), "the weight of 'a' must be a number from 0.001 to 1e+06, not '0'"),
    (("--admission", "hopeful"), "admission must be optimistic or predicted, not 'hopeful'"),
    (("--target-itl-ms", "0"), "target_itl_ms must be a number of milliseconds above 0, or None for no target, not 0.0 (--target-itl-ms)"),
    (("--kv-cache-dtype", "fp8_e5m2"), "kv_cache_dtype='fp8_e5m2' is not served"),
    (("--quantization", "awq"), "quantization='awq' is not served: int8, int4"),
    (("--num-kv-blocks", "0"), "num_kv_blocks must be between 1 and"),
    (("--temperature", "-1"), "temperature must be at least 0, not -1.0 (--temperature)"),
    (("--max-tokens", "0"), "max_tokens must be between 1 and 2147483647, not 0 (--max-tokens)"),
    (("--prompts-file", "/no/such/file"), "not both"),
])
def test_a_bad_setting_is_one_line_that_names_it(octavo: Octavo, tiny: str, args: tuple[str, ...], says: str) -> None:
    done = octavo("generate", tiny, "--prompt", "a", *args)
    assert done.returncode == 2 and done.stdout == ""
    assert says in done.stderr.splitlines()[-1] and done.stderr.splitlines()[-1].startswith("octavo: ") and "Traceback" not in done.stderr


@pytest.mark.parametrize(("args", "says"), [
    (("generate", "--prompt", ""), "a prompt is empty: at least one character is needed (--prompt)"),
    (("generate",), "a prompt is empty: at least one character is needed (--prompt)"),
    (("bench", "throughput", "--workloads", "single,marathon"), "there is no workload 'marathon'"),
    (("bench", "latency", "--batch-size", "0"), "'--batch-size'"), (("bench", "latency", "--input-len", "1"), "'--input-len'"),
    (("bench", "latency", "--output-len", "2"), "'--output-len'"), (("bench", "kernels", "--context", "1"), "'--context'"),
    (("bench", "latency", "--save", "/no/folder/x.json"), "save: /no/folder is no folder that is there: make it first (--save)"),
    (("eval", "--save", "/no/folder/x.json"), "make it first (--save)"),
    (("bench", "kernels", "--rows", "8", "--rows", "0"), "'--rows'"), (("bench", "kernels", "--rows", "-1"), "'--rows'"),
])
def test_what_no_model_is_needed_for_is_told_before_one_is_loaded(octavo: Octavo, args: tuple[str, ...], says: str) -> None:
    done = octavo(*args, "/no/such/model")
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert says in done.stderr and "/no/such/model" not in done.stderr, done.stderr


def test_bad_usage_is_told_by_the_parser(octavo: Octavo, tiny: str) -> None:
    for args, says in ((("generate", tiny, "--max-tokens", "many"), "--max-tokens"), (("generate", tiny, "--no-such"), "No such option"),
                       (("bake",), "No such command"), (("generate",), "Missing argument")):
        done = octavo(*args)
        assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_a_model_that_is_not_there(octavo: Octavo, tmp_path: Path) -> None:
    done = octavo("generate", str(tmp_path / "nothing"), "--prompt", "a")
    assert done.returncode == 2 and "no such file or directory" in done.stderr
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(5))
    done = octavo("inspect", str(tmp_path / "broken.gguf"))
    assert done.returncode == 2 and "octavo: " in done.stderr and "Traceback" not in done.stderr


def test_a_reader_that_leaves_ends_the_command_quietly(tiny: str) -> None:
    command = [sys.executable, "-m", "octavo", "generate", tiny, "--prompt", "hello", "--max-tokens", "1800", "--ignore-eos"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(30) == 1
    told = process.stderr.read().decode()
    assert "Traceback" not in told and "Exception ignored" not in told


def test_an_interrupt_ends_the_command_with_130(tiny: str) -> None:
    command = [sys.executable, "-m", "octavo", "generate", tiny, "--prompt", "hello", "--max-tokens", "1800", "--ignore-eos"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130 and b"Traceback" not in told


def test_inspect_as_a_table_and_as_json(octavo: Octavo, tiny: str) -> None:
    done = octavo("inspect", tiny, "--json")
    facts = json.loads(done.stdout)
    assert (facts["architecture"], facts["layers"], facts["kv_heads"], facts["head_dim"], facts["context"]) == ("llama", 3, 2, 16, 2048)
    assert facts["kv_bytes_per_token"] == 3 * 2 * 2 * 32 * 2 and facts["dtype"] == "bfloat16"  # heads of 16 lie in memory as 32
    assert facts["isa"] in facts["isas"]
    table = octavo("inspect", tiny)
    assert table.returncode == 0 and "3 layers, hidden 64" in table.stdout and f"{facts['parameters']:,}" in table.stdout
    assert max(map(len, octavo("inspect", tiny, env={"COLUMNS": "60"}).stdout.splitlines())) > 60  # into a pipe: no wrapping
    assert json.loads(octavo("inspect", tiny, "--json", "--dtype", "float32").stdout)["kv_bytes_per_token"] == 2 * facts["kv_bytes_per_token"]


def test_pull_tells_what_it_cannot_get(octavo: Octavo, tiny: str) -> None:
    assert octavo("pull", tiny).stdout == f"{tiny}\n"  # here already
    for name, env in (("no-such-name", {}), ("someone/some-model", {"HF_HUB_OFFLINE": "1"})):
        done = octavo("pull", name, env=env)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("octavo: ") and "Traceback" not in done.stderr
    assert octavo("pull", "smollm2", "--revision", "main").returncode == 2


@pytest.mark.parametrize("redirect, said", [("> /dev/full", "No space left"), (">&-", "closed"), ("<&- > /dev/full", "")])
def test_streams_that_cannot_be_used_end_in_one_line(redirect: str, said: str) -> None:
    done = subprocess.run(f"{shlex.quote(sys.executable)} -m octavo --help {redirect}", shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and said in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_standard_input_may_be_closed(tiny: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m octavo generate {shlex.quote(tiny)} <&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "prompt" in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("after", [0.2, 0.3, 0.5])
def test_an_interrupt_while_it_starts_is_no_traceback(tiny: str, after: float) -> None:
    process = subprocess.Popen([sys.executable, "-m", "octavo", "inspect", tiny], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    if process.returncode != -signal.SIGINT:  # that is Python's own, before the command has begun
        assert process.returncode in (0, 130) and "octavo/" not in errors, errors


def test_experiments_are_listed_and_unknown_ones_refused(octavo: Octavo) -> None:
    from octavo.bench.runner import NAMES

    done = octavo("bench", "experiments", "--list")
    assert done.returncode == 0 and [line.split()[0] for line in done.stdout.splitlines()] == list(NAMES)
    done = octavo("bench", "experiments", "nonesuch")
    assert done.returncode == 2 and "no experiment 'nonesuch'" in done.stderr and "batching" in done.stderr and len(done.stderr.splitlines()) == 1
