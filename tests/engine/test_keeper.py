"""The prefix cache outlives the engine: hits after a restart, the same bits, and nothing but a warning from any file that is not right."""

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import make_tiny
from tests.engine.test_llm import BACKENDS, make, native_is_here, run

from octavo import LLM, AsyncLLM, ConfigError, SamplingParams
from octavo.engine import keeper
from octavo.engine.settings import make_config
from octavo.weights.identity import MEMO

PARAMS = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2),
          SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True, repetition_penalty=1.2, logprobs=2)]
PROMPT = [(7 * i) % 200 + 3 for i in range(49)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), scale=0.3))


def told(llm: LLM, length: int = 49) -> list[Any]:
    samples = [output.outputs[0] for params in PARAMS for output in run(llm, [PROMPT[:length]], params)]
    return [(sample.token_ids, sample.logprobs if llm.config.runner.backend == "native" else None) for sample in samples]


def cached(llm: LLM, prompt: list[int] = PROMPT) -> int:
    return run(llm, [prompt], SamplingParams(max_tokens=1))[0].num_cached_tokens


def kept_file(tmp_path: Path) -> Path:
    (path,) = (each for each in tmp_path.iterdir() if each.suffix == keeper.SUFFIX)
    return path


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [47, 48, 49])
def test_a_restart_hits_what_was_kept_with_the_same_bits(folder: str, tmp_path: Path, backend: str, length: int) -> None:
    with make(folder, backend, enable_prefix_caching=False) as llm:
        expected = told(llm, length)
    with make(folder, backend, kv_cache_dir=tmp_path) as llm:
        assert told(llm, length) == expected
        turn = [*PROMPT[:length], *expected[0][0], 9, 9]
        assert cached(llm, turn) == (length + 19) // 16 * 16
    assert kept_file(tmp_path).stat().st_mode & 0o777 == 0o600
    with make(folder, backend, kv_cache_dir=str(tmp_path)) as llm:
        assert llm.kv_ledger.cached > 0 and llm.kv_ledger.live == 0
        assert cached(llm, turn) == (length + 19) // 16 * 16, "generated tokens, too"
        assert cached(llm, PROMPT[:length]) == (length - 1) // 16 * 16
        assert told(llm, length) == expected


@pytest.mark.skipif(not native_is_here(), reason="the native library is not built here")
class TestFiles:
    def fill(self, folder: str, tmp_path: Path, **settings: Any) -> list[Any]:
        with make(folder, "native", kv_cache_dir=tmp_path, **settings) as llm:
            return told(llm)

    def test_salts_stay_apart(self, folder: str, tmp_path: Path) -> None:
        with make(folder, "native", kv_cache_dir=tmp_path) as llm:
            llm.generate({"prompt_token_ids": PROMPT, "cache_salt": "s"}, SamplingParams(max_tokens=1), use_tqdm=False)
        with make(folder, "native", kv_cache_dir=tmp_path) as llm:
            assert cached(llm) == 0
            (output,) = llm.generate({"prompt_token_ids": PROMPT, "cache_salt": "s"}, SamplingParams(max_tokens=1), use_tqdm=False)
            assert output.num_cached_tokens == 48

    @pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign", "directory"])
    def test_a_file_that_is_not_right_is_told_and_not_used(self, folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
        expected = self.fill(folder, tmp_path)
        path = kept_file(tmp_path)
        data = path.read_bytes()
        if damage == "flip":
            path.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
        elif damage == "cut":
            path.write_bytes(data[:-1])
        elif damage == "empty":
            path.write_bytes(b"")
        elif damage == "foreign":
            other = tmp_path / "other"
            other.mkdir(mode=0o700)
            self.fill(str(make_tiny(tmp_path / "model", scale=0.3, seed=1)), other)
            os.replace(kept_file(other), path)
        else:
            path.unlink()
            path.mkdir()
        reason = {"flip": "is damaged", "cut": "cut, damaged", "empty": "no file of KV blocks", "foreign": "another model's: checkpoint is",
                  "directory": "not a regular file"}[damage]
        caplog.clear()
        with caplog.at_level(logging.WARNING, "octavo"), make(folder, "native", kv_cache_dir=tmp_path) as llm:
            assert [record.message for record in caplog.records] == [next(r.message for r in caplog.records if reason in r.message)]
            assert str(path) in caplog.text and llm.kv_ledger.cached == 0 and cached(llm) == 0
            assert told(llm) == expected
        with make(folder, "native", kv_cache_dir=tmp_path) as llm:  # replaced by a right one, unless something bars its place
            assert cached(llm) == (0 if damage == "directory" else 48)

    def test_each_kind_of_engine_has_its_own(self, folder: str, tmp_path: Path) -> None:
        self.fill(folder, tmp_path)
        for settings in ({"dtype": "bfloat16"},):
            with make(folder, "native", kv_cache_dir=tmp_path, **settings) as llm:
                assert cached(llm) == 0
        with make(str(make_tiny(tmp_path / "model", scale=0.3, seed=1)), "native", kv_cache_dir=tmp_path) as llm:
            assert cached(llm) == 0
        assert len([each for each in tmp_path.iterdir() if each.suffix == keeper.SUFFIX]) == 3
        with make(folder, "native", kv_cache_dir=tmp_path, num_threads=2, max_num_batched_tokens=32, max_num_seqs=2) as llm:
            assert cached(llm) == 48, "what changes no bit changes no file"

    def test_another_numeric_contract(self, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fill(folder, tmp_path)
        monkeypatch.setattr(keeper, "NUMERIC_CONTRACT", keeper.NUMERIC_CONTRACT + 1)
        with make(folder, "native", kv_cache_dir=tmp_path) as llm:
            assert cached(llm) == 0

    def test_the_same_checkpoint_elsewhere_is_the_same(self, folder: str, tmp_path: Path) -> None:
        self.fill(folder, tmp_path)
        with make(str(make_tiny(tmp_path / "again", scale=0.3)), "native", kv_cache_dir=tmp_path) as llm:
            assert cached(llm) == 48
        assert (tmp_path / MEMO).exists() or time.time() - (tmp_path / "again" / "config.json").stat().st_mtime < 60

    def test_the_limit_keeps_the_last_used_beginnings(self, folder: str, tmp_path: Path) -> None:
        with make(folder, "native", kv_cache_dir=tmp_path) as llm:
            bytes_per_block = llm.ledger.kv // 64
        other = [5] * 33
        with make(folder, "native", kv_cache_dir=tmp_path, kv_cache_dir_bytes=4 * bytes_per_block + 9) as llm:
            for prompt in (other, PROMPT):
                cached(llm, prompt)
        assert kept_file(tmp_path).stat().st_size < 5 * bytes_per_block
        with make(folder, "native", kv_cache_dir=tmp_path) as llm:
            assert (cached(llm), cached(llm, other)) == (48, 16)
        with pytest.raises(ConfigError, match=f"kv_cache_dir_bytes is {bytes_per_block - 1}; one block"):
            make(folder, "native", kv_cache_dir=tmp_path, kv_cache_dir_bytes=bytes_per_block - 1)

    def test_a_smaller_pool_takes_what_fits(self, folder: str, tmp_path: Path) -> None:
        with make(folder, "native", kv_cache_dir=tmp_path) as llm:
            cached(llm, [9] * 49)
            expected = told(llm)
        with make(folder, "native", kv_cache_dir=tmp_path, num_kv_blocks=6, max_model_len=80) as llm:
            assert llm.kv_ledger.cached == 6 and told(llm) == expected

    @pytest.mark.parametrize("by", ["removed", "replaced"])
    def test_what_others_did_to_the_file_is_seen(self, folder: str, tmp_path: Path, by: str) -> None:
        """Nothing new was cached, but the file is not the one that was read: the last one to end keeps what it has."""
        self.fill(folder, tmp_path)
        with make(folder, "native", kv_cache_dir=tmp_path) as llm:
            if by == "removed":
                kept_file(tmp_path).unlink()
            else:
                with make(folder, "native", kv_cache_dir=tmp_path) as other:
                    other.reset_prefix_cache()
                    cached(other, [5] * 49)
            assert llm.kv_ledger.cached > 0
        with make(folder, "native", kv_cache_dir=tmp_path) as llm:
            assert (cached(llm), cached(llm, [5] * 49)) == (48, 0)

    def test_leftovers_go_though_nothing_is_written(self, folder: str, tmp_path: Path) -> None:
        """What a killed engine was writing: an hour later the next one to end removes it."""
        self.fill(folder, tmp_path)
        left = tmp_path / f".{keeper.PREFIX}0{keeper.SUFFIX}.x.tmp"
        left.write_bytes(b"begun")
        before = kept_file(tmp_path).stat().st_mtime_ns
        for age, there in ((0, True), (keeper.ABANDONED + 60, False)):
            os.utime(left, (time.time() - age,) * 2)
            with make(folder, "native", kv_cache_dir=tmp_path):
                pass
            assert left.exists() == there
        assert kept_file(tmp_path).stat().st_mtime_ns == before

    def test_a_reset_is_for_good(self, folder: str, tmp_path: Path) -> None:
        self.fill(folder, tmp_path)
        llm = make(folder, "native", kv_cache_dir=tmp_path)
        llm.reset_prefix_cache()
        assert not list(tmp_path.glob("*" + keeper.SUFFIX)), "even if this engine is killed"
        cached(llm, [9] * 33)
        llm.shutdown()
        with make(folder, "native", kv_cache_dir=tmp_path) as llm:
            assert (cached(llm), cached(llm, [9] * 33)) == (0, 32)

    def test_what_has_not_changed_is_not_written_again(self, folder: str, tmp_path: Path) -> None:
        self.fill(folder, tmp_path)
        path = kept_file(tmp_path)
        before = path.stat().st_ino, path.stat().st_mtime_ns
        make(folder, "native", kv_cache_dir=tmp_path).shutdown()
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == before

    def test_running_requests_are_kept_at_a_shutdown(self, folder: str, tmp_path: Path) -> None:
        llm = make(folder, "native", kv_cache_dir=tmp_path)
        stream = llm.stream({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=30, ignore_eos=True))
        next(stream)
        llm.shutdown()
        with make(folder, "native", kv_cache_dir=tmp_path) as llm:
            assert cached(llm) == 48

    def test_nothing_is_kept_of_an_engine_that_broke(self, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        llm = make(folder, "native", kv_cache_dir=tmp_path)
        cached(llm)
        monkeypatch.setattr(type(llm.engine.core.executor), "execute", lambda self, plan: 1 / 0)
        with pytest.raises(Exception, match="division"):
            cached(llm, [5] * 20)
        llm.shutdown()
        assert not list(tmp_path.glob("*" + keeper.SUFFIX))

    def test_a_folder_that_is_gone_costs_the_cache_only(self, folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        place = tmp_path / "deep" / "cache"
        llm = make(folder, "native", kv_cache_dir=place)
        assert place.stat().st_mode & 0o777 == 0o700
        cached(llm)
        for each in place.iterdir():
            each.unlink()
        place.rmdir()
        llm.shutdown()
        assert "could not be kept" in caplog.text

    def test_a_folder_that_others_may_write_by_now_is_not_written(self, folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        llm = make(folder, "native", kv_cache_dir=tmp_path)
        cached(llm)
        tmp_path.chmod(0o777)
        llm.shutdown()
        tmp_path.chmod(0o700)
        assert "could not be kept" in caplog.text and "chmod go-w" in caplog.text and not list(tmp_path.glob("*" + keeper.SUFFIX))

    def test_other_files_make_room_and_unfinished_ones_go(self, folder: str, tmp_path: Path) -> None:
        def put(name: str, nbytes: int, age: float) -> Path:
            path = tmp_path / name
            path.write_bytes(bytes(nbytes))
            os.utime(path, (time.time() - age, time.time() - age))
            return path

        with make(folder, "native", kv_cache_dir=tmp_path) as llm:
            most = 8 * (llm.ledger.kv // 64)
        new, old, fresh, left, mine = (put("kv-new.octavo", most // 4, 10), put("kv-old.octavo", most, 20), put(".kv-x.octavo.a.tmp", 5, 10),
                                       put(".kv-y.octavo.b.tmp", 5, 7200), put("notes.txt", 9, 1e6))
        self.fill(folder, tmp_path, kv_cache_dir_bytes=most, num_kv_blocks=5, max_model_len=80)
        assert new.exists() and not old.exists() and fresh.exists() and not left.exists() and mine.exists()

    def test_a_server_keeps_it_at_its_end(self, folder: str, tmp_path: Path) -> None:
        settings: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 4, "num_threads": 1, "kv_cache_dir": tmp_path}

        async def life() -> list[Any]:
            class Heard:
                phases: list[str] = []

                def begin(self, phase: str) -> None: ...
                def progress(self, what: str, done: int, total: int | None) -> None: ...
                def note(self, text: str) -> None: ...
                def end(self, phase: str, seconds: float) -> None:
                    self.phases.append(phase)

            heard = Heard()
            async with AsyncLLM(folder, report=heard, **settings) as llm:
                outputs = [output async for output in llm.generate({"prompt_token_ids": PROMPT}, PARAMS[0], deltas=False)]
            assert heard.phases[-1] == "keeping the KV cache"
            return [outputs[-1].num_cached_tokens, outputs[-1].outputs[0].token_ids]

        first, second = asyncio.run(life()), asyncio.run(life())
        assert (first[0], second[0]) == (0, 48) and first[1] == second[1]


@pytest.mark.parametrize(("settings", "param", "part"), [
    ({"kv_cache_dir": ""}, "kv_cache_dir", "a folder's name"), ({"kv_cache_dir": 5}, "kv_cache_dir", "not 5"),
    ({"kv_cache_dir": b"x"}, "kv_cache_dir", "a folder's name"),
    ({"kv_cache_dir": "x", "enable_prefix_caching": False}, "kv_cache_dir", "nothing to keep"),
    ({"kv_cache_dir_bytes": 5}, "kv_cache_dir_bytes", "kv_cache_dir is not set"),
    ({"kv_cache_dir": "x", "kv_cache_dir_bytes": 0}, "kv_cache_dir_bytes", "1"),
])
def test_impossible_settings(settings: dict[str, Any], param: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        make_config("m", **settings)
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["a-file", "a-file/below", "nul\0"])
def test_a_folder_that_cannot_be(tmp_path: Path, name: str) -> None:
    (tmp_path / "a-file").write_text("")
    with pytest.raises(ConfigError, match="kv_cache_dir") as caught:
        keeper.check_folder(str(tmp_path / name))
    assert caught.value.param == "kv_cache_dir"


def test_a_folder_that_nothing_would_be_read_from_is_refused_at_the_start(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(ConfigError, match=r"^kv_cache_dir '.*' can be written by others \(mode 1777\): chmod go-w$") as caught:
        make(folder, BACKENDS[0], kv_cache_dir=tmp_path)
    assert caught.value.param == "kv_cache_dir" and not list(tmp_path.iterdir())
    tmp_path.chmod(0o755)
    assert keeper.check_folder(str(tmp_path)) == tmp_path
    look, other = os.stat, os.geteuid() + 1234
    monkeypatch.setattr(os, "stat", lambda *args, **more: os.stat_result([*(found := look(*args, **more))[:4], other, *found[5:]]))
    with pytest.raises(ConfigError, match=f"^kv_cache_dir '.*' belongs to another user .{other}."):
        keeper.check_folder(str(tmp_path))
