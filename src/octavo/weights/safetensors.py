"""safetensors files, read strictly over a memory map.

    header length u64 | header: JSON {name: {dtype, shape, data_offsets: [begin, end]}} | tensor data

Offsets count from the end of the header. Tensors must fill the data without gap or overlap, as the format demands.
Source: the safetensors format description, huggingface/safetensors.
"""

import json
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from octavo.errors import CheckpointError, UnsupportedError
from octavo.weights.mapped import MappedFile

if TYPE_CHECKING:
    import numpy as np

MAX_HEADER = 1 << 25  # bytes; a header of 100,000 tensors takes about 15 MB
MAX_DIMS = 8

# Bits of one element, for every type of the format.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """Where one tensor lies. ``offset`` counts from the file's start."""

    name: str
    type: str  # "BF16", "F32", …
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """An open safetensors file: ``tensors`` by name, ``read`` for a tensor's bytes. A context manager.

    Raises: CheckpointError when the file is missing, truncated, damaged or contradicts itself; UnsupportedError for
    unknown element types.
    """

    tensors: Mapping[str, SafeTensor]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = MappedFile(path)
        self.path = self._file.path
        try:
            self.tensors = self._parse()
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> "np.ndarray":
        """The tensor's stored bytes, as a read-only view of the file. → uint8 [nbytes]. Raises: CheckpointError."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r} (it has {len(self.tensors)} others)", name)
        return self._file.array(tensor.offset, tensor.nbytes)

    def close(self) -> None:
        """Give the file up. Safe to call twice, and while arrays that came from it are in use."""
        self._file.close()

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def _parse(self) -> dict[str, SafeTensor]:
        buffer, size = self._file.buffer, self._file.size
        if buffer[:11] == b"version htt":
            raise self._fail("a Git LFS pointer, not the weights: fetch them with `git lfs pull`")
        if size < 8:
            raise self._fail(f"truncated: {size} bytes, and the length of the header alone takes 8")
        length = int.from_bytes(buffer[:8], "little")
        if length > min(size - 8, MAX_HEADER):
            raise self._fail(f"the header claims {length} bytes, the file has {size - 8} left and the limit is {MAX_HEADER}: truncated or damaged")
        if buffer[8:9] != b"{":
            raise self._fail(f"the header starts with {buffer[8:9]!r}, not with {b'{'!r}: no safetensors file, or damaged")
        header = parse_json(buffer[8 : 8 + length], f"{self.path}: the header")
        header.pop("__metadata__", None)
        tensors = {name: self._entry(name, entry, 8 + length) for name, entry in header.items()}
        end, before = 8 + length, "the header"
        for t in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
            if t.offset != end:
                raise self._fail(f"tensor {t.name!r} starts at byte {t.offset}, but {before} ends at {end}: tensors must not overlap or leave gaps")
            end, before = t.offset + t.nbytes, repr(t.name)
        if end != size:
            raise self._fail(f"the tensors end at byte {end}, but the file has {size}: truncated or damaged")
        return tensors

    def _entry(self, name: str, entry: Any, start: int) -> SafeTensor:
        fields = entry if isinstance(entry, dict) else {}
        shape: Any
        offsets: Any
        dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
        if not isinstance(dtype, str) or not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2 or len(shape) > MAX_DIMS:
            raise self._fail(f"the header's entry of tensor {name!r} makes no sense: {reprlib.repr(entry)}")
        if dtype not in DTYPE_BITS:
            raise UnsupportedError(f"{self.path}: tensor {name!r} has the unknown type {dtype!r:.40}")
        bits = DTYPE_BITS[dtype]
        for dim in shape:
            bits *= dim
        begin, end = offsets
        if bits % 8 or bits // 8 != end - begin:
            raise self._fail(f"tensor {name!r} ({dtype}, {shape}) needs {bits / 8:g} bytes, its offsets {offsets} span {end - begin}")
        return SafeTensor(name, dtype, tuple(shape), start + begin, end - begin)


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object. Raises: CheckpointError when the text is damaged, nested absurdly, no object, or names a key twice."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError(f"{what} is no valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is a JSON {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return found


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)
