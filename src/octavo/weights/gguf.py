"""GGUF files, read strictly over a memory map.

    magic "GGUF" | version u32 | tensors u64 | keys u64
    keys     × (name, type u32, value)                     value: a number, a string, or an array of either
    tensors  × (name, dims u32, dims × u64, type u32, offset u64)
    padding to general.alignment | tensor data (offsets count from here)

Strings are a u64 length and UTF-8 bytes; everything is little endian. Nothing in the file is believed before it is
compared with the file's size, so a truncated or hostile file costs a ``CheckpointError`` and no memory.

Source: the GGUF specification, ggml-org/ggml, docs/gguf.md.
"""

import os
import reprlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from octavo.errors import CheckpointError, UnsupportedError
from octavo.quant.ggml import BLOCK_TYPES
from octavo.weights.mapped import MappedFile

if TYPE_CHECKING:
    import numpy as np

# Limits far above any real model: they bound the time and memory that a hostile file can cost.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_NAME = (1 << 16) - 1  # bytes of a key or a tensor name (the specification's limit for keys)
MAX_STRING = 1 << 24  # bytes of one string; chat templates are the longest real ones, at about 30 kB
MAX_ARRAY = 1 << 23  # elements; the largest real vocabularies have 2^18 tokens and 2^19 merges
MAX_ARRAY_STRINGS = 1 << 24  # strings in all arrays together

MAX_DIMS = 4
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_SIZES = {kind: struct.calcsize("<" + code) for kind, code in _NUMBERS.items()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_TYPES = {t.id: t for t in BLOCK_TYPES.values()}
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. ``shape`` has numpy's order (rows first), ``offset`` counts from the file's start."""

    name: str
    type: str  # "F32", "Q4_1", …
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Array:
    """An array that has been measured and not decoded yet."""

    kind: int
    count: int
    start: int


class GgufMetadata(Mapping[str, Any]):
    """The keys of a file: int, float, bool, str, or a list of them. Arrays are decoded when first asked for.

    Raises: CheckpointError from a lookup, when an array's strings are not UTF-8 or its booleans neither 0 nor 1.
    """

    def __init__(self, file: MappedFile, values: dict[str, Any]) -> None:
        self._file = file
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _Array):
            value = self._values[key] = self._decode(key, value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values  # Mapping's own would decode the array

    def _decode(self, key: str, array: _Array) -> list[Any]:
        if array.kind == _STRING:
            return self._decode_strings(key, array)
        values = list(struct.unpack_from(f"<{array.count}{_NUMBERS[array.kind]}", self._file.buffer, array.start))
        if array.kind != _BOOL:
            return values
        return [_boolean(self._file.path, f"{key!r}[{i}]", value) for i, value in enumerate(values)]

    def _decode_strings(self, key: str, array: _Array) -> list[str]:
        buffer, unpack, position, values = self._file.buffer, _U64.unpack_from, array.start, []
        try:
            for _ in range(array.count):
                start = position + 8
                position = start + unpack(buffer, position)[0]
                values.append(buffer[start:position].decode())
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._file.path}: {key!r}[{len(values)}] is not UTF-8 text: {error}") from None
        return values


class GgufFile:
    """An open GGUF file: ``metadata`` by key, ``tensors`` by name, ``read`` for a tensor's bytes. A context manager.

    Arrays of the metadata are decoded when first asked for, which must be before ``close``. See MappedFile for forks,
    and for arrays that outlive the file.

    Raises: CheckpointError when the file is missing, truncated, damaged or contradicts itself; UnsupportedError for
    version 1, big-endian files, nested arrays and unknown tensor types.
    """

    version: int
    alignment: int
    metadata: GgufMetadata
    tensors: Mapping[str, GgufTensor]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = MappedFile(path)
        self.path = self._file.path
        try:
            _Parser(self._file).parse(self)
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> "np.ndarray":
        """The tensor's stored bytes, as a read-only view of the file. → uint8 [rows, bytes of a row].

        Raises: CheckpointError when there is no such tensor.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r} (it has {len(self.tensors)} others)", name)
        kind = BLOCK_TYPES[tensor.type]
        return self._file.array(tensor.offset, tensor.nbytes).reshape(-1, tensor.shape[-1] // kind.block * kind.nbytes)

    def close(self) -> None:
        """Give the file up. Safe to call twice, and while arrays that came from it are in use."""
        self._file.close()

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Parser:
    """Reads the front part of a file from left to right. Every read is checked against the file's size first."""

    def __init__(self, mapped: MappedFile) -> None:
        self.mapped = mapped
        self.path = mapped.path
        self.buffer = mapped.buffer
        self.size = mapped.size
        self.position = 0
        self.array_strings = 0

    def parse(self, file: GgufFile) -> None:
        file.version = self.version()
        num_tensors = self.count("tensors", MAX_TENSORS, smallest=8 + 4 + 8 + 4 + 8)
        num_keys = self.count("keys", MAX_KEYS, smallest=8 + 4 + 1)
        file.metadata = GgufMetadata(self.mapped, self.keys(num_keys))
        file.alignment = self.alignment(file.metadata)
        infos = [self.tensor(i) for i in range(num_tensors)]
        start = -(-self.position // file.alignment) * file.alignment
        file.tensors = self.place(infos, start, file.alignment)

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def need(self, size: int, what: str) -> int:
        """Advance by ``size`` bytes. → where they start."""
        start = self.position
        if size > self.size - start:
            raise self.fail(
                f"{what} needs {size} bytes at offset {start}, but only {self.size - start} of the file's {self.size} are left: "
                "truncated or damaged"
            )
        self.position = start + size
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.buffer, self.need(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.buffer, self.need(8, what))[0])

    def text(self, what: str, limit: int) -> str:
        size = self.u64(f"the length of {what}")
        if size > limit:
            raise self.fail(f"{what} claims {size} bytes at offset {self.position}; the limit is {limit}")
        start = self.need(size, what)
        try:
            return self.buffer[start : start + size].decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8 text: {error}") from None

    def version(self) -> int:
        head = self.buffer[: min(16, self.size)]
        self.need(4, "the magic number")
        if head[:4] != b"GGUF":
            hint = " (a Git LFS pointer: fetch the file itself with `git lfs pull`)" if head.startswith(b"version https") else ""
            raise self.fail(f"not a GGUF file: it starts with {head[:4]!r}, not b'GGUF'{hint}")
        version = self.u32("the version")
        if version & 0xFFFF == 0 and version:
            raise UnsupportedError(f"{self.path}: a big-endian GGUF file; convert it to little endian")
        if version not in (2, 3):
            raise UnsupportedError(f"{self.path}: GGUF version {version} is not served; versions 2 and 3 are. Convert the model anew")
        return version

    def count(self, what: str, limit: int, smallest: int) -> int:
        """Number of things in the header, each of which takes at least ``smallest`` bytes."""
        count = self.u64(f"the number of {what}")
        room = (self.size - self.position) // smallest
        if count > min(limit, room):
            raise self.fail(f"the header claims {count} {what}; the file's {self.size} bytes hold at most {room}, and the limit is {limit}")
        return count

    def keys(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for index in range(count):
            key = self.text(f"the name of key {index} of {count}", MAX_NAME)
            if key in values:
                raise self.fail(f"the key {key!r} appears twice")
            kind = self.u32(f"the type of key {key!r}")
            values[key] = self.array(key) if kind == _ARRAY else self.scalar(key, kind)
        return values

    def scalar(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.text(f"the value of {key!r}", MAX_STRING)
        if kind not in _NUMBERS:
            raise self.fail(f"the key {key!r} has the unknown value type {kind}")
        start = self.need(_SIZES[kind], f"the value of {key!r}")
        value = struct.unpack_from("<" + _NUMBERS[kind], self.buffer, start)[0]
        return _boolean(self.path, repr(key), value) if kind == _BOOL else value

    def array(self, key: str) -> _Array:
        kind = self.u32(f"the element type of {key!r}")
        count = self.u64(f"the length of {key!r}")
        if kind == _ARRAY:
            raise UnsupportedError(f"{self.path}: {key!r} is an array of arrays, which no known model uses")
        if kind != _STRING and kind not in _NUMBERS:
            raise self.fail(f"the array {key!r} has the unknown element type {kind}")
        if count > MAX_ARRAY:
            raise self.fail(f"the array {key!r} claims {count} elements; the limit is {MAX_ARRAY}")
        start = self.position
        if kind == _STRING:
            self.skip_strings(key, count)
        else:
            self.need(count * _SIZES[kind], f"the array {key!r} of {count} numbers")
        return _Array(kind, count, start)

    def skip_strings(self, key: str, count: int) -> None:
        self.array_strings += count
        if count * 8 > self.size - self.position or self.array_strings > MAX_ARRAY_STRINGS:
            raise self.fail(
                f"the array {key!r} claims {count} strings at offset {self.position}; the file has {self.size} bytes, and all arrays "
                f"together may hold {MAX_ARRAY_STRINGS} strings"
            )
        # The only loop that matters for the time to open a file: a vocabulary and its merges are 450,000 strings.
        buffer, position, unpack, last = self.buffer, self.position, _U64.unpack_from, self.size - 8
        for index in range(count):
            if position > last:
                raise self.fail(f"string {index} of {count} in {key!r} starts at offset {position}, beyond the file's {self.size} bytes")
            position += 8 + unpack(buffer, position)[0]
        if position > self.size:
            raise self.fail(f"the last string of {key!r} ends at offset {position}, beyond the file's {self.size} bytes")
        self.position = position

    def alignment(self, metadata: GgufMetadata) -> int:
        value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value & (value - 1) or value >= 1 << 32:
            raise self.fail(f"general.alignment must be a power of two below 2^32, not {reprlib.repr(value)}")
        return value

    def tensor(self, index: int) -> GgufTensor:
        """One tensor's entry. Its offset still counts from the start of the data."""
        name = self.text(f"the name of tensor {index}", MAX_NAME)
        num_dims = self.u32(f"the number of dimensions of tensor {name!r}")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.fail(f"tensor {name!r} claims {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
        dims = [self.u64(f"dimension {i} of tensor {name!r}") for i in range(num_dims)]
        type_id = self.u32(f"the type of tensor {name!r}")
        offset = self.u64(f"the offset of tensor {name!r}")
        kind = _TYPES.get(type_id)
        if kind is None:
            raise UnsupportedError(f"{self.path}: tensor {name!r} has type number {type_id}, which is not known")
        elements = 1
        for dim in dims:
            if dim == 0:
                raise self.fail(f"tensor {name!r} has a dimension of size 0: {dims}")
            elements *= dim
        if dims[0] % kind.block:
            raise self.fail(f"tensor {name!r} has rows of {dims[0]} elements, not a multiple of {kind.name}'s block of {kind.block}")
        return GgufTensor(name, kind.name, tuple(reversed(dims)), offset, elements // kind.block * kind.nbytes)

    def place(self, infos: list[GgufTensor], start: int, alignment: int) -> dict[str, GgufTensor]:
        """Check where the tensors lie, and give them offsets that count from the file's start."""
        tensors: dict[str, GgufTensor] = {}
        for t in infos:
            if t.name in tensors:
                raise self.fail(f"the tensor {t.name!r} appears twice")
            if t.offset % alignment:
                raise self.fail(f"tensor {t.name!r} lies at offset {t.offset} of the data, not a multiple of the alignment {alignment}")
            end = start + t.offset + t.nbytes
            if end > self.size:
                raise self.fail(
                    f"tensor {t.name!r} ({t.type}, {list(t.shape)}) ends at byte {end}, but the file has {self.size}: truncated or damaged"
                )
            tensors[t.name] = GgufTensor(t.name, t.type, t.shape, start + t.offset, t.nbytes)
        before = None
        for t in sorted(tensors.values(), key=lambda t: t.offset):
            if before is not None and before.offset + before.nbytes > t.offset:
                end = before.offset + before.nbytes
                raise self.fail(f"tensors {before.name!r} (bytes {before.offset} to {end}) and {t.name!r} (from byte {t.offset}) overlap")
            before = t
        return tensors


def _boolean(path: Path, what: str, value: int) -> bool:
    if value > 1:
        raise CheckpointError(f"{path}: {what} is a boolean of value {value}; 0 and 1 are possible")
    return bool(value)
