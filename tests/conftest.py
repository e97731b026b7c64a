"""Shared fixtures: the real model, when it is there."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Path of the pinned SmolLM2 file: OCTAVO_TEST_MODEL, else Octavo's cache."""
    path = os.environ.get("OCTAVO_TEST_MODEL")
    if path is None:
        from octavo.weights.hub import cached_short_name

        found = cached_short_name("smollm2")
        path = str(found) if found else None
    if path is None or not Path(path).exists():
        pytest.skip("SmolLM2 is not here: run `octavo pull smollm2`, or set OCTAVO_TEST_MODEL to the file")
    return path
