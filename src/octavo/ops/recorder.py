"""Recording: a model's calls become a flat list of native ops over buffers in one arena.

Legend as in ops/table.py; "p" behind a size means padded to a multiple of 32. Every buffer has rows of a padded width,
whose padding holds zeros. Recording resolves handles to addresses inside the arena (buffers whose lives do not overlap
share memory); native/include/octavo.h has the layout of an op, and each kernel says what its fields mean.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.config import BLOCK_SIZE
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.ops.table import SLOT_FIELDS, STEP_FIELDS

MAX_HEAD_DIM = 512
SAMPLE_ROWS = 64
_OP = struct.Struct("<2i10Q12i4f")
_EMBED, _NORM, _LINEAR, _ROPE_TABLE, _ROPE_STORE, _ATTENTION, _TAKE_ROWS, _SAMPLE, _QUANTIZE = range(9)
_NAMES = ("embed", "norm", "linear", "rope table", "rope+store", "attention", "take rows", "sample", "quantize")
_STORE, _RESIDUAL, _SILU_MUL = range(3)
_ROWS = {"T": 0, "R": 1, "tile": 2}
_F32, _FUSED, _NORMS = 1, 2, 4
_KV_TYPES = {"bfloat16": 0, "float32": 1, "fp8_e4m3": 2, "int8": 3, "int4": 4}
_FORWARD, _SAMPLE_SEGMENT = 1, 2


def pad(n: int, to: int = 32) -> int:
    """n, rounded up to a multiple."""
    return -(-n // to) * to


@dataclass(frozen=True, slots=True)
class Panels:
    """Panels of 16 rows of a matrix in one layout (0: the compute dtype), the first of them its panel ``first``."""

    address: int
    count: int
    nbytes: int
    layout: int = 0
    first: int = 0


@dataclass(frozen=True, slots=True)
class Matrix:
    """A packed matrix [n, k]. ``interleaved``: panels of gate and up in turns. Several pieces: a file's parts in several types."""

    n: int
    k: int
    pieces: tuple[Panels, ...]
    interleaved: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """A float32 vector of n values, padded with zeros."""

    data: np.ndarray
    n: int

    @property
    def address(self) -> int:
        """Where the values lie."""
        return address_of(self.data)


@dataclass(slots=True, eq=False)
class Buffer:
    """A handle: activations [rows, cols], rows symbolic. ``kind``: f32, act, or quantized."""

    kind: str
    rows: str  # T | R | tile
    cols: int
    row_bytes: int
    address: int = 0
    first: int = -1  # index of the op that writes it first, and of the last one that reads it
    last: int = -1
    same: "Buffer | None" = None  # shares its memory: written in place
    norm: tuple["Buffer", Vector, float] | None = None  # what made it, if a norm did: a linear op may do it again


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What measurements need to know of a recorded op."""

    name: str  # "norm", "linear 576→960"
    rows: str  # T | R | tile: what it is done for
    weight_bytes: int = 0  # packed weights that it reads (embed: of a row)
    products: int = 0  # multiply-adds for a row
    bits: int = 0  # of codes, where weights and activations are quantized; 0: products of numbers


@dataclass(slots=True)
class _Recorded:
    code: int
    flags: int
    operands: list[Any]  # Buffer, address, or None
    numbers: list[Any]
    floats: list[float]
    info: OpInfo


class Recorder:
    """The Ops object of the native backend: every call appends an op; ``finish`` gives the program."""

    def __init__(self, provider: Any, spec: Any, step: Mapping[str, Any], slots: Mapping[str, Any], kv: Any) -> None:
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
        self._kv_type = _KV_TYPES[kv.spec.dtype]
        self._flag = _F32 if provider.dtype == "float32" else 0
        self._buffers: list[Buffer] = []
        self._forward: list[_Recorded] = []
        self._sample: list[_Recorded] = []
        self._keep: list[Any] = []
        self._ropes: dict[Any, tuple[Buffer, int]] = {}
        self._quantized: dict[tuple[int, int], Buffer] = {}  # by input and layout
        self._vocab = 0
        self._group = 0

    # The ops: ops/table.py says what they mean.

    def embed(self, table: Matrix) -> Buffer:
        """See Ops."""
        self._vocab = table.n
        if len(table.pieces) != 1:
            raise ConfigError("embed needs a table made in one piece")
        (panels,) = table.pieces
        out = self._buffer("f32", "T", table.k)
        info = OpInfo("embed", "T", panels.nbytes // max(panels.count * 16, 1))
        numbers = ["T", pad(table.k), pad(table.k), panels.layout, table.k]
        self._emit(_EMBED, [address_of(self.step["tokens"]), panels.address, out], numbers, out=out, info=info)
        return out

    def norm(self, x: Buffer, weight: Vector, eps: float) -> Buffer:
        """See Ops."""
        self._expect(x, "f32", weight.n, "norm")
        out = self._buffer("act", x.rows, x.cols)
        out.norm = (x, weight, eps)
        self._emit(_NORM, [x, weight.address, out], [x.rows, x.cols, pad(x.cols)], [eps], out=out)
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
            bias_address = address_of(data)
            self._keep.append(data)
        if residual is not None:
            self._expect(residual, "f32", cols, "linear's residual")
            if residual.rows != x.rows:
                raise ConfigError("linear's residual has other rows than its input")
        out = self._buffer("act" if gated else "f32", x.rows, cols)
        out.same = residual
        epilogue = _SILU_MUL if gated else _RESIDUAL if residual is not None else _STORE
        for panels in weight.pieces:
            quantized = self._quantize(x, panels.layout)
            operands = [x, panels.address, bias_address, residual, out, None, None, quantized]
            flags = _FUSED if quantized else 0
            numbers = [x.rows, pad(x.cols), panels.count, epilogue, pad(cols), 0, panels.layout, panels.first]
            info = self._linear_info("linear", x.rows, weight, panels)
            self._emit(_LINEAR, operands, numbers, out=out, flags=flags, info=info)
        return out

    def _quantize(self, x: Buffer, layout: int) -> Buffer | None:
        """The buffer of x's quantized rows, and once per input and layout the op that fills it; None for the compute dtype."""
        if layout == 0:
            return None
        key = (id(x), layout)
        if key not in self._quantized:
            out = self._buffer("quantized", x.rows, x.cols)
            out.row_bytes = self.provider.layout_bytes(layout, pad(x.cols))[1]
            operands = [x, None, None, None, None, None, None, out]
            self._emit(_QUANTIZE, operands, [x.rows, pad(x.cols), 0, 0, 0, 0, layout], out=out, flags=_FUSED)
            self._quantized[key] = out
        return self._quantized[key]

    def rope_store(self, qkv: Buffer, layer: int, rope: Any, bias: Vector | None = None) -> Buffer:
        """See Ops."""
        s = self.spec
        heads, groups, dim = s.num_heads, s.num_kv_heads, s.head_dim
        self._expect(qkv, "f32", (heads + 2 * groups) * dim, "rope_store")
        self._check_attention(layer)
        if bias is not None and bias.n != qkv.cols:
            raise CheckpointError(f"a bias of {bias.n} values for rows of {qkv.cols}")
        out = self._buffer("act", "T", heads * dim)
        table, frequencies = self._rope_table(rope)
        self._emit(
            _ROPE_STORE,
            [qkv, table, out, address_of(self.step["kv_slots"]), bias and bias.address, frequencies],
            ["T", pad(qkv.cols), pad(out.cols), heads, groups, dim, self.kv.spec.head_pad, self._layer_offset(layer), self._kv_type],
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
        offset, window = self._layer_offset(layer), min(window or 0, 2**31 - 1)
        numbers = ["T", pad(q.cols), s.num_heads, s.num_kv_heads, s.head_dim, self.kv.spec.head_pad, offset, window, self._kv_type]
        self._emit(_ATTENTION, [q, out], numbers, [float(np.float32(1) / np.sqrt(np.float32(s.head_dim)))], out=out)
        self._group = s.num_heads // s.num_kv_heads
        return out

    def take_rows(self, x: Buffer) -> Buffer:
        """See Ops."""
        if x.rows != "T" or x.kind not in ("f32", "act"):
            raise ConfigError(f"take_rows takes some of a step's rows of numbers, not {x.kind} rows of {x.rows}")
        out = self._buffer(x.kind, "R", x.cols)
        self._emit(_TAKE_ROWS, [x, address_of(self.step["rows"]), out], ["R", out.row_bytes // 4], out=out)
        return out

    def head(self, x: Buffer, weight: Matrix) -> None:
        """See Ops."""
        self._expect(x, "act", weight.k, "head")
        if x.rows != "R":
            raise ConfigError("head works on the rows of take_rows")
        if self._vocab not in (0, weight.n):
            raise CheckpointError(f"the head has {weight.n} rows, the embedding table {self._vocab}")
        self._vocab = weight.n
        x.last = 1 << 30  # read by the other segment
        logits = self._buffer("f32", "tile", weight.n)
        logits.last = 1 << 30
        self.logits = logits
        for panels in weight.pieces:
            quantized = self._quantize(x, panels.layout)
            if quantized is not None:
                quantized.last = 1 << 30
            numbers = ["tile", pad(weight.k), panels.count, _STORE, pad(weight.n), 0, panels.layout, panels.first]
            operands = [x, panels.address, 0, None, logits, None, None, quantized]
            self._sample.append(_Recorded(_LINEAR, self._flag, operands, numbers, [], self._linear_info("head", "tile", weight, panels)))
        self._sample.append(_Recorded(_SAMPLE, self._flag, [logits], ["tile", pad(weight.n)], [], OpInfo("sample", "tile")))

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
        arena = self.provider.new_memory(max(arena_bytes, 64))
        for buffer in self._buffers:
            buffer.address += arena.address
        step, slots = self.step, self.slots
        bounds = struct.pack(
            "<12q",
            self.capacity["T"], slots["block_table"].shape[0], self.capacity["R"], self._vocab, self.kv.num_blocks, self.kv.block_bytes,
            slots["block_table"].shape[1], step["top_ids"].shape[1], self._group, 0, self.kv.memory.address, self.max_seqs,
        )  # fmt: skip
        if self.max_seqs > slots["block_table"].shape[0]:
            raise ConfigError(f"steps of up to {self.max_seqs} sequences, but slots for {slots['block_table'].shape[0]}")
        keep_alive = [arena, step, slots, self.kv, self._keep, self.provider]
        program = self.provider.new_program(
            self.provider.pool,
            bounds,
            struct.pack("<17Q", *(address_of(step[name]) for name in STEP_FIELDS)),
            struct.pack("<14Q", *(address_of(slots[name]) for name in SLOT_FIELDS)),
            b"".join(self._pack(op) for op in self._forward),
            b"".join(self._pack(op) for op in self._sample),
            keep_alive,
        )
        infos = [op.info for op in [*self._forward, *self._sample]]
        return NativeProgram(program, arena, arena_bytes, np.float32 if self.provider.act_bytes == 4 else np.uint16, infos)

    def _fuse_norms(self) -> None:
        """A norm that only linear ops read is not stored: with few rows they norm their input themselves, in every thread.

        With many rows an op of the compute dtype still needs it stored, once; quantized ones need the norm in their quantize op only.
        """
        readers: dict[int, list[_Recorded]] = {}
        for op in [*self._forward, *self._sample]:
            if isinstance(op.operands[0], Buffer):
                readers.setdefault(id(op.operands[0]), []).append(op)
        for norm_op in [op for op in self._forward if op.code == _NORM]:
            x = norm_op.operands[2]
            found = readers.get(id(x), [])
            if x.last >= 1 << 30 or not found or any(op.code not in (_LINEAR, _QUANTIZE) for op in found):
                continue
            integer = all(op.operands[7] is not None for op in found)
            assert x.norm is not None
            source, weight, eps = x.norm
            if self._written_between(source, x) or not (integer or len(found) == 1):
                continue
            for op in found:
                op.flags |= _FUSED | (_NORMS if integer else 0)
                op.operands[5:7] = [source, weight.address]
                op.numbers[5] = x.cols
                op.floats[:] = [eps]
                if integer:
                    op.operands[0] = None
            source.last = max(source.last, x.last)
            if integer:
                self._forward.remove(norm_op)
                self._buffers.remove(x)
            else:
                norm_op.flags |= _FUSED

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
            nbytes = pad((pad(self.capacity[buffer.rows]) + 32) * buffer.row_bytes, 4096)
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
        buffer = Buffer(kind, rows, cols, pad(cols) * (4 if kind == "f32" else self.provider.act_bytes))
        self._buffers.append(buffer)
        return buffer

    def _emit(self, code: int, operands: list[Any], numbers: list[Any], floats: Sequence[float] = (), *, out: Buffer,
              flags: int = 0, info: OpInfo | None = None) -> None:
        index = len(self._forward)
        if out.first < 0:  # else another piece of it was written before
            out.first = index
        for operand in operands:
            if isinstance(operand, Buffer):
                operand.last = max(operand.last, index)
        self._forward.append(_Recorded(code, self._flag | flags, operands, numbers, list(floats), info or OpInfo(_NAMES[code], numbers[0])))

    def _linear_info(self, name: str, rows: str, weight: Matrix, panels: Panels) -> OpInfo:
        share = panels.count * 16 if len(weight.pieces) > 1 else weight.n
        return OpInfo(f"{name} {weight.k}→{share}", rows, panels.nbytes, weight.k * share, self.provider.bits[panels.layout])

    def _rope_table(self, rope: Any) -> tuple[Buffer, int]:
        """Cosines and sines of the step's positions, and the frequencies' address: one op for each distinct rope, before its first use."""
        key = tuple(rope.inv_freq)
        if key not in self._ropes:
            half = self.spec.head_dim // 2
            if len(key) != half:
                raise ConfigError(f"rope has {len(key)} frequencies, a head of {self.spec.head_dim} needs {half}")
            frequencies = np.array(key, np.float32)
            self._keep.append(frequencies)
            out = self._buffer("f32", "T", self.spec.head_dim)
            out.row_bytes = self.spec.head_dim * 4
            self._emit(_ROPE_TABLE, [address_of(self.step["positions"]), address_of(frequencies), out], ["T", half], out=out)
            self._ropes[key] = out, address_of(frequencies)
        return self._ropes[key]

    def _layer_offset(self, layer: int) -> int:
        return layer * self.kv.spec.bytes_per_layer * BLOCK_SIZE  # bytes

    def _check_attention(self, layer: int) -> None:
        s, kv = self.spec, self.kv.spec
        if s.head_dim % 2 or not 0 < s.head_dim <= MAX_HEAD_DIM:
            raise UnsupportedError(f"heads of {s.head_dim}: the native kernels take even sizes up to {MAX_HEAD_DIM}")
        if s.num_kv_heads < 1 or s.num_heads % s.num_kv_heads:
            raise ConfigError(f"{s.num_heads} query heads do not divide into {s.num_kv_heads} KV heads")
        if (kv.num_kv_heads, kv.head_dim) != (s.num_kv_heads, s.head_dim) or not 0 <= layer < kv.num_layers:
            held = f"the KV store has {kv.num_layers} layers of {kv.num_kv_heads} × {kv.head_dim}"
            raise ConfigError(f"{held}, not layer {layer} of {s.num_kv_heads} × {s.head_dim}")

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
    """A recorded model. One native call per step, or per segment, without the GIL. ``ops`` are forward's, then sample's."""

    def __init__(self, program: Any, arena: Any, arena_bytes: int, act: Any, ops: list[OpInfo]) -> None:
        self._program = program
        self._run = program.run  # (segments)
        self.ops = ops
        self._arena = arena
        self._act = act
        self.activation_bytes = arena_bytes + program.scratch_bytes

    def forward(self) -> None:
        """See Program. Raises: ValueError if the step's arrays point outside the program's buffers."""
        self._run(_FORWARD)

    def sample(self) -> None:
        """See Program."""
        self._run(_SAMPLE_SEGMENT)

    def run(self) -> None:
        """See Program. Raises: as forward."""
        self._run(_FORWARD | _SAMPLE_SEGMENT)

    @property
    def busy_seconds(self) -> float:
        """Spent inside the native calls so far."""
        return float(self._program.busy_ns) * 1e-9

    @property
    def tokens_shared(self) -> int:
        """Tokens of context whose K and V a sequence read together with others, instead of once more for itself: all steps so far, a layer."""
        return int(self._program.tokens_shared)

    def profile(self, on: bool) -> list[float]:
        """Measure each op from now on (a clock read behind every op), or no longer. → seconds of each of ``ops`` since the last call."""
        return [ns * 1e-9 for ns in self._program.profile(on)]

    def view(self, buffer: Buffer, rows: int) -> np.ndarray:
        """The first ``rows`` rows of a buffer as it lies in memory: float32, or uint16 with bfloat16 bits. For tests."""
        offset = buffer.address - self._arena.address
        dtype = np.float32 if buffer.kind == "f32" else self._act
        flat = np.frombuffer(self._arena, np.uint8)[offset : offset + rows * buffer.row_bytes]
        return flat.view(dtype).reshape(rows, -1)[:, : buffer.cols]


def address_of(array: np.ndarray) -> int:
    """Where an array's first byte lies."""
    return int(array.__array_interface__["data"][0])


def _interleave_bias(bias: Vector, cols: int) -> np.ndarray:
    """Gate and up values in the order of the panels: 16 of one, 16 of the other."""
    halves = np.zeros((2, pad(cols)), np.float32)
    halves[:, :cols] = bias.data[: 2 * cols].reshape(2, cols)
    return np.ascontiguousarray(halves.reshape(2, -1, 16).transpose(1, 0, 2)).reshape(-1)


def _checked(arrays: Mapping[str, Any], name: str, dtype: str, dims: int) -> np.ndarray:
    array = arrays.get(name)
    if not isinstance(array, np.ndarray) or array.dtype != np.dtype(dtype) or array.ndim != dims or not array.flags.c_contiguous:
        found = f"{array.dtype} with {array.ndim}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ConfigError(f"the array {name} must be contiguous {dtype} with {dims} dimension(s), not {found}")
    return array
