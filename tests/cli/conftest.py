import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.checkpoints import make_tiny

Octavo = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny checkpoint that answers in no time."""
    return str(make_tiny(tmp_path_factory.mktemp("cli") / "tiny"))


@pytest.fixture
def octavo(tmp_path: Path) -> Octavo:
    """Run the command as a user does: octavo("generate", MODEL, …, stdin="…")."""

    def run(*args: str, stdin: str | None = None, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        base = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_API")}
        return subprocess.run(
            [sys.executable, "-m", "octavo", *args], input=stdin or "", capture_output=True, text=True, timeout=60,
            env=base | {"COLUMNS": "100", "OCTAVO_CACHE": str(tmp_path / "cache")} | (env or {}),
        )

    return run
