"""The runner of experiments, on a tiny model: what it writes and says. Figures are no matter here."""

import importlib.util
import json
from pathlib import Path

import pytest
from tests.checkpoints import make_tiny

from octavo.bench import picture, runner
from octavo.bench.outcome import Spread, ratio
from octavo.bench.page import BEGIN, END, rewrite
from octavo.errors import ConfigError, UnsupportedError


class Quiet:
    """A Report that says nothing."""

    def begin(self, phase: str) -> None: ...

    def progress(self, what: str, done: int, total: int | None) -> None: ...

    def end(self, phase: str, seconds: float) -> None: ...

    def note(self, text: str) -> None: ...


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("lab") / "tiny"))


@pytest.mark.parametrize("name", runner.NAMES)
def test_every_experiment_runs_and_writes_a_whole_result(name: str, tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = importlib.util.find_spec("matplotlib") is not None
    runner.run([name], tiny, tmp_path, repeats=1, quick=True, pictures=pictures, num_threads=2, report=Quiet())
    assert (tmp_path / f"{name}.png").exists() == pictures
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["finding"] and found["claim"] == runner.claim(name) and found["claim"].endswith(".")
    assert all(len(row) == len(found["columns"]) for row in found["table"])
    assert found["config"]["model"]["model"] == "tiny" and found["machine"]["threads"] >= 1 and found["octavo"] and found["data"]
    assert found["finding"] in capsys.readouterr().out


def test_the_page_is_written_from_the_results_and_keeps_its_own_words(tmp_path: Path) -> None:
    page, out = tmp_path / "docs" / "page.md", tmp_path / "docs" / "results"
    out.mkdir(parents=True)
    told = {"experiment": "prefix", "claim": "Prefixes are shared.", "finding": "3× as fast", "quick": False, "commit": "0123456789abcdef",
            "changed": False,
            "config": {"model": {"model": "m.gguf", "dtype": "bfloat16"}}, "machine": {"threads": 2, "cpu": "a CPU", "isa": "avx512"}}
    (out / "prefix.json").write_text(json.dumps(told))
    (out / "prefix.png").write_bytes(b"")
    page.write_text(f"before\n{BEGIN}\nold figures\n{END}\nafter\n")
    for _ in range(2):  # again and again
        rewrite(page, out, runner.NAMES)
        text = page.read_text()
        assert text.startswith("before\n") and text.endswith("\nafter\n") and "old figures" not in text and text.count("3× as fast") == 1
        assert "| Prefixes are shared. | `octavo bench experiments prefix` | 3× as fast. |" in text and "commit 012345678\n" not in text
        assert "2 threads of a CPU, avx512; commit 012345678." in text and "![prefix](results/prefix.png)" in text
    page.write_text("no marks")
    with pytest.raises(ConfigError, match="marks"):
        rewrite(page, out, runner.NAMES)
    with pytest.raises(ConfigError, match="cannot be read"):
        rewrite(tmp_path / "nowhere.md", out, runner.NAMES)


def test_unknown_names_and_repeats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no experiment 'nix'; there are: "):
        runner.run(["nix"], "nowhere", tmp_path, repeats=1, quick=True, pictures=False, num_threads=None, report=Quiet())
    with pytest.raises(ConfigError, match="repeats"):
        runner.run([], "nowhere", tmp_path, repeats=0, quick=True, pictures=False, num_threads=None, report=Quiet())


def test_pictures_without_matplotlib_are_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"octavo\[bench\]"):
        picture.require()


def test_spreads_and_ratios() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert ratio([2.0, 9.0], [1.0, 3.0]) == Spread(2.5, 2.0, 3.0)
    assert Spread(0.5, 0.5, 0.5).text(".0f", " %", 100) == "50 %" and Spread(2, 1, 3).text(".1f", "×") == "2.0× (1.0 … 3.0)"
