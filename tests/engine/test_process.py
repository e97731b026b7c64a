"""The engine's process for real: what it imports, how its errors come back, and that neither process outlives the other."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import make_tiny
from tests.engine.test_llm import native_is_here

import octavo
from octavo import AsyncLLM, CheckpointError, ConfigError, SamplingParams, UnsupportedError, WorkerDied
from octavo.engine import process

pytestmark = pytest.mark.skipif(not native_is_here(), reason="the native library is not built here")
SETTINGS = {"dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 16, "max_model_len": 1000, "num_threads": 1}
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
PROMPT = {"prompt_token_ids": [1, 7, 30]}

IMPORTS = """
import sys
from octavo.engine import process
from octavo.engine.settings import make_config
import zmq
from octavo.engine import factory
from octavo.models import registry
from octavo.weights.checkpoint import open_checkpoint
config = make_config(sys.argv[1], num_kv_blocks=8, dtype="float32", num_threads=1)
class Report:
    begin = progress = end = note = lambda *a: None
with open_checkpoint(sys.argv[1]) as checkpoint:
    factory.build_core(config, checkpoint, registry.read_spec(checkpoint), Report())
unwanted = {"fastapi", "starlette", "uvicorn", "huggingface_hub", "jinja2", "tokenizers", "safetensors", "torch", "rich", "tqdm", "typer",
            "octavo.text.chat_template", "octavo.text.tokenizer", "octavo.engine.textside", "octavo.engine.outputs", "asyncio"}
print(sorted(name for name in sys.modules if name in unwanted or name.partition(".")[0] in unwanted))
"""

PARENT = """
import asyncio, sys, time
from octavo import AsyncLLM, SamplingParams
async def main():
    llm = AsyncLLM(sys.argv[1], dtype="float32", num_kv_blocks=64, max_num_seqs=4, num_threads=1)
    print(llm._client._handle.process.pid, flush=True)
    if sys.argv[2] == "loading":
        time.sleep(60)
    await llm.start()
    print("ready", flush=True)
    if sys.argv[2] == "busy":
        async for _ in llm.generate({"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=900, ignore_eos=True)):
            print("token", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), scale=0.3))


def serve(folder: str, scene: Callable[[AsyncLLM, int], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def run() -> None:
        async with AsyncLLM(folder, **{**SETTINGS, **settings}) as llm:
            await asyncio.wait_for(scene(llm, llm._client._handle.process.pid), 30)

    asyncio.run(run())


def gone(pid: int, seconds: float) -> bool:
    """Whether a process ends in time (a zombie has)."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_the_engine_imports_nothing_of_text_or_web(folder: str) -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS, folder], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_callers_main_module_is_not_run_again(folder: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    (tmp_path / "json.py").write_text("raise SystemExit('the working directory is not a place for the engine to import from')")
    script.write_text(
        "print('main', flush=True)\nimport asyncio\nfrom octavo import AsyncLLM\nasync def f():\n"
        f"    async with AsyncLLM({folder!r}, num_kv_blocks=8, dtype='float32', num_threads=1) as llm:\n"
        "        print(llm.health())\nasyncio.run(f())\n",
    )
    env = os.environ | {"PYTHONPATH": str(Path(octavo.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-P", str(script)], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=60)
    assert done.stdout.split() == ["main", "None"], done.stderr


def test_errors_of_the_start_are_the_same_errors(folder: str, tmp_path: Path) -> None:
    def fails(model: str, kind: type[Exception], words: str, param: str | None, **settings: Any) -> None:
        async def run() -> None:
            async with AsyncLLM(model, **settings):
                pass

        with pytest.raises(kind, match=words) as caught:
            asyncio.run(run())
        assert caught.type is kind and caught.value.param == param  # type: ignore[attr-defined]

    fails(folder, ConfigError, "2048 tokens at most", "max_model_len", max_model_len=4096)
    fails(folder, ConfigError, "blocks fit", "num_kv_blocks", num_kv_blocks=2**26)
    fails(folder, UnsupportedError, "kv_cache_dtype", "kv_cache_dtype", dtype="bfloat16", kv_cache_dtype="float32")
    fails(str(tmp_path / "nothing"), CheckpointError, "no such file", "model")
    broken = make_tiny(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    fails(str(broken), CheckpointError, "model.safetensors", None)
    make_tiny(tmp_path / "tokenizer", tokenizer=False)
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    fails(str(tmp_path / "tokenizer"), CheckpointError, "tokenizer", None)  # of the text side: the process is taken down with it


def test_the_start_is_told(folder: str) -> None:
    class Heard:
        def __init__(self) -> None:
            self.phases: list[str] = []
            self.notes: list[str] = []
            self.sizes: list[tuple[int, int | None]] = []

        def begin(self, phase: str) -> None:
            self.phases.append("+" + phase)

        def progress(self, what: str, done: int, total: int | None) -> None:
            self.sizes.append((done, total))

        def end(self, phase: str, seconds: float) -> None:
            self.phases.append("-" + phase)

        def note(self, text: str) -> None:
            self.notes.append(text)

    heard = Heard()
    from octavo.ops.native import native_info

    async def scene(llm: AsyncLLM, pid: int) -> None:
        assert llm.config.model.model == folder and llm.config.kv.num_kv_blocks == 64 and llm.ledger.kv > 0
        assert llm.instruction_set in native_info()["available"].split(",")

    serve(folder, scene, report=heard)
    for phase in ("finding the model", "reading the tokenizer", "preparing the KV pool and the program"):
        assert heard.phases.count("+" + phase) == heard.phases.count("-" + phase) == 1
    assert any("KV pool of 64 blocks" in note for note in heard.notes) and heard.sizes[-1][0] == heard.sizes[-1][1]


def test_kill_nine_ends_every_answer(folder: str) -> None:
    async def scene(llm: AsyncLLM, pid: int) -> None:
        async def read(prompt: Any) -> None:
            async for _ in llm.generate(prompt, LONG):
                pass

        tasks = [asyncio.create_task(read(PROMPT)) for _ in range(6)]
        while llm.stats.running < 4:
            await asyncio.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)  # promised: 2 s
        assert all(isinstance(r, WorkerDied) and "signal 9" in r.message for r in results), results
        assert llm.on_death.is_set() and "signal 9" in (llm.health() or "")
        with pytest.raises(WorkerDied, match="signal 9"):
            llm.generate(PROMPT, LONG)
        await llm.shutdown()

    serve(folder, scene)


def test_requests_in_the_moment_of_a_death_hear_of_it_too(folder: str) -> None:
    """The socket is gone before the death is known: whoever asks, leaves or aborts then must not meet the socket's own error."""

    async def scene(llm: AsyncLLM, pid: int) -> None:
        first = llm.generate(PROMPT, LONG, request_id="first")
        await anext(first)
        os.kill(pid, signal.SIGKILL)
        asked = 0
        while llm.failure is None:
            news, leaver = llm.generate(PROMPT, LONG), llm.generate(PROMPT, LONG)
            await leaver.aclose()
            await llm.abort("first")
            asked += 1
            task = asyncio.create_task(anext(news))
            await asyncio.sleep(0.002)
        with pytest.raises(WorkerDied, match="signal 9"):
            await asyncio.wait_for(task, 2)
        assert asked > 5 and llm.num_open == 0

    serve(folder, scene)


def test_an_idle_engine_takes_no_processor_time(folder: str) -> None:
    def ticks(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    async def scene(llm: AsyncLLM, pid: int) -> None:
        async for _ in llm.generate(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True)):
            pass
        await asyncio.sleep(0.2)  # the kernels' threads spin a little before they sleep
        before = ticks(pid), ticks(os.getpid())
        await asyncio.sleep(1)
        assert ticks(pid) - before[0] <= 2 and ticks(os.getpid()) - before[1] <= 5  # hundredths of a second

    serve(folder, scene)


def test_death_while_starting(folder: str) -> None:
    async def run() -> None:
        llm = AsyncLLM(folder, **SETTINGS)
        os.kill(llm._client._handle.process.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="signal 9"):
            await asyncio.wait_for(llm.start(), 5)
        assert llm.on_death.is_set() and "could not start" in (llm.failure or "")
        await llm.shutdown()

    asyncio.run(run())


def test_a_break_in_a_step_is_told(folder: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The child's runner fails at its fifth step."""
    breaking = """
from octavo.runner.runner import Runner
right, count = Runner.execute, [0]
def execute(self, plan):
    count[0] += 1
    if count[0] == 5:
        raise OSError("the disk of the memory is full")
    return right(self, plan)
Runner.execute = execute
"""
    start = "; main(int(sys.argv[3]), sys.argv[4])"
    assert process.BOOT.endswith(start)
    monkeypatch.setattr(process, "BOOT", f"{process.BOOT.removesuffix(start)}\n{breaking}\nmain(int(sys.argv[3]), sys.argv[4])")

    async def scene(llm: AsyncLLM, pid: int) -> None:
        tokens = 0
        with pytest.raises(WorkerDied, match="OSError: the disk of the memory is full"):
            async for output in llm.generate(PROMPT, LONG):
                tokens += len(output.outputs[0].token_ids)
        assert tokens == 4 and "disk of the memory" in (llm.health() or "")
        assert gone(pid, 2)

    serve(folder, scene)
    assert "Traceback" in capfd.readouterr().err, "the child's stderr is to be seen"


@pytest.mark.parametrize("state", ["loading", "idle", "busy"])
def test_the_engine_ends_with_its_parent(folder: str, state: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, folder, state], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    if state != "loading":
        assert parent.stdout.readline() == "ready\n"
    if state == "busy":
        assert parent.stdout.readline() == "token\n"
    assert not gone(pid, 0.05)
    parent.kill()
    parent.wait()
    assert gone(pid, 2)
    parent.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_everybody_do_not_end_the_engine_first(folder: str, number: signal.Signals) -> None:
    async def scene(llm: AsyncLLM, pid: int) -> None:
        os.kill(pid, number)
        outputs = [output async for output in llm.generate(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))]
        assert outputs[-1].outputs[0].finish_reason == "length" and os.getpgid(pid) != os.getpgid(0)

    serve(folder, scene)


def test_a_hanging_engine_is_not_healthy(folder: str) -> None:
    async def scene(llm: AsyncLLM, pid: int) -> None:
        llm.stall_seconds = 0.1
        news = llm.generate(PROMPT, LONG)
        await anext(news)
        os.kill(pid, signal.SIGSTOP)
        try:
            while llm.health() is None:
                await asyncio.sleep(0.01)
            assert "no step" in (llm.health() or "") and "1 sequences" in (llm.health() or "")
        finally:
            os.kill(pid, signal.SIGCONT)
        while llm.health() is not None:
            await asyncio.sleep(0.01)

    serve(folder, scene)


def test_shutdown_ends_the_process_and_leaves_nothing(folder: str) -> None:
    async def run() -> None:
        llm = AsyncLLM(folder, **SETTINGS)
        await llm.start()
        handle = llm._client._handle
        place = Path(handle.socket.get_string(process_endpoint()).removeprefix("ipc://")).parent
        assert place.is_dir() and place.stat().st_mode & 0o077 == 0, "nobody else may speak to the engine"
        news = llm.generate(PROMPT, LONG)
        await anext(news)
        await asyncio.wait_for(llm.shutdown(), 10)
        rest = [output async for output in news]
        assert rest[-1].outputs[0].finish_reason == "abort"
        assert handle.process.returncode == 0 and not place.exists() and llm.num_open == 0
        await llm.shutdown()

    fds = len(os.listdir("/proc/self/fd"))
    asyncio.run(run())
    asyncio.run(run())
    assert len(os.listdir("/proc/self/fd")) <= fds + 1


def process_endpoint() -> int:
    import zmq

    return zmq.LAST_ENDPOINT


def test_never_started_and_dropped(folder: str) -> None:
    llm = AsyncLLM(folder, **SETTINGS)
    pid = llm._client._handle.process.pid
    asyncio.run(llm.shutdown())
    assert gone(pid, 2)
    with pytest.raises(WorkerDied):
        asyncio.run(llm.start())
    llm = AsyncLLM(folder, **SETTINGS)
    pid = llm._client._handle.process.pid
    del llm
    assert gone(pid, 2)


def test_a_start_that_is_given_up(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "BOOT", "import time; time.sleep(60)")

    async def run() -> None:
        llm = AsyncLLM(folder, **SETTINGS)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.start(), 0.05)
        await asyncio.wait_for(llm.shutdown(), 30)  # what still loads, for 60 s, is not waited for

    asyncio.run(run())


def test_a_temporary_folder_with_a_long_name(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(process.tempfile, "tempdir", str(deep))
    made = process._private_folder()
    assert len(made) < 90 and not list(deep.iterdir())
    os.rmdir(made)
