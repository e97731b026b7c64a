"""safetensors files and the Checkpoint over both layouts."""

import json
import os
import struct
import tracemalloc
from contextlib import suppress

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from octavo.errors import CheckpointError, UnsupportedError
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.safetensors import MAX_HEADER, SafetensorsFile

A = {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}, "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]}}
DATA = bytes(range(22))


def drain(path) -> None:
    with SafetensorsFile(path) as file:
        for name, tensor in file.tensors.items():
            assert file.read(name).nbytes == tensor.nbytes


def refused(path, kind=CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        drain(path)
    return str(caught.value)


def test_every_truncation_and_every_extra_byte(make, put) -> None:
    data = make.safe(A, DATA)
    drain(put(data))
    for size in range(len(data)):
        assert any(c.isdigit() for c in refused(put(data[:size])).rpartition("/")[2]) or size == 0
    assert "end at byte" in refused(put(data + b"\0"))


def test_flipped_bytes_never_escape(make, put) -> None:
    data = make.safe(A, DATA)
    for at in range(len(data)):
        for value in (0x00, 0xFF, 0x22, 0x39, data[at] ^ 0x01, data[at] ^ 0x10):
            with suppress(CheckpointError, UnsupportedError):
                drain(put(data[:at] + bytes([value]) + data[at + 1 :]))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_damage_never_escapes(make, put, data) -> None:
    raw = bytearray(make.safe(A, DATA))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(raw) - 1))
        patch = st.binary(max_size=8) | st.sampled_from([b"[", b"{", b"9" * 30, b"-", b"null", b"1e9"])
        raw[at : at + data.draw(st.integers(0, 8))] = data.draw(patch)
    with suppress(CheckpointError, UnsupportedError):
        drain(put(bytes(raw)))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6) | st.sampled_from(["F32", "U8", "F4"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(max_size=4), json_values, max_size=3), st.integers(0, 40))
def test_any_json_never_escapes(make, put, header, size) -> None:
    with suppress(CheckpointError, UnsupportedError):
        drain(put(make.safe(header, bytes(size))))


@pytest.mark.parametrize("depth", [500, 900, 980, 1000, 1100, 100_000])
def test_deep_nesting(make, put, depth) -> None:
    message = refused(put(make.safe(b'{"a":' + b"[" * depth + b"]" * depth + b"}", b"")))
    assert "no valid JSON" in message or "makes no sense" in message


def test_lies_in_the_header(make, put) -> None:
    def file(header, data=DATA, kind=CheckpointError, **more) -> str:
        return refused(put(make.safe(header, data, **more)), kind)

    def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
        return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}

    assert "the header claims 18446744073709551615 bytes" in file(A, length=(1 << 64) - 1)
    assert f"limit is {MAX_HEADER}" in file(A, length=10_000)
    assert "starts with b'['" in file(b"[]")
    assert "no valid JSON" in file(b'{"a"')
    assert "no valid JSON" in file(b'{"\xff": 1}')
    assert "no valid JSON" in file(b'{"a": ' + b"9" * 5000 + b"}")
    assert "'a' appears twice" in file(b'{"a": 1, "a": 2}')
    assert "tensor 'a' makes no sense" in file({"a": None})
    for shape in (None, 3, [-1], [1.0], [True], [1 << 63], [1] * 9):
        assert "tensor 'a' makes no sense" in file(entry(shape=shape))
    for offsets in (None, [0], [0, 8, 9], [0, "8"], [-8, 0]):
        assert "tensor 'a' makes no sense" in file(entry(offsets=offsets))
    assert "unknown type 'Q9'" in file(entry("Q9"), kind=UnsupportedError)
    assert "'a' (F32, [3]) needs 12 bytes, its offsets [0, 8] span 8" in file(entry(shape=[3]))
    assert "needs 1.5 bytes" in file(entry("F4", [3], [0, 2]))
    assert "span -8" in file(entry(offsets=[8, 0]))
    assert "span" in file(entry(shape=[1 << 62] * 8))
    assert "must not overlap or leave gaps" in file({**A, "b": {**A["b"], "data_offsets": [14, 20]}})
    assert "must not overlap or leave gaps" in file({**A, "b": {**A["b"], "data_offsets": [18, 24]}})
    assert "starts at byte" in file(entry(offsets=[1 << 62, (1 << 62) + 8]))
    assert "Git LFS" in refused(put(b"version https://git-lfs.github.com/spec/v1\n"))
    drain(put(make.safe({"__metadata__": {"format": "pt"}, "e": {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}, **A}, DATA)))


def test_lengths_cost_nothing(make, put) -> None:
    tracemalloc.start()
    for at in range(len(make.safe(A, DATA)) - 8):
        data = make.safe(A, DATA)
        with suppress(CheckpointError, UnsupportedError):
            drain(put(data[:at] + struct.pack("<Q", 1 << 60) + data[at + 8 :]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


# Directories


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    return tmp_path


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "f32": torch.randn(3, 5), "bf16": torch.randn(4, 2).bfloat16(), "f16": torch.randn(7).half(), "odd": torch.arange(3, dtype=torch.uint8),
        "after": torch.randn(2), "after16": torch.randn(3, 3).bfloat16(),
    }  # fmt: skip


def check(checkpoint, tensors) -> None:
    assert sorted(checkpoint.names()) == sorted(tensors) and checkpoint.layout == "hf"
    for name, want in tensors.items():
        assert checkpoint.shape(name) == tuple(want.shape) and checkpoint.nbytes(name) == want.nbytes
        if name == "odd":
            with pytest.raises(UnsupportedError, match="'odd' is stored as U8"):
                checkpoint.read(name)
            continue
        got = checkpoint.read(name)
        assert got.flags.aligned and got.flags.c_contiguous
        if want.dtype == torch.bfloat16:
            assert got.dtype == np.uint16 and np.array_equal(got, want.view(torch.uint16).numpy()) and checkpoint.dtype(name) == "BF16"
        else:
            assert got.dtype == np.float32 and np.array_equal(got, want.float().numpy())


def test_a_single_file(folder) -> None:
    save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    with open_checkpoint(folder) as checkpoint:
        check(checkpoint, weights())
        assert checkpoint.config == {"architectures": ["X"]} and checkpoint.generation_config == {"eos_token_id": 2}
        with pytest.raises(CheckpointError, match="no tensor 'none'"):
            checkpoint.read("none")


def test_unaligned_tensors_are_copied(folder, make) -> None:
    header = {"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "y": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}}
    (folder / "model.safetensors").write_bytes(make.safe(header, b"\7" + np.array([1.5, -2], np.float32).tobytes()))
    with open_checkpoint(folder) as checkpoint:
        got = checkpoint.read("y")
    assert got.flags.aligned and got.tolist() == [1.5, -2]


@pytest.fixture
def shards(folder):
    tensors = weights()
    names = list(tensors)
    files = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, part in files.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    places = {n: file for file, part in files.items() for n in part}

    def index(**changes) -> None:
        wanted = {n: f for n, f in {**places, **changes}.items() if f is not None}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": wanted}))

    index()
    return folder, index


def test_shards(shards) -> None:
    with open_checkpoint(shards[0]) as checkpoint:
        check(checkpoint, weights())


def test_an_index_that_lies(shards) -> None:
    folder, index = shards

    def says(text: str, **changes) -> None:
        index(**changes)
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(folder)
        assert text in str(caught.value)

    says("tensor 'ghost' is missing from model-00001", ghost="model-00001-of-00002.safetensors")
    says("lacks the shard other.safetensors, which holds 1 of 7 tensors", ghost="other.safetensors")
    says("holds the tensor 'f32', which", f32=None)
    says("'f32' should lie in model-00002-of-00002.safetensors, but lies in model-00001", f32="model-00002-of-00002.safetensors")
    for place in ("../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..\\x.safetensors", "x.bin", "", 3, "a\0.safetensors"):
        says("no .safetensors file of this directory", f32=place)
    save_file({"f32": torch.zeros(1)}, folder / "more.safetensors")
    says("'f32' lies in model-00001-of-00002.safetensors and in more.safetensors", f32="more.safetensors")
    for broken in ("[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{", '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'):
        (folder / "model.safetensors.index.json").write_text(broken)
        with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
            open_checkpoint(folder)


def test_a_truncated_shard_names_itself(shards) -> None:
    folder, _ = shards
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        open_checkpoint(folder)


def test_what_is_no_model(tmp_path, folder) -> None:
    def says(kind, text: str, path=folder) -> None:
        with pytest.raises(kind) as caught:
            open_checkpoint(path)
        assert text in str(caught.value)

    says(CheckpointError, "has neither model.safetensors nor")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    says(UnsupportedError, "holds pytorch_model.bin but no model.safetensors")
    says(UnsupportedError, "Convert it", folder / "pytorch_model.bin")
    for name in ("x.pt", "x.pth", "X.PTH", "x.ckpt", "x.pkl"):
        says(UnsupportedError, "a pickle checkpoint", folder / name)
    (folder / "model.safetensors").write_bytes(b"")
    says(CheckpointError, "is empty")
    says(CheckpointError, "give the directory", folder / "model.safetensors")
    (folder / "config.json").write_text("[1]")
    says(CheckpointError, "JSON list, not an object")
    (folder / "config.json").write_bytes(b"\xff\xfe{}")
    says(CheckpointError, "config.json is no valid JSON")
    (folder / "config.json").unlink()
    says(CheckpointError, "has no config.json")
    says(CheckpointError, "does not exist", folder / "none.gguf")


# GGUF behind the same interface


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"])
def test_what_is_no_regular_file_is_refused_and_never_waited_for(folder, name) -> None:
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink(missing_ok=True)
    for make_it, kind in ((os.mkfifo, "a named pipe"), (lambda path: os.symlink("/dev/zero", path), "a device"), (os.mkdir, "a directory")):
        if (folder / name).is_symlink() or (folder / name).exists():
            (folder / name).unlink()
        make_it(folder / name)
        with pytest.raises(CheckpointError, match=f"{name} is {kind}, not a regular file"):
            open_checkpoint(folder)


def test_what_the_system_cannot_read(folder, monkeypatch) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/proc/self/mem")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        open_checkpoint(folder)
    with pytest.raises(CheckpointError, match="x cannot be read"):
        open_checkpoint("x" * 5000)


def test_gguf_types(tmp_path, make) -> None:
    rng = np.random.default_rng(3)
    want = rng.standard_normal((4, 64), dtype=np.float32)
    kinds = gguf.GGMLQuantizationType
    infos, data, stored = [], b"", {}
    for kind in (kinds.F32, kinds.F16, kinds.BF16, kinds.Q4_0, kinds.Q5_1, kinds.Q8_0):
        stored[kind.name] = raw = gguf.quants.quantize(want, kind)
        infos.append(make.info(f"w.{kind.name}", [64, 4], kind.value, len(data)))
        data += raw.tobytes() + bytes(-raw.nbytes % 4)
    path = tmp_path / "m.gguf"
    path.write_bytes(make.whole([make.key("general.alignment", "u32", 4)], infos, data, align=4))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.layout == "gguf" and checkpoint.metadata["general.alignment"] == 4
        for name, raw in stored.items():
            got = checkpoint.read("w." + name)
            assert checkpoint.dtype("w." + name) == name and checkpoint.nbytes("w." + name) == raw.nbytes and got.shape == (4, 64)
            if name == "BF16":
                assert got.dtype == np.uint16 and got.tobytes() == raw.tobytes()
            else:
                assert np.array_equal(got, gguf.quants.dequantize(raw, kinds[name]))
        with pytest.raises(CheckpointError, match="no tensor 'none'"):
            checkpoint.shape("none")


def test_a_split_gguf(tmp_path, make) -> None:
    (tmp_path / "m.gguf").write_bytes(make.whole([make.key("split.count", "u16", 3)], [], b""))
    with pytest.raises(UnsupportedError, match="one of 3 parts"):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.model
def test_the_real_model_as_the_gguf_package_sees_it(smollm2) -> None:
    with open_checkpoint(smollm2) as checkpoint:
        types = {checkpoint.dtype(n) for n in checkpoint.names()}
        assert types == {"F32", "Q4_1", "Q8_0"}
        total = sum(int(np.prod(checkpoint.shape(n))) for n in checkpoint.names())
        assert total == 134_515_008
        embed = checkpoint.read("token_embd.weight")
    assert embed.shape == (49152, 576) and np.isfinite(embed).all() and 0.01 < embed.std() < 1
