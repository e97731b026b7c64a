"""A model's tensors by name, whether they lie in one GGUF file or in the safetensors of a Hugging Face directory."""

import os
import reprlib
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from octavo.errors import CheckpointError, UnsupportedError
from octavo.files import is_there, read_small
from octavo.quant import ggml
from octavo.weights.gguf import GgufFile
from octavo.weights.hub import NO_PICKLE, PICKLES
from octavo.weights.safetensors import SafetensorsFile, parse_json

if TYPE_CHECKING:
    import numpy as np

MAX_JSON = 1 << 26  # bytes of a config or an index
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Checkpoint:
    """What loaders see of a model's files. A context manager; arrays that were read stay valid after ``close``."""

    layout: str  # "gguf" | "hf": whose names the tensors have

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: list[GgufFile | SafetensorsFile] = []
        self._homes: dict[str, GgufFile | SafetensorsFile] = {}  # by tensor name

    @property
    def files(self) -> list[Path]:
        """The files whose content makes the model: its tensors and its shape."""
        return [file.path for file in self._files]

    def names(self) -> list[str]:
        """Names of all tensors, in the files' order."""
        return list(self._homes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first: a matrix is [outputs, inputs]. Raises: CheckpointError when there is none."""
        return self._home(name).tensors[name].shape

    def dtype(self, name: str) -> str:
        """The stored type: "F32", "BF16", "Q4_1", … Raises: CheckpointError when there is no such tensor."""
        return self._home(name).tensors[name].type

    def nbytes(self, name: str) -> int:
        """Stored bytes of a tensor. Raises: CheckpointError when there is no such tensor."""
        return self._home(name).tensors[name].nbytes

    def read(self, name: str) -> "np.ndarray":
        """The numbers of a tensor, in its shape: uint16 holding bfloat16 bits when it is stored so, else float32.

        What needs no conversion is a read-only view of the file. Raises: CheckpointError when there is no such tensor,
        UnsupportedError for a stored type that is not served.
        """
        file = self._home(name)
        tensor = file.tensors[name]
        if tensor.type in ("F32", "BF16", "F16"):
            return _view(file.read(name), tensor.type, tensor.shape)
        if self.layout == "gguf":
            return ggml.dequantize(file.read(name), tensor.type, name).reshape(tensor.shape)
        raise UnsupportedError(f"tensor {name!r} is stored as {tensor.type}, which is not served; F32, BF16 and F16 are", name)

    def read_stored(self, name: str) -> "np.ndarray":
        """The bytes of a tensor as they are stored: a read-only view, uint8 [rows, bytes of a row]. Raises: CheckpointError."""
        raw = self._home(name).read(name)
        return raw.reshape(-1, raw.shape[-1])

    def close(self) -> None:
        """Give the files up."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _home(self, name: str) -> GgufFile | SafetensorsFile:
        file = self._homes.get(name)
        if file is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r} (it has {len(self._homes)} others)", name)
        return file

    def _add(self, file: GgufFile | SafetensorsFile) -> None:
        self._files.append(file)
        for tensor in file.tensors:
            if tensor in self._homes:
                raise CheckpointError(f"{self.path}: the tensor {tensor!r} lies in {self._homes[tensor].path.name} and in {file.path.name}")
            self._homes[tensor] = file


class GgufCheckpoint(Checkpoint):
    """A GGUF file. ``metadata`` has its keys; tensors have GGUF's names ("blk.0.attn_q.weight")."""

    layout = "gguf"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        file = GgufFile(path)
        self._add(file)
        self.metadata = file.metadata
        parts = self.metadata.get("split.count", 1)
        if parts not in (0, 1):
            self.close()
            raise UnsupportedError(f"{path} is one of {reprlib.repr(parts)} parts of a model; join them with `llama-gguf-split --merge`")


class HfCheckpoint(Checkpoint):
    """A directory in Hugging Face layout. ``config`` and ``generation_config`` are its JSON files; the latter may be {}."""

    layout = "hf"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.config = read_json(path / "config.json")
        generation = path / "generation_config.json"
        self.generation_config: dict[str, Any] = read_json(generation) if is_there(generation) else {}
        try:
            self._open_files()
        except BaseException:
            self.close()
            raise

    @property
    def files(self) -> list[Path]:
        """The weights and config.json."""
        return [self.path / "config.json", *super().files]

    def _open_files(self) -> None:
        index = self.path / INDEX
        if is_there(self.path / SINGLE):  # transformers, too, prefers it to an index beside it
            self._add(SafetensorsFile(self.path / SINGLE))
        elif is_there(index):
            self._open_shards(index)
        else:
            found = self._weight_files()
            if any(name.endswith(PICKLES) for name in found):
                raise UnsupportedError(f"{self.path} holds {', '.join(found[:4])} but no {SINGLE}: {NO_PICKLE}")
            raise CheckpointError(f"{self.path} has neither {SINGLE} nor {INDEX}" + (f"; it holds {', '.join(found[:4])}" if found else ""))

    def _weight_files(self) -> list[str]:
        try:
            return sorted(f.name for f in self.path.iterdir() if f.suffix in (".safetensors", *PICKLES))
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from None

    def _open_shards(self, index: Path) -> None:
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise CheckpointError(f"{index}: weight_map must be an object that names the file of each tensor")
        for tensor, shard in places.items():
            if not isinstance(shard, str) or not shard.endswith(".safetensors") or "/" in shard or "\\" in shard or "\0" in shard:
                raise CheckpointError(f"{index}: tensor {tensor!r} is placed in {reprlib.repr(shard)}, no .safetensors file of this directory")
        for shard in sorted(set(places.values())):
            if not is_there(self.path / shard):
                missing = sum(place == shard for place in places.values())
                raise CheckpointError(f"{self.path} lacks the shard {shard}, which holds {missing} of {len(places)} tensors")
            self._add(SafetensorsFile(self.path / shard))
        for tensor, shard in places.items():
            if tensor not in self._homes:
                raise CheckpointError(f"{index}: tensor {tensor!r} is missing from {shard}")
            if self._homes[tensor].path.name != shard:
                raise CheckpointError(f"{index}: tensor {tensor!r} should lie in {shard}, but lies in {self._homes[tensor].path.name}")
        for tensor, file in self._homes.items():
            if tensor not in places:
                raise CheckpointError(f"{file.path} holds the tensor {tensor!r}, which {INDEX} does not name")


def open_checkpoint(path: str | os.PathLike[str]) -> GgufCheckpoint | HfCheckpoint:
    """Open what ``hub.resolve`` found: a directory in Hugging Face layout, or a GGUF file.

    Cost: reads headers only. Raises: CheckpointError, UnsupportedError (pickles, split GGUF files).
    """
    path = Path(path)
    if os.path.isdir(path):
        return HfCheckpoint(path)
    if path.suffix.lower() in PICKLES:
        raise UnsupportedError(f"{path}: {NO_PICKLE}")
    if path.suffix.lower() == ".safetensors":
        raise CheckpointError(f"{path} holds weights only: give the directory that holds it, with config.json and tokenizer.json")
    return GgufCheckpoint(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model's directory. Raises: CheckpointError when it is missing, too large or damaged."""
    try:
        data = read_small(path, MAX_JSON)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    return parse_json(data, str(path))


def _view(raw: "np.ndarray", dtype: str, shape: tuple[int, ...]) -> "np.ndarray":
    """Stored bytes as numbers: a view where the type allows it and the file aligned them."""
    import numpy as np

    values = raw.reshape(-1).view({"F32": np.float32, "BF16": np.uint16, "F16": np.float16}[dtype])
    if dtype == "F16":
        values = values.astype(np.float32)
    return (values if values.flags.aligned else values.copy()).reshape(shape)
