"""The hash of a checkpoint: content decides, memory only saves reading."""

import json
import os
from pathlib import Path

import pytest
from tests.checkpoints import make_tiny

from octavo.errors import CheckpointError
from octavo.files import write_atomically
from octavo.weights import identity
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.identity import MEMO, checkpoint_hash


def old(path: Path, data: bytes, seconds: float = 1_000_000_000.0) -> Path:
    """A file that was changed long ago."""
    path.write_bytes(data)
    os.utime(path, (seconds, seconds))
    return path


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's change time cannot be set: let even young files be remembered."""
    monkeypatch.setattr(identity, "SETTLED", -1e9)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read."""
    seen: list[str] = []
    real = identity._read
    monkeypatch.setattr(identity, "_read", lambda path: seen.append(path.name) or real(path))
    return seen


def test_the_content_decides(tmp_path: Path) -> None:
    a, b = old(tmp_path / "a", b"one"), old(tmp_path / "b", b"two")
    first = checkpoint_hash([a, b])
    assert first == checkpoint_hash([b, a]), "an order of files"
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    assert first == checkpoint_hash([old(folder / "a", b"one"), old(folder / "b", b"two")]), "where they lie does not count"
    assert first == checkpoint_hash([old(tmp_path / "c", b"two"), old(tmp_path / "d", b"one")]), "nor what they are called"
    assert first != checkpoint_hash([old(tmp_path / "a", b"one"), old(tmp_path / "b", b"three")])
    assert first != checkpoint_hash([old(tmp_path / "a", b"one")])
    assert first != checkpoint_hash([old(tmp_path / "a", b"onetwo"), old(tmp_path / "b", b"")])


def test_a_known_file_is_not_read_again(tmp_path: Path, settled: None, reads: list[str]) -> None:
    a, b = old(tmp_path / "a", b"one"), old(tmp_path / "b", b"two")
    first = checkpoint_hash([a, b], tmp_path)
    assert checkpoint_hash([a, b], tmp_path) == first and reads == ["a", "b"]
    assert oct((tmp_path / MEMO).stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize("seconds", [1_000_000_000.0, 1_000_000_001.0])
def test_a_changed_file_is_read_again_even_with_the_same_size_and_time(tmp_path: Path, settled: None, reads: list[str], seconds: float) -> None:
    a = old(tmp_path / "a", b"one")
    first = checkpoint_hash([a], tmp_path)
    assert checkpoint_hash([old(a, b"two", seconds)], tmp_path) != first and reads == ["a", "a"]


def test_a_file_changed_a_moment_ago_is_not_remembered(tmp_path: Path, reads: list[str]) -> None:
    a = tmp_path / "a"
    a.write_bytes(b"one")
    assert checkpoint_hash([a], tmp_path) == checkpoint_hash([a], tmp_path)
    assert reads == ["a", "a"], "another change might not show in its times"


def test_a_file_that_changes_while_it_is_read_is_not_remembered(tmp_path: Path, settled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    a = old(tmp_path / "a", b"one")
    real = identity._read

    def disturbed(path: Path) -> str:
        digest = real(path)
        old(path, b"longer")
        return digest

    monkeypatch.setattr(identity, "_read", disturbed)
    first = checkpoint_hash([a], tmp_path)
    monkeypatch.setattr(identity, "_read", real)
    assert checkpoint_hash([a], tmp_path) != first


@pytest.mark.parametrize("damage", [
    b"", b"{", b"[1, null, {}]", b'{"a": 1}', b'[{"path": 1, "sha256": 2}]', b"[" * 100_000, b" " * (identity.MOST_MEMO + 1),
])
def test_a_damaged_memory_is_forgotten(tmp_path: Path, settled: None, reads: list[str], damage: bytes) -> None:
    a = old(tmp_path / "a", b"one")
    (tmp_path / MEMO).write_bytes(damage)
    first = checkpoint_hash([a], tmp_path)
    assert checkpoint_hash([a], tmp_path) == first and reads == ["a"]
    assert len(json.loads((tmp_path / MEMO).read_bytes())) == 1


def test_the_memory_is_bounded(tmp_path: Path, settled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "MOST_REMEMBERED", 2)
    checkpoint_hash([old(tmp_path / name, name.encode()) for name in "abcd"], tmp_path)
    names = [os.fsdecode(bytes.fromhex(entry["path"])) for entry in json.loads((tmp_path / MEMO).read_bytes())]
    assert names == [str(tmp_path / "c"), str(tmp_path / "d")]


def test_a_folder_that_is_not_there_costs_the_memory_only(tmp_path: Path, settled: None) -> None:
    a = old(tmp_path / "a", b"one")
    assert checkpoint_hash([a], tmp_path / "none") == checkpoint_hash([a])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none"):
        checkpoint_hash([tmp_path / "none"])


def test_a_checkpoint_names_what_makes_it(tmp_path: Path) -> None:
    with open_checkpoint(make_tiny(tmp_path / "tiny")) as checkpoint:
        assert [path.name for path in checkpoint.files] == ["config.json", "model.safetensors"]


class TestWriting:
    def test_the_new_file_is_whole_and_private(self, tmp_path: Path) -> None:
        path = old(tmp_path / "f", b"before")
        path.chmod(0o644)
        write_atomically(path, lambda file: file.write(b"after"))
        assert path.read_bytes() == b"after" and path.stat().st_mode & 0o777 == 0o600
        assert [each.name for each in tmp_path.iterdir()] == ["f"]

    def test_a_failure_leaves_the_old_one_and_nothing_else(self, tmp_path: Path) -> None:
        path = old(tmp_path / "f", b"before")

        def broken(file) -> None:
            file.write(b"half")
            raise RuntimeError("full")

        with pytest.raises(RuntimeError, match="full"):
            write_atomically(path, broken)
        assert path.read_bytes() == b"before" and [each.name for each in tmp_path.iterdir()] == ["f"]
