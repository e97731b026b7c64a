"""Small GGUF and safetensors files, right ones and lying ones, written byte by byte."""

import json
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

CODES = {"u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"), "bool": (7, "B"),
         "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d")}  # fmt: skip


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def item(kind: str, value: Any) -> bytes:
    return text(value) if kind == "str" else struct.pack("<" + CODES[kind][1], value)


def key(name: str | bytes, kind: str, value: Any) -> bytes:
    """One metadata entry; kind "u32" and so on, "[u32]" for an array."""
    if kind.startswith("["):
        inner = kind[1:-1]
        number = 8 if inner == "str" else CODES[inner][0]
        return text(name) + struct.pack("<IIQ", 9, number, len(value)) + b"".join(item(inner, v) for v in value)
    return text(name) + struct.pack("<I", 8 if kind == "str" else CODES[kind][0]) + item(kind, value)


def info(name: str | bytes, dims: list[int], kind: int, offset: int) -> bytes:
    """One tensor entry; dims in GGUF's order, fastest first."""
    return text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def whole(keys: list[bytes], infos: list[bytes], data: bytes, *, version: int = 3, align: int = 32, counts: tuple[int, int] | None = None) -> bytes:
    """A file. ``counts`` overrides the numbers of tensors and keys in the header."""
    tensors, entries = counts or (len(infos), len(keys))
    front = b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + b"".join(keys) + b"".join(infos)
    return front + bytes(-len(front) % align) + data


def sample() -> bytes:
    """A file with every kind of value and a few tensors, whose last byte belongs to a tensor."""
    keys = [key(f"x.{kind}", kind, 1) for kind in CODES] + [key(f"y.{kind}", f"[{kind}]", [0, 1, 1]) for kind in CODES]
    keys += [key("s", "str", "grüße"), key("t", "[str]", ["", "a", "日本"]), key("empty", "[str]", []), key("general.alignment", "u32", 64)]
    infos = [info("a.weight", [4, 2], 0, 0), info("b.weight", [32, 2], 3, 64), info("c.bias", [3], 30, 128)]
    data = np.arange(8, dtype=np.float32).tobytes() + bytes(32) + bytes(range(40)) + bytes(24) + bytes(range(6))
    return whole(keys, infos, data, align=64)


def safe(header: Any, data: bytes, length: int | None = None) -> bytes:
    """A safetensors file. ``header``: an object, or raw bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    return SimpleNamespace(text=text, key=key, info=info, whole=whole, sample=sample, safe=safe, codes=CODES)


@pytest.fixture(scope="session")
def put(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], Any]:
    """Write bytes to a scratch file and give its path."""
    path = tmp_path_factory.mktemp("files") / "file"

    def write(data: bytes) -> Any:
        path.unlink(missing_ok=True)  # an earlier map of it stays whole
        path.write_bytes(data)
        return path

    return write
