"""Packed weights as one piece of memory that can lie in a file: handles with their places counted from its start.

A handle is a dataclass of numbers, strings, tuples, other handles, numpy arrays, and places: a field named ``address`` is where bytes lie
that the provider packed. An image has the bytes of all places and arrays, one after another, and a description of the handles as JSON.
"""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

PAGE = 4096


@dataclass(frozen=True, slots=True)
class Image:
    """``pieces`` follow one another, each from a multiple of PAGE on; ``handles`` describes what they are."""

    handles: dict[str, Any]
    pieces: list[np.ndarray]  # uint8
    nbytes: int


def take(handles: Mapping[str, Any], places: Sequence[tuple[int, int]], view: Any) -> Image:
    """An image of handles. ``places``: (address, bytes) of all that was packed; ``view(address, bytes)`` gives such bytes as uint8."""
    offsets: dict[int, int] = {}
    pieces, end = [], 0
    for address, nbytes in sorted(places):
        offsets[address] = end
        pieces.append(view(address, nbytes))
        end = _aligned(end + nbytes)
    starts = sorted(offsets)

    def add(array: np.ndarray) -> int:
        nonlocal end
        place = end
        pieces.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        end = _aligned(end + array.nbytes)
        return place

    def describe(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return {"array": add(value), "dtype": value.dtype.str, "shape": list(value.shape)}
        if is_dataclass(value):
            found = {field.name: describe(getattr(value, field.name)) for field in fields(value) if field.name != "address"}
            if any(field.name == "address" for field in fields(value)):
                address = value.address  # type: ignore[attr-defined]
                start = starts[bisect.bisect_right(starts, address) - 1]
                found["address"] = offsets[start] + address - start
            return {"handle": type(value).__name__, "fields": found}
        if isinstance(value, tuple):
            return {"tuple": [describe(each) for each in value]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"a handle holds {type(value).__name__}, which an image cannot")

    return Image({target: describe(handle) for target, handle in handles.items()}, pieces, end)


def rebuild(handles: Mapping[str, Any], kinds: Mapping[str, type], memory: np.ndarray, base: int) -> Iterator[tuple[str, Any]]:
    """The handles that an image describes, over ``memory`` (its bytes, uint8, at address ``base``). ``kinds``: handle classes by name.

    Raises: KeyError, TypeError, ValueError for a description that fits neither.
    """

    def make(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "tuple" in value:
            return tuple(make(each) for each in value["tuple"])
        if "array" in value:
            dtype, shape = np.dtype(value["dtype"]), value["shape"]
            nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            return memory[_inside(value["array"], nbytes) :][:nbytes].view(dtype).reshape(shape)
        found = {name: make(each) for name, each in value["fields"].items()}
        if "address" in found:
            found["address"] = base + _inside(found["address"], 1)
        return kinds[value["handle"]](**found)

    def _inside(offset: int, nbytes: int) -> int:
        if not 0 <= offset <= memory.nbytes - nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} are outside an image of {memory.nbytes}")
        return offset

    for target, description in handles.items():
        yield target, make(description)


def _aligned(n: int) -> int:
    return -(-n // PAGE) * PAGE
