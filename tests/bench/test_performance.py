"""The page of performance, written from results of a tiny model."""

import json
from pathlib import Path

import pytest
from tests.checkpoints import make_tiny

from octavo.bench import kernels, latency, performance, quality, startup, throughput
from octavo.bench.quality import Pair
from octavo.bench.rig import Rig
from octavo.engine.console import LOGGER
from octavo.engine.report import LogReport
from octavo.errors import ConfigError

PAGE = f"# Title\n\nBefore.\n{performance.BEGIN}\nold\n{performance.END}\nAfter.\n"
VERSUS = {"times": {"single": {"octavo": [1.0, 2.0, 4.0], "other": [3.0, 6.0, 4.0]}, "mine": {"octavo": [1.0], "other": [0.5]}},
          "load_s": {"octavo": 0.6, "other": 3.25}, "rss_mb": {"octavo": 400, "other": 4100}}
ABOUT = {"model": "m", "cpu": "some CPU", "threads": 2,
         "engines": {"octavo": {"bits": 16, "kl": 1.5e-4}, "other": {"bits": 4.5, "kl": None, "note": "built with x"}}}


@pytest.fixture
def page(tmp_path: Path) -> Path:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    (tmp_path / "results").mkdir()
    return page


def test_results_become_tables(tmp_path: Path, page: Path) -> None:
    model, folder = str(make_tiny(tmp_path / "tiny")), tmp_path / "results"
    report = LogReport(LOGGER)
    with Rig(model, {"num_threads": 1, "max_num_batched_tokens": 128}, report) as rig:
        for name, (_, found) in (("a", throughput.run(rig, "single", 1, 0)), ("b", latency.run(rig, [1, 3], 8, 4, 1, 0)),
                                 ("c", kernels.run(rig, [1, 70], 8, 1))):
            (folder / f"{name}.json").write_text(json.dumps(found))
    with Pair(model, {"num_threads": 1}, {"dtype": "float32", "num_threads": 1}, report) as pair:
        _, found = quality.run(pair, "The quick brown fox jumps over the lazy dog.", "a text", [], 32)
    (folder / "d.json").write_text(json.dumps(found))
    _, started = startup.run(model, {"num_threads": 1}, 1)
    (folder / "e.json").write_text(json.dumps(started))
    performance.write(folder, page)
    text = page.read_text()
    kl = f"{found['text']['kl_mean']:.1e}"
    assert text.startswith("# Title\n\nBefore.\n") and text.endswith("After.\n") and "old" not in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert all("nan" not in cell and cell for row in rows for cell in row)
    assert sum(row[:2] == ["bfloat16", kl] for row in rows) == 3, "no speed without its KL"
    assert ["tiny", "bfloat16", "float32", f"a text, {found['text']['tokens']} tokens"] in [row[:4] for row in rows]
    assert {row[0] for row in rows} >= {"1", "70"} and "1 threads of" in text and "GB/s" in text
    assert ["precision", "weights", "offline, first", "offline, again", "serve, first", "serve, again"] in rows
    performance.write(folder, page)
    assert page.read_text() == text


def test_a_comparison(tmp_path: Path, page: Path) -> None:
    folder = tmp_path / "results"
    (folder / "versus-m.json").write_text(json.dumps(VERSUS))
    with pytest.raises(ConfigError, match=r"versus-m.about.json cannot be read"):
        performance.write(folder, page)
    (folder / "versus-m.about.json").write_text(json.dumps(ABOUT))
    performance.write(folder, page)
    text = page.read_text()
    assert "m, 2 threads of some CPU. In turns, medians of 3;" in text
    assert "| single | 2.00 s, 64 tok/s | 4.00 s, 32 tok/s (3.00×) |" in text and "| mine | 1.00 s | 0.50 s (0.50×) |" in text
    assert "| mean KL to float32 | 1.5e-04 | – |" in text and "| peak memory | 400 MB | 4100 MB |" in text and "other: built with x." in text


def test_what_is_no_result_is_refused(tmp_path: Path, page: Path) -> None:
    folder = tmp_path / "results"
    with pytest.raises(ConfigError, match="holds no results"):
        performance.write(folder, page)
    for wrong in ("[]", "{", '{"benchmark": "marathon"}'):
        (folder / "x.json").write_text(wrong)
        with pytest.raises(ConfigError, match=r"x\.json"):
            performance.write(folder, page)
    assert page.read_text() == PAGE
