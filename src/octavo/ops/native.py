"""The native CPU provider: packs weights into kernel order, holds the KV blocks, compiles models (ops/recorder.py)."""

import contextlib
import functools
import hashlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from octavo.config import BLOCK_SIZE, KV_BITS
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.ops.image import Image, rebuild, take
from octavo.ops.recorder import Matrix, NativeProgram, Panels, Recorder, Vector, address_of, pad
from octavo.ops.table import Stored
from octavo.ops.threads import allowed_threads

ISA_VARIABLE = "OCTAVO_ISA"
EMULATED = "amx_emulated"  # matrix units in software, for tests: never chosen by itself
HANDLES = {kind.__name__: kind for kind in (Matrix, Panels, Vector)}  # of weights
SLAB_BYTES = 64 << 20  # weights are laid into slabs of huge pages
COMMIT_AFTER = 1.0  # seconds
COMMITTED = 192 << 20  # bytes of the KV blocks that get their pages at once, in the background
STRIDE = 2 << 20  # so many at a time: a huge page
COMMIT_PAUSE = 0.01  # seconds between two
MAX_K = 1 << 17  # native/include/layouts.h
PACKING = 3  # raise it whenever the bytes of packed weights, or what their handles say, change for the same weights
QUANTIZATIONS = {"int8": "int8", "int4": "Q4_1", "int4_g128": "int4_g128", "gguf": "act"}  # → the layout of matrices that come as numbers
KINDS = {np.uint16: 0, np.float32: 1, np.uint8: 2}  # of a part's rows: bfloat16 bits, float32, a file's blocks


def native_info() -> dict[str, str]:
    """The best instruction-set variant of this CPU, the available ones (comma separated, from the plainest on), the compiler."""
    from octavo import _native

    return dict(_native.info())


def chosen_isa(isa: str | None = None) -> str:
    """The variant that runs: ``isa``, else the environment variable OCTAVO_ISA, else the best. Raises: ConfigError."""
    info = native_info()
    available = info["available"].split(",")
    isa = isa or os.environ.get(ISA_VARIABLE) or info["variant"]
    if isa not in available and isa != EMULATED:
        raise ConfigError(f"the instruction set {isa!r} ({ISA_VARIABLE}) cannot run here; this CPU and build have {', '.join(available)}", "isa")
    return isa


class NativeKvStore:
    """Memory of the KV blocks: [block][layer][kv head][K, V, scales], in huge pages (native/kernels/kv.h).

    The system gives out pages when they are first touched, cleared, which takes longer than filling them with K and V. So the provider has the
    first ones (blocks are given to sequences in that order) made ready in the background; the others come as they are used.
    """

    def __init__(self, memory: Any, kv_spec: Any, num_blocks: int) -> None:
        self.memory = memory
        self.spec = kv_spec
        self.num_blocks = num_blocks
        self.block_bytes: int = kv_spec.bytes_per_block

    @property
    def blocks(self) -> np.ndarray:
        """The bytes, [num_blocks, block_bytes] uint8: to copy, swap or inspect blocks."""
        return np.frombuffer(self.memory, np.uint8).reshape(self.num_blocks, self.block_bytes)

    def copy_block(self, source: int, target: int) -> None:
        """K and V of all layers: a block is one contiguous piece."""
        blocks = self.blocks
        blocks[target] = blocks[source]

    def read_block(self, block: int) -> memoryview:
        """The block itself."""
        return self.blocks[block].data

    def write_block(self, block: int, data: memoryview) -> None:
        """Fill a block."""
        self.blocks[block] = data


def _commit(store: "weakref.ref[NativeKvStore]", gone: threading.Event) -> None:
    """Pages for a store's first bytes, when a first answer is likely to be out, a little at a time. Not at a lower priority: sent off its core while
    it has Python's lock, the thread would keep everybody waiting (docs/log.md)."""
    start, pause = 0, COMMIT_AFTER
    while not gone.wait(pause) and (kept := store()) is not None:  # held for one stride at a time
        size = min(STRIDE, min(COMMITTED, kept.memory.nbytes) - start)
        if size <= 0 or not kept.memory.commit(start, size):
            return  # done, or an older system, or no memory is left: pages then come when they are touched, as the rest does
        start, pause = start + size, COMMIT_PAUSE
        del kept


class NativeProvider:
    """Weights in kernel order, and programs over them.

    ``quantization`` says what becomes of matrices: None (the compute dtype), "int8", "int4" (steps of 32), "int4_g128", or
    "gguf" (those that come as ``Stored`` keep their type). Tables and heads are int8 where matrices are int4. ``isa`` (else
    the environment variable OCTAVO_ISA, else the best there is) picks the instruction-set variant; all of them give the same
    bits. Raises: ConfigError for a dtype, a thread count, a variant or a quantization that cannot be.
    """

    def __init__(
        self, dtype: str = "bfloat16", num_threads: int | None = None, isa: str | None = None, quantization: str | None = None
    ) -> None:
        from octavo import _native

        if quantization is not None and quantization not in QUANTIZATIONS:
            raise ConfigError(f"quantization must be None or one of {', '.join(QUANTIZATIONS)}, not {quantization!r}", "quantization")
        if dtype not in ("bfloat16", "float32"):
            raise ConfigError(f"dtype must be bfloat16 or float32, not {dtype!r}", "dtype")
        allowed = allowed_threads()
        threads = allowed if num_threads is None else num_threads
        if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 1024:
            raise ConfigError(f"num_threads must be a whole number from 1 to 1024, not {num_threads!r}", "num_threads")
        if threads > allowed:
            warnings.warn(f"num_threads is {threads}, but this process may use {allowed} CPUs: threads will wait for each other", stacklevel=2)
        self.dtype = dtype
        self.act_bytes = 4 if dtype == "float32" else 2
        self.pool = _native.Pool(threads, chosen_isa(isa))
        self.quantization = quantization
        self.weight_bytes = 0
        self.layouts = {layout[0]: (number, layout[-1]) for number, layout in enumerate(_native.layouts())}  # number, block of a stored type
        self.bits = [layout[1] for layout in _native.layouts()]  # of a layout's codes, by its number; 0: numbers
        self.layout_bytes = _native.layout_bytes
        self.packed: dict[str, tuple[int, int, int]] = {}  # by layout: matrices, weights, bytes
        self.new_memory = _native.Memory
        self.new_program = _native.Program
        self._slabs: list[Any] = []
        self._maps: list[np.ndarray] = []  # adopted images
        self._room: tuple[int, int] = (0, 0)  # next free address of the current slab, bytes left
        self._places: list[tuple[int, int]] = []  # (address, bytes) of all that was packed

    @property
    def num_threads(self) -> int:
        """Threads, the caller included."""
        return int(self.pool.threads)

    @property
    def isa(self) -> str:
        """The instruction-set variant in use."""
        return str(self.pool.variant)

    def keeps(self, types: Sequence[str], shapes: Sequence[tuple[int, ...]], interleave: bool) -> bool:
        """See Provider: whether every part's type has a layout here, and parts of several types fall on whole panels."""
        if self.quantization != "gguf" or any(len(shape) != 2 for shape in shapes):
            return False
        blocks = [self.layouts.get(kind, (0, 0))[1] for kind in types]
        if any(block == 0 or shape[1] % block for block, shape in zip(blocks, shapes)):
            return False
        return len(set(types)) == 1 or (not interleave and all(shape[0] % 16 == 0 for shape in shapes[:-1]))

    def linear(self, parts: Sequence[Any], *, interleave: bool = False) -> Matrix:
        """Pack a matrix [N, K] from parts stacked along N: float32, uint16 with bfloat16 bits, or all of them Stored.

        Raises: CheckpointError if the parts do not fit together, or hold numbers that the quantization cannot.
        """
        return self._pack(parts, interleave, QUANTIZATIONS.get(self.quantization or "", "act"))

    def table(self, table: Any) -> Matrix:
        """An embedding table [V, d]: the same packed form, read row by row by embed, and as the tied head's matrix."""
        layout = QUANTIZATIONS.get(self.quantization or "", "act")
        return self._pack([table], False, "act" if layout == "act" else "int8")

    def summary(self) -> str:
        """What the matrices became, for people: "int8 212 matrices (134.5 M weights of 8.1 bits)"."""
        return ", ".join(
            f"{self.dtype if name == 'act' else name} {count} matrices ({weights / 1e6:.1f} M weights of {nbytes * 8 / weights:.2f} bits)"
            for name, (count, weights, nbytes) in self.packed.items()
        )

    def _pack(self, parts: Sequence[Any], interleave: bool, layout: str) -> Matrix:
        if not parts:
            raise CheckpointError("a linear layer needs at least one part")
        shapes = [part.shape if isinstance(part, Stored) else _matrix_part(part).shape for part in parts]
        k = shapes[0][1]
        if any(shape[1] != k for shape in shapes):
            raise CheckpointError(f"parts of one matrix have different inner sizes: {shapes}")
        if interleave and (len(parts) != 2 or shapes[0] != shapes[1]):
            raise CheckpointError(f"gate and up must be two matrices of one shape, not {shapes}")
        n = sum(shape[0] for shape in shapes)
        panels = pad(n // 2) // 8 if interleave else pad(n) // 16
        pieces: list[Panels] = []
        for name, group in groupby(parts, lambda part: part.type if isinstance(part, Stored) else layout):
            first = pieces[-1].first + pieces[-1].count if pieces else 0
            held = list(group)
            rows = sum(part.shape[0] for part in held)
            last = first * 16 + rows == n
            pieces.append(self._pack_piece(held, name, k, first, panels - first if last or interleave else rows // 16, interleave))
        return Matrix(n, k, tuple(pieces), interleave)

    def _pack_piece(self, parts: list[Any], layout: str, k: int, first: int, count: int, interleave: bool) -> Panels:
        """Parts that become one layout. The bytes are a function of the parts, the layout and the compute dtype alone."""
        number = self.layouts[layout][0]
        if layout == "int8" and k > MAX_K:
            raise UnsupportedError(f"int8 takes matrices of up to {MAX_K} inputs, not {k}", "quantization")
        nbytes = count * (self.layout_bytes(number, pad(k))[0] if number else 16 * pad(k) * self.act_bytes)
        address = self._room_for(nbytes)
        held = [np.ascontiguousarray(part.raw) if isinstance(part, Stored) else _matrix_part(part) for part in parts]
        described = tuple((address_of(a), a.shape[0], a.strides[0], KINDS[a.dtype.type]) for a in held)
        if not self.pool.pack(address, number, count, k, pad(k), self.dtype == "float32", interleave, described):
            raise CheckpointError(f"a matrix holds numbers that {layout} cannot: infinite, NaN, or beyond its scales; another quantization may")
        self._count(layout, 1, sum(a.shape[0] for a in held) * k, nbytes)
        return Panels(address, count, nbytes, number, first)

    def _count(self, layout: str, matrices: int, weights: int, nbytes: int) -> None:
        found = self.packed.get(layout, (0, 0, 0))
        self.packed[layout] = (found[0] + matrices, found[1] + weights, found[2] + nbytes)

    def vector(self, parts: Sequence[Any]) -> Vector:
        """A norm weight or a bias from parts joined, in float32. Raises: CheckpointError if a part is no vector."""
        arrays = [_host(part) for part in parts]
        if not arrays or any(a.ndim != 1 for a in arrays):
            raise CheckpointError(f"a vector needs parts of one dimension, not {[a.shape for a in arrays]}")
        joined = np.concatenate([_to_f32(a) for a in arrays])
        data = np.zeros(pad(joined.size), np.float32)
        data[: joined.size] = joined
        self.weight_bytes += data.nbytes
        return Vector(data, joined.size)

    @property
    def packing(self) -> str:
        """All that decides, besides the weights, what their packed bytes and handles are."""
        return f"native packing {PACKING}, {self.dtype}, {self.quantization}, library {_library_hash()}"

    def image(self, handles: Mapping[str, Any]) -> tuple[Image, dict[str, Any]]:
        """All that was packed so far as one piece of memory, and what else ``adopt`` has to know."""
        return take(handles, self._places, self._view), {"weight_bytes": self.weight_bytes, "packed": self.packed}

    def adopt(self, description: Mapping[str, Any], memory: np.ndarray) -> dict[str, Any]:
        """The handles of an image that a provider of the same ``packing`` made; ``memory`` is kept. Raises: as image.rebuild does."""
        handles = dict(rebuild(description["handles"], HANDLES, memory, address_of(memory)))
        self._maps.append(memory)
        self.weight_bytes += description["weight_bytes"]
        for layout, counts in description["packed"].items():
            self._count(layout, *counts)
        return handles

    def checksum(self, data: np.ndarray) -> int:
        """Of an array's bytes, at memory speed: finds damage."""
        return int(self.pool.checksum(address_of(data), data.nbytes))

    def _view(self, address: int, nbytes: int) -> np.ndarray:
        slab = next(slab for slab in self._slabs if slab.address <= address < slab.address + slab.nbytes)
        return np.frombuffer(slab, np.uint8)[address - slab.address :][:nbytes]

    def kv_store(self, kv_spec: Any, num_blocks: int) -> NativeKvStore:
        """Memory for the blocks. Raises: ConfigError for sizes that cannot be, UnsupportedError for other block sizes."""
        if kv_spec.block_size != BLOCK_SIZE:
            raise UnsupportedError(f"the native backend has KV blocks of {BLOCK_SIZE} tokens, not {kv_spec.block_size}", "block_size")
        if kv_spec.dtype not in KV_BITS or (kv_spec.dtype == "float32" and self.dtype != "float32"):
            raise UnsupportedError(f"a KV cache of {kv_spec.dtype} is not served with the compute dtype {self.dtype}", "kv_cache_dtype")
        if num_blocks < 1:
            raise ConfigError(f"num_kv_blocks must be at least 1, not {num_blocks}", "num_kv_blocks")
        try:
            memory = self.new_memory(num_blocks * kv_spec.bytes_per_block, True)
        except MemoryError:
            raise ConfigError(
                f"{num_blocks} KV blocks of {kv_spec.bytes_per_block} bytes ({num_blocks * kv_spec.bytes_per_block / 2**30:.1f} GiB) do not fit the "
                "address space: ask for fewer blocks",
                "num_kv_blocks",
            ) from None
        store, gone = NativeKvStore(memory, kv_spec, num_blocks), threading.Event()
        weakref.finalize(store, gone.set)
        with contextlib.suppress(RuntimeError):  # no room for a thread: pages come when they are touched, as all behind the first ones do
            threading.Thread(target=_commit, args=(weakref.ref(store), gone), daemon=True, name="kv-pages").start()
        return store

    def compile(
        self, model: Callable[..., Any], weights: Any, spec: Any, *, step: Mapping[str, Any], slots: Any, kv: NativeKvStore
    ) -> "NativeProgram":
        """Record ``model`` once over these arrays and blocks. Raises: ConfigError for arrays or sizes that do not fit."""
        arrays = slots.arrays if hasattr(slots, "arrays") else slots
        recorder = Recorder(self, spec, step, arrays, kv)
        model(recorder, weights, spec)
        return recorder.finish()

    def _room_for(self, nbytes: int) -> int:
        nbytes = pad(nbytes, 4096)
        address, left = self._room
        if nbytes > left:
            slab = self.new_memory(max(nbytes, SLAB_BYTES), True)
            self._slabs.append(slab)
            address, left = slab.address, slab.nbytes
        self._room = (address + nbytes, left - nbytes)
        self._places.append((address, nbytes))
        self.weight_bytes += nbytes
        return address


@functools.cache
def _library_hash() -> str:
    """Of the library's file: another build may pack in another way, though nobody raised PACKING."""
    from octavo import _native

    with open(_native.__file__, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _host(part: Any) -> np.ndarray:
    array = np.asarray(part)
    if array.dtype not in (np.float32, np.uint16):
        raise CheckpointError(f"weights must be float32, or uint16 with bfloat16 bits, not {array.dtype}")
    return np.ascontiguousarray(array)


def _matrix_part(part: Any) -> np.ndarray:
    array = _host(part)
    if array.ndim != 2 or 0 in array.shape:
        raise CheckpointError(f"a matrix has two dimensions, none of them 0; this part is {array.shape}")
    return array


def _to_f32(array: np.ndarray) -> np.ndarray:
    return array if array.dtype == np.float32 else (array.astype(np.uint32) << 16).view(np.float32)
