"""The GGUF reader: right files, lying files, and files that noise made."""

import os
import struct
import time
import tracemalloc
from contextlib import suppress

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import CheckpointError, UnsupportedError
from octavo.quant.ggml import dequantize
from octavo.weights.gguf import MAX_ARRAY, GgufFile


def drain(path) -> None:
    """Touch everything that a file offers."""
    with GgufFile(path) as file:
        for name in file.metadata:
            _ = file.metadata[name]
        for name, tensor in file.tensors.items():
            assert file.read(name).nbytes == tensor.nbytes
            with suppress(UnsupportedError):
                dequantize(file.read(name), tensor.type, name)


def refused(path, kind=CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        drain(path)
    return str(caught.value)


@pytest.mark.parametrize("version", [2, 3])
def test_values_and_tensors(make, put, version) -> None:
    data = bytearray(make.sample())
    data[4] = version
    with GgufFile(put(bytes(data))) as file:
        assert file.version == version and file.alignment == 64
        for kind in make.codes:
            one, many = file.metadata[f"x.{kind}"], file.metadata[f"y.{kind}"]
            want = {"bool": bool, "f32": float, "f64": float}.get(kind, int)
            assert type(one) is want and one == 1
            assert many == [0, 1, 1] and {type(v) for v in many} == {want}
        assert file.metadata["s"] == "grüße" and file.metadata["t"] == ["", "a", "日本"] and file.metadata["empty"] == []
        assert file.metadata["t"] is file.metadata["t"]
        assert "t" in file.metadata and "nothing" not in file.metadata and file.metadata.get("nothing", 5) == 5
        assert {t.name: (t.type, t.shape, t.nbytes) for t in file.tensors.values()} == {
            "a.weight": ("F32", (2, 4), 32), "b.weight": ("Q4_1", (2, 32), 40), "c.bias": ("BF16", (3,), 6),
        }  # fmt: skip
        assert np.array_equal(file.read("a.weight").view(np.float32), np.arange(8, dtype=np.float32).reshape(2, 4))
        assert file.read("b.weight").tobytes() == bytes(range(40)) and file.read("b.weight").shape == (2, 20)
        assert not file.read("c.bias").flags.writeable
        with pytest.raises(CheckpointError, match="no tensor 'd'"):
            file.read("d")


def test_a_file_of_the_gguf_package(tmp_path) -> None:
    rng = np.random.default_rng(0)
    weights = {"a": rng.standard_normal((6, 64), dtype=np.float32), "b": rng.standard_normal((2, 3, 32), dtype=np.float32)}
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "llama")
    writer.add_token_list(["a", "é", "<s>"])
    writer.add_token_scores([0.5, -1.25, 0.0])
    writer.add_uint32("llama.block_count", 7)
    stored = {n: gguf.quants.quantize(w, gguf.GGMLQuantizationType.Q8_0) for n, w in weights.items()}
    for name, raw in stored.items():
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(tmp_path / "w.gguf") as file:
        assert file.metadata["general.architecture"] == "llama" and file.metadata["llama.block_count"] == 7
        assert file.metadata["tokenizer.ggml.tokens"] == ["a", "é", "<s>"]
        assert file.metadata["tokenizer.ggml.scores"] == [0.5, -1.25, 0.0]
        for name, raw in stored.items():
            assert file.tensors[name].shape == weights[name].shape
            assert np.array_equal(file.read(name).reshape(raw.shape), raw)


def test_every_truncation_is_refused_with_numbers(make, put) -> None:
    data = make.sample()
    for size in range(len(data)):
        message = refused(put(data[:size]))
        assert "file" in message and (size == 0 or any(c.isdigit() for c in message.rpartition("/")[2]))


def test_flipped_bytes_never_escape(make, put) -> None:
    data, escaped = make.sample(), 0
    for at in range(len(data)):
        for value in (0x00, 0xFF, data[at] ^ 0x80, data[at] ^ 0x01):
            try:
                drain(put(data[:at] + bytes([value]) + data[at + 1 :]))
                escaped += 1
            except (CheckpointError, UnsupportedError):
                pass
    assert 0 < escaped < 4 * len(data)  # a flip in a value or in tensor data cannot be noticed


def test_huge_counts_anywhere_cost_nothing(make, put) -> None:
    data = make.sample()
    tracemalloc.start()
    for at in range(4, len(data) - 8):
        for value in (len(data) + 1, 1 << 60, (1 << 64) - 1):
            with suppress(CheckpointError, UnsupportedError):
                drain(put(data[:at] + struct.pack("<Q", value) + data[at + 8 :]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20, f"{peak} bytes"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_damage_never_escapes(make, put, data) -> None:
    raw = bytearray(make.sample())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(raw) - 1))
        patch = data.draw(st.binary(max_size=12))
        raw[at : at + data.draw(st.integers(0, 12))] = patch
    with suppress(CheckpointError, UnsupportedError):
        drain(put(bytes(raw)))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_noise_behind_the_magic_never_escapes(put, noise) -> None:
    with suppress(CheckpointError, UnsupportedError):
        drain(put(b"GGUF" + struct.pack("<I", 3) + noise))


@pytest.mark.parametrize(
    ("head", "kind", "says"),
    [
        (b"", CheckpointError, "is empty"),
        (b"GG", CheckpointError, "needs 4 bytes at offset 0, but only 2"),
        (b"PK\3\4 and so on", CheckpointError, r"it starts with b'PK\x03\x04'"),
        (b"version https://git-lfs.github.com/spec/v1\n", CheckpointError, "git lfs pull"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedError, "big-endian"),
        (b"GGUF" + struct.pack("<III", 1, 0, 0), UnsupportedError, "version 1 "),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), UnsupportedError, "version 4 "),
    ],
)
def test_other_files(put, head, kind, says) -> None:
    assert says in refused(put(head), kind)


def test_missing_files_and_directories(tmp_path) -> None:
    assert "does not exist" in refused(tmp_path / "none.gguf")
    assert "a directory, not a regular file" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")  # nobody writes to it: opening it would never end
    assert "a named pipe, not a regular file" in refused(tmp_path / "pipe.gguf")
    (tmp_path / "zero.gguf").symlink_to("/dev/zero")
    assert "a device, not a regular file" in refused(tmp_path / "zero.gguf")


def test_lies_in_the_metadata(make, put) -> None:
    def file(*keys: bytes, **more) -> str:
        return refused(put(make.whole(list(keys), [], b"", **more)))

    array = make.text("k") + struct.pack("<I", 9)
    assert "claims 1152921504606846976 keys" in file(counts=(0, 1 << 60))
    assert "claims 60000 keys; the file's 32 bytes hold at most 0" in file(counts=(0, 60_000))
    assert "claims 1152921504606846976 tensors" in file(counts=(1 << 60, 0))
    assert "'k' appears twice" in file(make.key("k", "u8", 1), make.key("k", "u8", 1))
    assert "unknown value type 13" in file(make.text("k") + struct.pack("<I", 13))
    assert "unknown element type 99" in file(array + struct.pack("<IQ", 99, 0))
    assert f"claims {1 << 60} elements; the limit is {MAX_ARRAY}" in file(array + struct.pack("<IQ", 0, 1 << 60))
    assert "'k' of 1000 numbers needs 8000 bytes" in file(array + struct.pack("<IQ", 10, 1000))
    assert "claims 100 strings" in file(array + struct.pack("<IQ", 8, 100))
    assert "string 1 of 2 in 'k' starts at offset" in file(array + struct.pack("<IQQQ", 8, 2, 1 << 62, 0))
    assert "last string of 'k' ends at" in file(array + struct.pack("<IQQ", 8, 1, 200))
    assert "the name of key 0 of 1 is not UTF-8" in file(make.key(b"\xff", "u8", 1))
    assert "value of 'k' is not UTF-8" in file(make.key("k", "str", b"\xc3("))
    assert "'k'[1] is not UTF-8" in file(make.key("k", "[str]", ["fine", b"\xed\xa0\x80"]))
    assert "'k' is a boolean of value 2" in file(make.key("k", "bool", 2))
    assert "'k'[2] is a boolean of value 255" in file(make.key("k", "[bool]", [0, 1, 255]))
    assert "value of 'k' claims 16777217 bytes" in file(make.text("k") + struct.pack("<IQ", 8, (1 << 24) + 1))
    nested = array + struct.pack("<IQIQ", 9, 1, 9, 1)
    assert "array of arrays" in refused(put(make.whole([nested], [], b"")), UnsupportedError)


@pytest.mark.parametrize(("kind", "value"), [("u32", 0), ("u32", 48), ("i32", -32), ("str", "32"), ("f32", 32.0), ("bool", 1), ("u64", 1 << 40)])
def test_bad_alignment(make, put, kind, value) -> None:
    assert "general.alignment must be a power of two" in refused(put(make.whole([make.key("general.alignment", kind, value)], [], b"")))


def test_lies_about_tensors(make, put) -> None:
    def file(*infos: bytes, data: bytes = bytes(256), kind=CheckpointError) -> str:
        return refused(put(make.whole([], list(infos), data)), kind)

    assert "tensor 'a' claims 0 dimensions" in file(make.info("a", [], 0, 0))
    assert "tensor 'a' claims 5 dimensions" in file(make.info("a", [1] * 5, 0, 0))
    assert "tensor 'a' has a dimension of size 0: [0, 4]" in file(make.info("a", [0, 4], 0, 0))
    assert "tensor 'a' has a dimension of size 0" in file(make.info("a", [1 << 63, 0], 0, 0))
    assert "rows of 33 elements, not a multiple of Q4_1's block of 32" in file(make.info("a", [33], 3, 0))
    assert f"'a' (F32, [{1 << 32}, {1 << 32}]) ends at byte" in file(make.info("a", [1 << 32, 1 << 32], 0, 0))
    assert f"ends at byte {96 + 4 * ((1 << 64) - 1) ** 4}" in file(make.info("a", [(1 << 64) - 1] * 4, 0, 0))
    assert "offset 16 of the data, not a multiple of the alignment 32" in file(make.info("a", [4], 0, 16))
    assert "ends at byte" in file(make.info("a", [65], 0, 0))
    assert "ends at byte" in file(make.info("a", [1], 0, 1 << 63))
    assert "the tensor 'a' appears twice" in file(make.info("a", [4], 0, 0), make.info("a", [4], 0, 32))
    assert "'a' (bytes 96 to 132) and 'b' (from byte 128) overlap" in file(make.info("a", [9], 0, 0), make.info("b", [4], 0, 32))
    assert "tensor 'a' has type number 4" in file(make.info("a", [32], 4, 0), kind=UnsupportedError)
    assert "the name of tensor 0 is not UTF-8" in file(make.info(b"\x80", [4], 0, 0))
    drain(put(make.whole([], [make.info("b", [4], 0, 64), make.info("a", [8], 0, 0)], bytes(80))))  # any order, gaps: fine


def test_a_type_that_cannot_be_read_can_be_looked_at(make, put) -> None:
    with GgufFile(put(make.whole([], [make.info("a", [256], 23, 0)], bytes(136)))) as file:
        assert file.tensors["a"].type == "IQ4_XS"
        with pytest.raises(UnsupportedError, match="IQ4_XS"):
            dequantize(file.read("a"), "IQ4_XS", "a")


def test_a_large_vocabulary_opens_fast(make, put) -> None:
    tokens = [f"token{i}" for i in range(150_000)]
    keys = [make.key("tokens", "[str]", tokens), make.key("merges", "[str]", [f"{a} {a}" for a in tokens]), make.key("types", "[i32]", [1] * 150_000)]
    path = put(make.whole(keys, [], b""))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        with GgufFile(path):
            times.append(time.perf_counter() - start)
    assert min(times) < 0.25, times
    with GgufFile(path) as file:
        assert file.metadata["tokens"] == tokens and file.metadata["merges"][-1] == "token149999 token149999"


def test_arrays_outlive_the_file_and_lookups_do_not(make, put) -> None:
    file = GgufFile(put(make.sample()))
    view = file.read("a.weight")
    file.close()
    file.close()
    assert view.view(np.float32).sum() == 28
    with pytest.raises(ValueError, match="is closed"):
        file.read("a.weight")
    with pytest.raises(ValueError, match="is closed"):
        _ = file.metadata["t"]
    assert file.metadata["s"] == "grüße"


def test_no_descriptor_is_kept(make, put) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        file = GgufFile(put(make.sample()))
        file.close()
        refused(put(make.sample()[:-1]))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_forked_child_reads_and_closes_its_own(make, put) -> None:
    file = GgufFile(put(make.sample()))
    child = os.fork()
    if child == 0:
        good = file.read("a.weight").view(np.float32).sum() == 28 and file.metadata["t"][1] == "a"
        file.close()
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert file.read("a.weight").view(np.float32).sum() == 28
    file.close()


@pytest.mark.model
def test_the_real_model(smollm2) -> None:
    with GgufFile(smollm2) as file:
        assert len(file.tensors) == 272 and sum(t.nbytes for t in file.tensors.values()) < 98_362_432
        assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
        assert file.tensors["token_embd.weight"].shape == (49152, 576)
        raw = file.read("blk.3.ffn_down.weight")[:64]
        ours = dequantize(raw, "Q4_1")
    theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_1)
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))
