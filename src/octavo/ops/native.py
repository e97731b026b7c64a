"""The native CPU provider: packs weights into kernel order, records a model into a flat program, replays it.

Legend as in ops/table.py; "p" behind a size means padded to a multiple of 32. Every buffer has rows of a padded width,
whose padding holds zeros. Recording resolves handles to addresses inside one arena (buffers whose lives do not overlap
share memory); native/include/octavo.h has the layout of an op, and each kernel says what its fields mean.
"""

import os
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.config import BLOCK_SIZE
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.ops.table import SLOT_FIELDS, STEP_FIELDS
from octavo.ops.threads import allowed_threads

ISA_VARIABLE = "OCTAVO_ISA"
MAX_HEAD_DIM = 512
SAMPLE_ROWS = 64
SLAB_BYTES = 64 << 20  # weights are laid into slabs of huge pages
_OP = struct.Struct("<2i10Q12i4f")
_EMBED, _NORM, _LINEAR, _ROPE_TABLE, _ROPE_STORE, _ATTENTION, _TAKE_ROWS, _SAMPLE = range(8)
_STORE, _RESIDUAL, _SILU_MUL = range(3)
_ROWS = {"T": 0, "R": 1, "tile": 2}
_F32, _FUSED = 1, 2


def _pad(n: int, to: int = 32) -> int:
    return -(-n // to) * to


def native_info() -> dict[str, str]:
    """The best instruction-set variant of this CPU, the available ones (comma separated, best last), the compiler."""
    from octavo import _native

    return dict(_native.info())


def chosen_isa(isa: str | None = None) -> str:
    """The variant that runs: ``isa``, else the environment variable OCTAVO_ISA, else the best. Raises: ConfigError."""
    available = native_info()["available"].split(",")
    isa = isa or os.environ.get(ISA_VARIABLE) or available[-1]
    if isa not in available:
        raise ConfigError(f"the instruction set {isa!r} ({ISA_VARIABLE}) cannot run here; this CPU and build have {', '.join(available)}", "isa")
    return isa


@dataclass(frozen=True, slots=True)
class Matrix:
    """A packed matrix [n, k]: panels of 16 rows of it at ``address``. ``interleaved``: gate and up in turns."""

    address: int
    n: int
    k: int
    panels: int
    interleaved: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """A float32 vector of n values, padded with zeros."""

    data: np.ndarray
    n: int

    @property
    def address(self) -> int:
        """Where the values lie."""
        return _address(self.data)


@dataclass(slots=True, eq=False)
class Buffer:
    """A handle: activations [rows, cols], rows symbolic. ``kind``: f32, or act."""

    kind: str
    rows: str  # T | R | tile
    cols: int
    row_bytes: int
    address: int = 0
    first: int = 0  # index of the op that writes it, and of the last one that reads it
    last: int = 0
    same: "Buffer | None" = None  # shares its memory: written in place
    norm: tuple["Buffer", Vector, float] | None = None  # what made it, if a norm did: a linear op may do it again


@dataclass(slots=True)
class _Recorded:
    code: int
    flags: int
    operands: list[Any]  # Buffer, address, or None
    numbers: list[int]
    floats: list[float] = field(default_factory=list)


class NativeKvStore:
    """Memory of the KV blocks: [block][layer][kv head][K, V], committed when first touched."""

    def __init__(self, memory: Any, kv_spec: Any, num_blocks: int) -> None:
        self.memory = memory
        self.spec = kv_spec
        self.num_blocks = num_blocks
        self.block_bytes: int = kv_spec.bytes_per_block

    @property
    def blocks(self) -> np.ndarray:
        """The bytes, [num_blocks, block_bytes] uint8: to copy, swap or inspect blocks."""
        return np.frombuffer(self.memory, np.uint8).reshape(self.num_blocks, self.block_bytes)


class NativeProvider:
    """Weights in kernel order, and programs over them.

    ``isa`` (else the environment variable OCTAVO_ISA, else the best there is) picks the instruction-set variant; all of
    them give the same bits. Raises: ConfigError for a dtype, a thread count or a variant that cannot be.
    """

    def __init__(self, dtype: str = "bfloat16", num_threads: int | None = None, isa: str | None = None) -> None:
        from octavo import _native

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
        self.weight_bytes = 0
        self._memory = _native.Memory
        self._program = _native.Program
        self._slabs: list[Any] = []
        self._room: tuple[int, int] = (0, 0)  # next free address of the current slab, bytes left

    @property
    def num_threads(self) -> int:
        """Threads, the caller included."""
        return int(self.pool.threads)

    @property
    def isa(self) -> str:
        """The instruction-set variant in use."""
        return str(self.pool.variant)

    def linear(self, parts: Sequence[Any], *, interleave: bool = False) -> Matrix:
        """Pack a matrix [N, K] from parts stacked along N (float32, or uint16 with bfloat16 bits).

        Raises: CheckpointError if the parts do not fit together.
        """
        arrays = [_matrix_part(part) for part in parts]
        if not arrays:
            raise CheckpointError("a linear layer needs at least one part")
        k = arrays[0].shape[1]
        if any(a.shape[1] != k for a in arrays):
            raise CheckpointError(f"parts of one matrix have different inner sizes: {[a.shape for a in arrays]}")
        if interleave and (len(arrays) != 2 or arrays[0].shape != arrays[1].shape):
            raise CheckpointError(f"gate and up must be two matrices of one shape, not {[a.shape for a in arrays]}")
        n = sum(a.shape[0] for a in arrays)
        panels = _pad(n // 2) // 8 if interleave else _pad(n) // 16
        address = self._room_for(panels * 16 * _pad(k) * self.act_bytes)
        described = tuple((_address(a), a.shape[0], a.dtype == np.float32) for a in arrays)
        self.pool.pack(address, panels, k, _pad(k), self.dtype == "float32", interleave, described)
        return Matrix(address, n, k, panels, interleave)

    def table(self, table: Any) -> Matrix:
        """An embedding table [V, d]: the same packed form, read row by row by embed, and as the tied head's matrix."""
        return self.linear([table])

    def vector(self, parts: Sequence[Any]) -> Vector:
        """A norm weight or a bias from parts joined, in float32. Raises: CheckpointError if a part is no vector."""
        arrays = [_host(part) for part in parts]
        if not arrays or any(a.ndim != 1 for a in arrays):
            raise CheckpointError(f"a vector needs parts of one dimension, not {[a.shape for a in arrays]}")
        joined = np.concatenate([_to_f32(a) for a in arrays])
        data = np.zeros(_pad(joined.size), np.float32)
        data[: joined.size] = joined
        self.weight_bytes += data.nbytes
        return Vector(data, joined.size)

    def kv_store(self, kv_spec: Any, num_blocks: int) -> NativeKvStore:
        """Memory for the blocks. Raises: ConfigError for sizes that cannot be, UnsupportedError for other block sizes."""
        if kv_spec.block_size != BLOCK_SIZE:
            raise UnsupportedError(f"the native backend has KV blocks of {BLOCK_SIZE} tokens, not {kv_spec.block_size}", "block_size")
        if kv_spec.dtype != self.dtype:
            raise UnsupportedError(f"the KV cache has the compute dtype here: {self.dtype}, not {kv_spec.dtype}", "kv_cache_dtype")
        if num_blocks < 1:
            raise ConfigError(f"num_kv_blocks must be at least 1, not {num_blocks}", "num_kv_blocks")
        try:
            memory = self._memory(num_blocks * kv_spec.bytes_per_block)
        except MemoryError:
            raise ConfigError(
                f"{num_blocks} KV blocks of {kv_spec.bytes_per_block} bytes ({num_blocks * kv_spec.bytes_per_block / 2**30:.1f} GiB) do not fit the "
                "address space: ask for fewer blocks",
                "num_kv_blocks",
            ) from None
        return NativeKvStore(memory, kv_spec, num_blocks)

    def compile(
        self, model: Callable[..., Any], weights: Any, spec: Any, *, step: Mapping[str, Any], slots: Any, kv: NativeKvStore
    ) -> "NativeProgram":
        """Record ``model`` once over these arrays and blocks. Raises: ConfigError for arrays or sizes that do not fit."""
        arrays = slots.arrays if hasattr(slots, "arrays") else slots
        recorder = Recorder(self, spec, step, arrays, kv)
        model(recorder, weights, spec)
        return recorder.finish()

    def _room_for(self, nbytes: int) -> int:
        nbytes = _pad(nbytes, 4096)
        address, left = self._room
        if nbytes > left:
            slab = self._memory(max(nbytes, SLAB_BYTES), True)
            self._slabs.append(slab)
            address, left = slab.address, slab.nbytes
        self._room = (address + nbytes, left - nbytes)
        self.weight_bytes += nbytes
        return address


class Recorder:
    """The Ops object of the native backend: every call appends an op; ``finish`` gives the program."""

    def __init__(self, provider: NativeProvider, spec: Any, step: Mapping[str, Any], slots: Mapping[str, Any], kv: NativeKvStore) -> None:
        self.provider = provider
        self.spec = spec
        self.kv = kv
        self.step = {name: _checked(step, name, dtype, len(dims)) for name, (dtype, dims) in STEP_FIELDS.items()}
        self.slots = {name: _checked(slots, name, dtype, len(dims)) for name, (dtype, dims) in SLOT_FIELDS.items()}
        self.capacity = {"T": self.step["tokens"].shape[0], "R": self.step["rows"].shape[0], "tile": SAMPLE_ROWS}
        self.max_seqs = self.step["seq_slot"].shape[0]
        if self.step["q_start"].shape[0] != self.max_seqs + 1:
            raise ConfigError(f"q_start has {self.step['q_start'].shape[0]} entries, it needs {self.max_seqs + 1}")
        for name in ("positions", "kv_slots"):
            self._length(name, self.step[name], self.capacity["T"])
        for name in ("row_slot", "row_pos", "row_target", "row_top", "out_token", "out_logprob", "out_rank", "top_ids", "top_logprobs"):
            self._length(name, self.step[name], self.capacity["R"])
        for name, array in self.slots.items():
            self._length(name, array, self.slots["block_table"].shape[0])
        self._flag = _F32 if provider.dtype == "float32" else 0
        self._buffers: list[Buffer] = []
        self._forward: list[_Recorded] = []
        self._sample: list[_Recorded] = []
        self._keep: list[Any] = []
        self._ropes: dict[Any, Buffer] = {}
        self._vocab = 0
        self._group = 0

    # The ops: ops/table.py says what they mean.

    def embed(self, table: Matrix) -> Buffer:
        """See Ops."""
        self._vocab = max(self._vocab, table.n)
        self._embed_rows = table.n
        out = self._buffer("f32", "T", table.k)
        self._emit(_EMBED, [_address(self.step["tokens"]), table.address, out], ["T", _pad(table.k), _pad(table.k)], out=out)
        return out

    def norm(self, x: Buffer, weight: Vector, eps: float) -> Buffer:
        """See Ops."""
        self._expect(x, "f32", weight.n, "norm")
        out = self._buffer("act", x.rows, x.cols)
        out.norm = (x, weight, eps)
        self._emit(_NORM, [x, weight.address, out], [x.rows, x.cols, _pad(x.cols)], [eps], out=out)
        self._keep.append(weight.data)
        return out

    def linear(
        self, x: Buffer, weight: Matrix, *, bias: Vector | None = None, act: str | None = None, residual: Buffer | None = None
    ) -> Buffer:
        """See Ops."""
        self._expect(x, "act", weight.k, "linear")
        if act not in (None, "silu_mul"):
            raise UnsupportedError(f"linear has no activation {act!r}; there is silu_mul")
        gated = act == "silu_mul"
        if gated != weight.interleaved:
            raise ConfigError("silu_mul needs a matrix made with interleave=True, and only that")
        if gated and residual is not None:
            raise UnsupportedError("linear cannot have both silu_mul and a residual")
        cols = weight.n // 2 if gated else weight.n
        bias_address = 0
        if bias is not None:
            if bias.n != weight.n:
                raise CheckpointError(f"a bias of {bias.n} values for a matrix of {weight.n} rows")
            data = _interleave_bias(bias, cols) if gated else bias.data
            bias_address = _address(data)
            self._keep.append(data)
        if residual is not None:
            self._expect(residual, "f32", cols, "linear's residual")
            if residual.rows != x.rows:
                raise ConfigError("linear's residual has other rows than its input")
        out = self._buffer("act" if gated else "f32", x.rows, cols)
        out.same = residual
        epilogue = _SILU_MUL if gated else _RESIDUAL if residual is not None else _STORE
        self._emit(
            _LINEAR,
            [x, weight.address, bias_address, residual, out],
            [x.rows, _pad(x.cols), weight.panels, epilogue, _pad(cols)],
            out=out,
        )
        return out

    def rope_store(self, qkv: Buffer, layer: int, rope: Any) -> Buffer:
        """See Ops."""
        s = self.spec
        heads, groups, dim = s.num_heads, s.num_kv_heads, s.head_dim
        self._expect(qkv, "f32", (heads + 2 * groups) * dim, "rope_store")
        self._check_attention(layer)
        out = self._buffer("act", "T", heads * dim)
        self._emit(
            _ROPE_STORE,
            [qkv, self._rope_table(rope), out, _address(self.step["kv_slots"])],
            ["T", _pad(qkv.cols), _pad(out.cols), heads, groups, dim, self.kv.spec.head_pad, self._layer_offset(layer)],
            out=out,
        )
        return out

    def attention(self, q: Buffer, layer: int, window: int | None) -> Buffer:
        """See Ops."""
        s = self.spec
        self._expect(q, "act", s.num_heads * s.head_dim, "attention")
        self._check_attention(layer)
        if window is not None and window < 1:
            raise ConfigError(f"a sliding window has at least 1 token, not {window}")
        out = self._buffer("act", "T", q.cols)
        numbers = ["T", _pad(q.cols), s.num_heads, s.num_kv_heads, s.head_dim, self.kv.spec.head_pad, self._layer_offset(layer), min(window or 0, 2**31 - 1)]
        self._emit(_ATTENTION, [q, out], numbers, [float(np.float32(1) / np.sqrt(np.float32(s.head_dim)))], out=out)
        self._group = s.num_heads // s.num_kv_heads
        return out

    def take_rows(self, x: Buffer) -> Buffer:
        """See Ops."""
        self._expect(x, "f32", x.cols, "take_rows")
        out = self._buffer("f32", "R", x.cols)
        self._emit(_TAKE_ROWS, [x, _address(self.step["rows"]), out], ["R", _pad(x.cols)], out=out)
        return out

    def head(self, x: Buffer, weight: Matrix) -> None:
        """See Ops."""
        self._expect(x, "act", weight.k, "head")
        if x.rows != "R":
            raise ConfigError("head works on the rows of take_rows")
        if weight.n != getattr(self, "_embed_rows", weight.n):
            raise CheckpointError(f"the head has {weight.n} rows, the embedding table {self._embed_rows}")
        self._vocab = weight.n
        x.last = 1 << 30  # read by the other segment
        logits = self._buffer("f32", "tile", weight.n)
        logits.last = 1 << 30
        self.logits = logits
        self._sample.append(_Recorded(_LINEAR, self._flag, [x, weight.address, 0, None, logits], ["tile", _pad(weight.k), weight.panels, _STORE, _pad(weight.n)]))
        self._sample.append(_Recorded(_SAMPLE, self._flag, [logits], ["tile", _pad(weight.n)]))

    # From calls to a program.

    def input(self, kind: str, rows: str, cols: int) -> Buffer:
        """A buffer that the caller fills through NativeProgram.view before forward(). For tests of single ops."""
        buffer = self._buffer(kind, rows, cols)
        buffer.last = 1 << 30
        return buffer

    def finish(self, keep: Sequence[Buffer] = ()) -> "NativeProgram":
        """Place the buffers, pack the ops. Buffers in ``keep`` share memory with no later one (tests read them)."""
        for buffer in keep:
            buffer.last = 1 << 30
        self._fuse_norms()
        arena_bytes = self._place()
        arena = self.provider._memory(max(arena_bytes, 64))
        for buffer in self._buffers:
            buffer.address += arena.address
        step, slots = self.step, self.slots
        bounds = struct.pack(
            "<12q",
            self.capacity["T"], slots["block_table"].shape[0], self.capacity["R"], self._vocab, self.kv.num_blocks, self.kv.block_bytes,
            slots["block_table"].shape[1], step["top_ids"].shape[1], self._group, 0, self.kv.memory.address, 0,
        )  # fmt: skip
        if self.max_seqs > slots["block_table"].shape[0]:
            raise ConfigError(f"steps of up to {self.max_seqs} sequences, but slots for {slots['block_table'].shape[0]}")
        keep_alive = [arena, step, slots, self.kv, self._keep, self.provider]
        program = self.provider._program(
            self.provider.pool,
            bounds,
            struct.pack("<17Q", *(_address(step[name]) for name in STEP_FIELDS)),
            struct.pack("<14Q", *(_address(slots[name]) for name in SLOT_FIELDS)),
            b"".join(self._pack(op) for op in self._forward),
            b"".join(self._pack(op) for op in self._sample),
            keep_alive,
        )
        return NativeProgram(program, arena, arena_bytes, np.float32 if self.provider.act_bytes == 4 else np.uint16)

    def _fuse_norms(self) -> None:
        """A norm with one reader, a linear op: with few rows the linear op norms its input itself, in every thread."""
        readers: dict[int, list[int]] = {}
        for index, op in enumerate([*self._forward, *self._sample]):
            for operand in op.operands:
                if isinstance(operand, Buffer):
                    readers.setdefault(id(operand), []).append(index)
        for op in self._forward:
            x = op.operands[0]
            if op.code != _LINEAR or x.norm is None or x.last >= 1 << 30 or len(readers[id(x)]) != 2:
                continue
            source, weight, eps = x.norm
            if self._written_between(source, x):
                continue
            norm_op = next(o for o in self._forward if o.code == _NORM and o.operands[2] is x)
            norm_op.flags |= _FUSED
            op.flags |= _FUSED
            op.operands += [source, weight.address]
            op.numbers.append(x.cols)
            op.floats.append(eps)
            source.last = max(source.last, x.last)

    def _written_between(self, source: Buffer, normed: Buffer) -> bool:
        """Whether ``source`` may be overwritten in place by the time that ``normed`` is read."""
        return any(b.same is source and b.first <= normed.last for b in self._buffers)

    def _place(self) -> int:
        """Addresses inside the arena (first fit over the lives); returns its size in bytes."""
        placed: list[tuple[int, int, Buffer]] = []
        end = 0
        for buffer in sorted(self._buffers, key=lambda b: b.first):
            base = buffer.same
            if base is not None and base.last == buffer.first:  # nobody reads the old values later: in place
                buffer.address = base.address
                placed = [(a, n, buffer if b is base else b) for a, n, b in placed]
                continue
            # 32 spare rows: matrix units read whole tiles
            nbytes = _pad((_pad(self.capacity[buffer.rows]) + 32) * buffer.row_bytes, 4096)
            live = sorted((a, n) for a, n, b in placed if b.last >= buffer.first)
            address = 0
            for a, n in live:
                if address + nbytes <= a:
                    break
                address = max(address, a + n)
            buffer.address = address
            placed.append((address, nbytes, buffer))
            end = max(end, address + nbytes)
        return end

    def _pack(self, op: _Recorded) -> bytes:
        pointers = [operand.address if isinstance(operand, Buffer) else operand or 0 for operand in op.operands]
        numbers = [_ROWS[op.numbers[0]], *op.numbers[1:]]
        return _OP.pack(
            op.code, op.flags, *pointers, *[0] * (10 - len(pointers)), *numbers, *[0] * (12 - len(numbers)), *op.floats, *[0.0] * (4 - len(op.floats))
        )

    def _buffer(self, kind: str, rows: str, cols: int) -> Buffer:
        buffer = Buffer(kind, rows, cols, _pad(cols) * (4 if kind == "f32" else self.provider.act_bytes))
        self._buffers.append(buffer)
        return buffer

    def _emit(self, code: int, operands: list[Any], numbers: list[Any], floats: Sequence[float] = (), *, out: Buffer) -> None:
        index = len(self._forward)
        out.first = out.last = index
        for operand in operands:
            if isinstance(operand, Buffer):
                operand.last = max(operand.last, index)
        self._forward.append(_Recorded(code, self._flag, operands, numbers, list(floats)))

    def _rope_table(self, rope: Any) -> Buffer:
        """Cosines and sines of the step's positions: one op for each distinct rope, before its first use."""
        key = tuple(rope.inv_freq)
        if key not in self._ropes:
            half = self.spec.head_dim // 2
            if len(key) != half:
                raise ConfigError(f"rope has {len(key)} frequencies, a head of {self.spec.head_dim} needs {half}")
            frequencies = np.array(key, np.float32)
            self._keep.append(frequencies)
            out = self._buffer("f32", "T", self.spec.head_dim)
            out.row_bytes = self.spec.head_dim * 4
            self._emit(_ROPE_TABLE, [_address(self.step["positions"]), _address(frequencies), out], ["T", half], out=out)
            self._ropes[key] = out
        return self._ropes[key]

    def _layer_offset(self, layer: int) -> int:
        return layer * self.kv.spec.num_kv_heads * 2 * self.kv.spec.head_pad * BLOCK_SIZE

    def _check_attention(self, layer: int) -> None:
        s, kv = self.spec, self.kv.spec
        if s.head_dim % 2 or not 0 < s.head_dim <= MAX_HEAD_DIM:
            raise UnsupportedError(f"heads of {s.head_dim}: the native kernels take even sizes up to {MAX_HEAD_DIM}")
        if s.num_kv_heads < 1 or s.num_heads % s.num_kv_heads:
            raise ConfigError(f"{s.num_heads} query heads do not divide into {s.num_kv_heads} KV heads")
        if (kv.num_kv_heads, kv.head_dim) != (s.num_kv_heads, s.head_dim) or not 0 <= layer < kv.num_layers:
            raise ConfigError(f"the KV store has {kv.num_layers} layers of {kv.num_kv_heads} × {kv.head_dim}; layer {layer} of {s.num_kv_heads} × {s.head_dim}")

    @staticmethod
    def _expect(x: Any, kind: str, cols: int, what: str) -> None:
        if not isinstance(x, Buffer) or x.kind != kind or x.cols != cols:
            found = f"{x.kind} of {x.cols} columns" if isinstance(x, Buffer) else type(x).__name__
            raise ConfigError(f"{what} needs {kind} values of {cols} columns, not {found}")

    @staticmethod
    def _length(name: str, array: np.ndarray, length: int) -> None:
        if array.shape[0] != length:
            raise ConfigError(f"the array {name} has {array.shape[0]} rows, it needs {length}")


class NativeProgram:
    """A recorded model. One native call per segment, without the GIL."""

    def __init__(self, program: Any, arena: Any, arena_bytes: int, act: Any) -> None:
        self._run = program.run
        self._arena = arena
        self._act = act
        self.activation_bytes = arena_bytes + program.scratch_bytes

    def forward(self) -> None:
        """See Program. Raises: ValueError if the step's arrays point outside the program's buffers."""
        self._run(0)

    def sample(self) -> None:
        """See Program."""
        self._run(1)

    def view(self, buffer: Buffer, rows: int) -> np.ndarray:
        """The first ``rows`` rows of a buffer as it lies in memory: float32, or uint16 with bfloat16 bits. For tests."""
        offset = buffer.address - self._arena.address
        dtype = np.float32 if buffer.kind == "f32" else self._act
        flat = np.frombuffer(self._arena, np.uint8)[offset : offset + rows * buffer.row_bytes]
        return flat.view(dtype).reshape(rows, -1)[:, : buffer.cols]


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


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


def _interleave_bias(bias: Vector, cols: int) -> np.ndarray:
    """Gate and up values in the order of the panels: 16 of one, 16 of the other."""
    halves = np.zeros((2, _pad(cols)), np.float32)
    halves[:, :cols] = bias.data[: 2 * cols].reshape(2, cols)
    return np.ascontiguousarray(halves.reshape(2, -1, 16).transpose(1, 0, 2)).reshape(-1)


def _checked(arrays: Mapping[str, Any], name: str, dtype: str, dims: int) -> np.ndarray:
    array = arrays.get(name)
    if not isinstance(array, np.ndarray) or array.dtype != np.dtype(dtype) or array.ndim != dims or not array.flags.c_contiguous:
        found = f"{array.dtype} with {array.ndim}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ConfigError(f"the array {name} must be contiguous {dtype} with {dims} dimension(s), not {found}")
    return array
