"""The head of every benchmark's JSON: which code was measured, how it was built, where, and with which settings."""

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import octavo
from octavo.config import Config
from octavo.errors import ConfigError


def head(config: Config | None) -> dict[str, Any]:
    """What a reader needs to judge or repeat a figure. ``config``: the final one (factory.resolve); None where no engine ran."""
    from octavo.ops.native import native_info

    settings = None if config is None else asdict(config)
    if settings is not None:
        settings["model"]["model"] = model_name(settings["model"]["model"])
    return {"octavo": octavo.__version__, **commit(), "build": native_info(), "machine": machine(), "config": settings}


def model_name(given: str) -> str:
    """Of a model as it was asked for: which one, and not in whose folder."""
    return Path(given).name


def commit() -> dict[str, Any]:
    """The commit of the sources that this package runs from or was installed from, and whether they differ from it; None where unknown."""
    for folder in _sources():
        found = _git(folder, "rev-parse", "HEAD")
        if found:
            return {"commit": found, "changed": bool(_git(folder, "status", "--porcelain", "--", "src", "native"))}
    return {"commit": None, "changed": None}


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory, system. No names."""
    from octavo.ops.native import chosen_isa
    from octavo.ops.threads import allowed_threads

    return {
        "cpu": _cpu(), "threads": allowed_threads(), "isa": chosen_isa(), "load": os.getloadavg()[0],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def check_place(path: Path) -> None:
    """Whether a result can be written there: asked before it is measured. Raises: ConfigError."""
    if path.is_dir():
        raise ConfigError(f"save: {path} is a folder, and a file is asked for", "save")
    if not path.parent.is_dir():
        raise ConfigError(f"save: {path.parent} is no folder that is there: make it first", "save")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"save: the folder {path.parent} cannot be written to", "save")


def write(path: Path, result: dict[str, Any]) -> None:
    """One result as a JSON file, whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(result, indent=1) + "\n")
    draft.replace(path)


def hand_out(text: str, found: dict[str, Any], save: Path | None) -> None:
    """The table, and the result as the last line, and to the file that is asked for."""
    try:
        if save is not None:
            write(save, found)
    except OSError as error:
        raise ConfigError(f"save: {save} could not be written: {error}", "save") from error
    finally:  # what was measured is not lost with a disk that is full
        sys.stdout.write(f"{text}\n{json.dumps(found)}\n")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or platform.machine())


def _sources() -> list[Path]:
    """Where the sources may be: the package itself in a checkout, or the folder that pip installed it from."""
    found = [Path(__file__).parent]
    try:
        url = json.loads(metadata.distribution("octavo").read_text("direct_url.json") or "{}").get("url", "")
    except (metadata.PackageNotFoundError, ValueError):
        url = ""
    return [*found, Path(unquote(urlsplit(url).path))] if url.startswith("file://") else found


def _git(folder: Path, *words: str) -> str:
    """Git's answer about this project; nothing where there is no git, or the folder belongs to something else."""
    try:
        top = subprocess.run(["git", "-C", folder, "rev-parse", "--show-toplevel"], capture_output=True, text=True, timeout=10)
        if top.returncode or not (Path(top.stdout.strip()) / "src" / "octavo" / "bench").is_dir():
            return ""
        return subprocess.run(["git", "-C", top.stdout.strip(), *words], capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
