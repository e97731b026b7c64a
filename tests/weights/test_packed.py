"""Packed weights on disk: the same model from the file as from the checkpoint, and a fresh one whenever the file is not right."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.checkpoints import make_tiny

import octavo.engine.factory as factory
from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.models import registry
from octavo.ops.native import NativeProvider
from octavo.ops.recorder import Matrix, Vector
from octavo.weights import packed
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.packed import PackedStore

PROMPTS = [{"prompt_token_ids": [5, 9, 100, 33]}, {"prompt_token_ids": list(range(40, 90))}]
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(factory, "LEAST", 0)
    return tmp_path / "cache" / "packed"


def answers(path: Path, **settings):
    """What a model says, and whether its weights came from the file."""

    class Notes:
        lines: list[str] = []

        def note(self, text: str) -> None:
            self.lines.append(text)

        def begin(self, *_): ...
        def end(self, *_): ...
        def progress(self, *_): ...

    notes = Notes()
    notes.lines = []
    with LLM(str(path), report=notes, num_kv_blocks=64, **settings) as llm:
        outs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for thread in threading.enumerate():
        if thread.name == "octavo-packed-weights":
            thread.join()
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outs], any("packed weights mapped" in line for line in notes.lines)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_second_start_maps_what_the_first_made(tmp_path: Path, cache: Path, arch: str, dtype: str) -> None:
    model = make_tiny(tmp_path / "m", arch, tie_word_embeddings=arch == "qwen2")
    first, from_file = answers(model, dtype=dtype)
    assert not from_file and len(list(cache.iterdir())) == 1
    again, from_file = answers(model, dtype=dtype)
    assert from_file and again == first
    assert (cache / os.listdir(cache)[0]).stat().st_mode & 0o777 == 0o600
    _, from_file = answers(model, dtype="bfloat16" if dtype == "float32" else "float32")
    assert not from_file and len(list(cache.iterdir())) == 2, "another packing is another file"


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_every_handle_comes_back(tmp_path: Path, quantization: str | None) -> None:
    model = make_tiny(tmp_path / "m", "qwen2", num_attention_heads=6, hidden_size=96, intermediate_size=80)
    with open_checkpoint(model) as checkpoint:
        made, found = (NativeProvider(num_threads=n, quantization=quantization) for n in (2, 1))
        assert (made.packing == NativeProvider(num_threads=1).packing) == (quantization is None)
        store = PackedStore(tmp_path / "packed", "c", made.packing, pytest.fail)
        want = registry.load(checkpoint, made, "bfloat16", store=store).weights
        assert store.writing is not None and not store.hit
        store.writing.join()
        got = registry.load(checkpoint, found, "bfloat16", store=store).weights
        assert store.hit and found.weight_bytes == made.weight_bytes and vars(got.layers[2]).keys() == vars(want.layers[2]).keys()
    pairs = [(w, g) for layer in range(3) for w, g in zip(vars(want.layers[layer]).values(), vars(got.layers[layer]).values(), strict=True)]
    kinds = set()
    for w, g in [*pairs, (want.embed, got.embed), (want.head, got.head), (want.norm, got.norm)]:
        kinds.add(type(w))
        assert type(w) is type(g)
        if isinstance(w, Matrix):
            assert (w.n, w.k, w.interleaved, len(w.pieces)) == (g.n, g.k, g.interleaved, len(g.pieces))
            for mine, theirs in zip(w.pieces, g.pieces):
                assert replace(mine, address=0) == replace(theirs, address=0)
                ours = np.frombuffer(found._maps[0], np.uint8)[theirs.address - found._maps[0].__array_interface__["data"][0] :][: mine.nbytes]
                assert made._view(mine.address, mine.nbytes).tobytes() == ours.tobytes()
        elif isinstance(w, Vector):
            assert w.n == g.n and np.array_equal(w.data, g.data) and g.data.dtype == np.float32
    assert kinds == {Matrix, Vector, type(None)}


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


DAMAGE = {
    "the last bits of the weights": lambda data: flipped(data, len(data.rstrip(b"\0")) - 1),  # behind it is padding
    "the first bits of the weights": lambda data: flipped(data, -(-(48 + int.from_bytes(data[8:16], "little")) // 4096) * 4096),
    "the description": lambda data: flipped(data, 100),
    "its length": lambda data: data[:8] + (1 << 40).to_bytes(8, "little") + data[16:],
    "the magic": lambda data: b"X" + data[1:],
    "cut": lambda data: data[:-4096],
    "cut inside the head": lambda data: data[:20],
    "longer": lambda data: data + bytes(4096),
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told_and_made_again(tmp_path: Path, cache: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make_tiny(tmp_path / "m")
    first, _ = answers(model)
    (file,) = cache.iterdir()
    good = file.read_bytes()
    damaged = DAMAGE[kind](good)
    assert damaged != good
    file.write_bytes(damaged)
    with caplog.at_level("WARNING", "octavo"):
        again, from_file = answers(model)
    assert again == first and not from_file and f"{file} cannot be used" in caplog.text and "made again" in caplog.text
    assert file.read_bytes() == good
    assert answers(model) == (first, True)


def test_a_description_that_lies_is_refused(tmp_path: Path) -> None:
    """Whole by its hashes, and yet not what the provider can use: an image of other handle classes, or places outside it."""
    model = make_tiny(tmp_path / "m")
    told: list[str] = []
    for wrong in ({"handle": "Panels", "fields": {"address": 1 << 60, "count": 1, "nbytes": 1, "layout": 0, "first": 0}},
                  {"handle": "Elsewhere", "fields": {}}, {"handle": "Matrix", "fields": {"n": 1}},
                  {"array": 1 << 50, "dtype": "<f4", "shape": [8]}, {"array": 0, "dtype": "nonsense", "shape": [8]}):
        provider = NativeProvider(num_threads=1)
        store = PackedStore(tmp_path / "packed", "c", provider.packing, told.append)
        with open_checkpoint(model) as checkpoint:
            weights = registry.load(checkpoint, provider, "bfloat16", store=store).weights
            store.writing.join()
            image, state = provider.image({"embed": weights.embed})
            image.handles["embed"] = wrong
            provider.image = lambda handles, made=(image, state): made
            (file,) = (tmp_path / "packed").iterdir()
            store._save(file, provider, {})
            fresh = NativeProvider(num_threads=1)
            registry.load(checkpoint, fresh, "bfloat16", store=store)
            store.writing.join()
        assert not store.hit and "cannot be used" in told.pop() and not told
        file.unlink()


def test_another_content_under_the_same_name_is_another_model(tmp_path: Path, cache: Path) -> None:
    first, _ = answers(make_tiny(tmp_path / "m", seed=1))
    other, from_file = answers(make_tiny(tmp_path / "m", seed=2))
    assert not from_file and other != first and len(list(cache.iterdir())) == 2
    assert answers(make_tiny(tmp_path / "m", seed=1)) == (first, True)


def test_switched_off_small_or_another_backend(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny(tmp_path / "m")
    answers(model, enable_weight_cache=False)
    monkeypatch.setattr(factory, "LEAST", packed.LEAST)
    answers(model)
    monkeypatch.setattr(factory, "LEAST", 0)
    answers(model, backend="torch", dtype="float32")
    assert not cache.exists()
    with pytest.raises(ConfigError, match="enable_weight_cache must be true, false or None, not 'no'"):
        LLM(str(model), enable_weight_cache="no")


def test_a_folder_that_cannot_be_is_told_once(tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.parent.mkdir()
    cache.write_text("in the way")
    model = make_tiny(tmp_path / "m")
    with caplog.at_level("WARNING", "octavo"):
        _, from_file = answers(model)
    assert not from_file and "the packed weights" in caplog.text and cache.read_text() == "in the way"


def test_the_limit_takes_what_was_unused_for_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "packed"
    folder.mkdir()
    now = time.time()
    for age, name in enumerate(("new", "middle", "old")):
        (folder / f"{name}.weights").write_bytes(bytes(1000))
        os.utime(folder / f"{name}.weights", (now - 100 * age,) * 2)
    for age, name in ((10, ".a.weights.x.tmp"), (packed.ABANDONED + 10, ".b.weights.y.tmp")):
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, (now - age,) * 2)
    (folder / "somebody's file").write_bytes(bytes(5000))
    monkeypatch.setattr(packed, "LIMIT", 3500)
    store = PackedStore(folder, "c", "p", pytest.fail)
    store._make_room(1000, folder / "middle.weights")  # replaces itself: does not count
    assert sorted(os.listdir(folder)) == [".a.weights.x.tmp", "middle.weights", "new.weights", "old.weights", "somebody's file"]
    store._make_room(1600, folder / "next.weights")
    assert sorted(os.listdir(folder)) == [".a.weights.x.tmp", "new.weights", "somebody's file"]
    with pytest.raises(OSError, match="MiB of disk free: at least twice as much is asked for"):
        store._make_room(1 << 60, folder / "next.weights")


def test_processes_that_start_at_once(tmp_path: Path, cache: Path) -> None:
    model = make_tiny(tmp_path / "m")
    code = ("import sys, octavo.engine.factory as f; f.LEAST = 0\nfrom octavo import LLM, SamplingParams\n"
            "with LLM(sys.argv[1], num_kv_blocks=64, num_threads=1) as llm:\n"
            "    out = llm.generate([{'prompt_token_ids': [5, 9]}], SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)[0]\n"
            "    print(out.outputs[0].token_ids)\n")
    runs = [subprocess.Popen([sys.executable, "-c", code, str(model)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    outs = [run.communicate(timeout=120) for run in runs]
    assert all(run.returncode == 0 for run in runs) and len({out for out, _ in outs}) == 1, outs
    assert all("cannot" not in err for _, err in outs) and [f.suffix for f in cache.iterdir()] == [".weights"]
    assert answers(model)[1]


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512"])
def test_a_checksum_sees_every_byte_and_its_place(isa: str) -> None:
    try:
        provider = NativeProvider(num_threads=2, isa=isa)
    except ConfigError:
        pytest.skip(f"no {isa} here")
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, (2 << 20) + 77, np.uint8)
    want = NativeProvider(num_threads=1, isa="generic").checksum(data)
    assert provider.checksum(data) == want
    for place in (0, 63, 64, (1 << 20) - 1, 1 << 20, data.size - 77, data.size - 1, *rng.integers(0, data.size, 20)):
        data[place] ^= 1 << rng.integers(0, 8)
        assert provider.checksum(data) != want
        data[place] = np.random.default_rng(1).integers(0, 256, (2 << 20) + 77, np.uint8)[place]
    assert provider.checksum(data) == want and provider.checksum(data[:-1]) != want and provider.checksum(np.append(data, np.uint8(0))) != want
    swapped = data.copy()
    swapped[:64], swapped[64:128] = data[64:128], data[:64]
    assert provider.checksum(swapped) != want
    swapped = data.copy()
    swapped[: 1 << 20], swapped[1 << 20 : 2 << 20] = data[1 << 20 : 2 << 20], data[: 1 << 20]
    assert provider.checksum(swapped) != want
    assert provider.checksum(np.empty(0, np.uint8)) == provider.checksum(np.empty(0, np.uint8))
