"""The torch provider: every op of the table, executed eagerly on any torch device.

It says what each op means, in the plainest form: it is the oracle that native kernels are compared with, and the base
of a GPU backend. Extras: test, cuda. Weights are kept in act; products are computed in float32, in which products of
bfloat16 values are exact.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from octavo.errors import ConfigError
from octavo.ops.table import Stored
from octavo.ops.torch_kv import CODES, DTYPES, SLOW, TorchKvStore
from octavo.ops.torch_quant import Quantized, int4, int8
from octavo.ops.torch_sampler import sample_tile

PARTITION = 256  # absolute positions whose softmax is one piece
TILE = 64  # rows of the head at once


class TorchProvider:
    """Weights as torch tensors, programs as plain calls. ``dtype``: bfloat16 | float32, the compute dtype ("act").

    ``quantization``: None, or int8 | int4 | int4_g128 | gguf, as in NativeProvider.
    """

    def __init__(self, dtype: str = "float32", device: str = "cpu", quantization: str | None = None) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}", "dtype")
        self.dtype = dtype
        self.act = DTYPES[dtype]
        self.device = torch.device(device)
        self.quantization = quantization

    def keeps(self, types: Sequence[str], shapes: Sequence[tuple[int, ...]], interleave: bool) -> bool:
        """Types with groups of 32, as ggml multiplies them with its own 8 bits."""
        return self.quantization == "gguf" and all(kind[:2] in ("Q4", "Q5", "Q6", "Q8") for kind in types)

    def linear(self, parts: Sequence[Any], *, interleave: bool = False) -> "torch.Tensor | Quantized":
        """[N, K] in act, or quantized: the parts stacked. ``interleave`` changes nothing here: gate stays above up."""
        if isinstance(parts[0], Stored):
            return Quantized(torch.cat([self._numbers(part.numbers()) for part in parts]), 32)
        if self.quantization in (None, "gguf"):
            return torch.cat([self._matrix(part) for part in parts])
        whole = torch.cat([self._numbers(part) for part in parts])
        return int8(whole) if self.quantization == "int8" else int4(whole, 128 if self.quantization == "int4_g128" else 32)

    def table(self, table: Any) -> "torch.Tensor | Quantized":
        """[V, d] in act, in 8 bits where matrices are quantized, or as stored."""
        if isinstance(table, Stored):
            return Quantized(self._numbers(table.numbers()), 32)
        return self._matrix(table) if self.quantization in (None, "gguf") else int8(self._numbers(table))

    def vector(self, parts: Sequence[Any]) -> torch.Tensor:
        """[n] in float32."""
        return torch.from_numpy(np.concatenate([np.asarray(part, np.float32) for part in parts])).to(self.device)

    def _matrix(self, array: Any) -> torch.Tensor:
        return self._numbers(array).to(self.act)

    def _numbers(self, array: Any) -> torch.Tensor:
        array = np.ascontiguousarray(array)
        if not array.flags.writeable:  # a view of a mapped file: torch wants memory that it may write
            array = array.copy()
        held = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if array.dtype == np.uint16 else torch.from_numpy(array)
        return held.to(self.device, torch.float32)

    def kv_store(self, kv_spec: Any, num_blocks: int) -> TorchKvStore:
        """Memory for the blocks."""
        return TorchKvStore(kv_spec, num_blocks, self.device)

    def compile(
        self, model: Callable[..., Any], weights: Any, spec: Any, *, step: Mapping[str, Any], slots: Any, kv: TorchKvStore
    ) -> "TorchProgram":
        """Bind the model to its weights, the step's arrays, the slots and the store."""
        return TorchProgram(self, model, weights, spec, step, slots, kv)


class TorchProgram:
    """One model, ready to step: forward() runs the model's function, sample() the head that it ended with."""

    def __init__(self, provider: TorchProvider, model: Callable[..., Any], weights: Any, spec: Any, step: Mapping[str, Any], slots: Any,
                 kv: TorchKvStore) -> None:
        self.provider = provider
        self.model, self.weights, self.spec = model, weights, spec
        self.step, self.slots, self.kv = step, slots, kv
        self._head: tuple[torch.Tensor, torch.Tensor | Quantized] | None = None

    @torch.inference_mode()
    def forward(self) -> None:
        """Everything up to the normed rows that the head needs."""
        self._head = self.model(_StepOps(self), self.weights, self.spec)

    @torch.inference_mode()
    def sample(self) -> None:
        """Head and sampler, TILE rows at a time."""
        x, weight = self._head or (torch.empty(0), torch.empty(0))
        for start in range(0, len(x), TILE):
            sample_tile(_product(x[start : start + TILE], weight), self.step, self.slots, start)

    def run(self) -> None:
        """Both."""
        self.forward()
        self.sample()

    @torch.inference_mode()
    def logits(self) -> torch.Tensor:
        """The rows' raw logits of the last forward(), [R, V] float32: for tests and for teacher forcing."""
        assert self._head is not None, "forward() comes first"
        return _product(*self._head)


def _product(x: torch.Tensor, weight: "torch.Tensor | Quantized") -> torch.Tensor:
    if isinstance(weight, Quantized):
        return weight.product(x)
    return torch.nn.functional.linear(x.float(), weight.float())


class _StepOps:
    """The table's ops, bound to the step's arrays as they are now. Handles are tensors."""

    def __init__(self, program: TorchProgram) -> None:
        provider, step, spec = program.provider, program.step, program.spec
        self.act, self.device, self.spec = provider.act, provider.device, spec
        self.store, self.block_size = program.kv, program.kv.block_size
        t, s, r = (int(n) for n in step["header"][:3])
        self.tokens, self.positions, kv_slots = (self._index(step[name][:t]) for name in ("tokens", "positions", "kv_slots"))
        self.blocks, self.offsets = kv_slots // self.block_size, kv_slots % self.block_size
        self.rows = self._index(step["rows"][:r])
        self.sequences = []  # (first row, end row, tokens in the cache, block ids)
        for i in range(s):
            length = int(step["kv_len"][i])
            table = program.slots.arrays["block_table"][int(step["seq_slot"][i]), : -(-length // self.block_size)]
            self.sequences.append((int(step["q_start"][i]), int(step["q_start"][i + 1]), length, self._index(table)))
        self.angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _index(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(np.asarray(array, np.int64)).to(self.device)

    def embed(self, table: "torch.Tensor | Quantized") -> torch.Tensor:
        return (table.weight if isinstance(table, Quantized) else table)[self.tokens, : self.spec.hidden].float()

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight).to(self.act)

    def linear(self, x: torch.Tensor, weight: "torch.Tensor | Quantized", *, bias: torch.Tensor | None = None, act: str | None = None,
               residual: torch.Tensor | None = None) -> torch.Tensor:
        out = _product(x, weight) if bias is None else _product(x, weight) + bias
        if act == "silu_mul":
            gate, up = out.chunk(2, dim=-1)
            return (torch.nn.functional.silu(gate) * up).to(self.act)
        assert act is None, act
        return out if residual is None else residual + out

    def rope_store(self, qkv: torch.Tensor, layer: int, rope: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        parts = (heads, kv_heads, kv_heads)
        q, k, v = qkv.view(len(qkv), -1, self.spec.head_dim).split(parts, dim=1)
        cos, sin = self._angles(rope)
        keys = _rotate(k, cos, sin)
        if bias is not None and self.store.dtype in CODES:
            slow = torch.tensor(rope.inv_freq, dtype=torch.float32, device=self.device).repeat(2) < SLOW
            keys = keys - torch.where(slow, bias.view(-1, self.spec.head_dim).split(parts)[1], 0)
        for part, x in enumerate((keys, v)):
            self.store.write(self.blocks, self.offsets, layer, part, x)
        return _rotate(q, cos, sin).to(self.act).flatten(1)

    def _angles(self, rope: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if id(rope) not in self.angles:
            angles = self.positions.float()[:, None] * torch.tensor(rope.inv_freq, dtype=torch.float32, device=self.device)
            self.angles[id(rope)] = angles.cos()[:, None], angles.sin()[:, None]
        return self.angles[id(rope)]

    def attention(self, q: torch.Tensor, layer: int, window: int | None) -> torch.Tensor:
        out = torch.zeros_like(q)
        for start, end, length, table in self.sequences:
            k, v = (self.store.read(table, length, layer, part) for part in (0, 1))
            queries = q[start:end].float().view(end - start, k.shape[1], -1, self.spec.head_dim)  # [t, G, H/G, D]
            out[start:end] = _attend(queries, k, v, self.positions[start:end], window, self.act).flatten(1).to(self.act)
        return out

    def take_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.rows]

    def head(self, x: torch.Tensor, weight: "torch.Tensor | Quantized") -> "tuple[torch.Tensor, torch.Tensor | Quantized]":
        return x, weight


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D], cos and sin [T, 1, D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, window: int | None, act: torch.dtype) -> torch.Tensor:
    """q [t, G, H/G, D], k and v [length, G, D], all float32, of one sequence → [t, G, H/G, D] float32."""
    shape = q.shape[:-1]
    top = torch.full(shape, -torch.inf, device=q.device)
    total = torch.zeros(shape, device=q.device)
    out = torch.zeros_like(q)
    scale = q.shape[-1] ** -0.5
    first = 0 if window is None else max(0, int(positions[0]) - window + 1)  # nothing before it is read: it may hold anything
    for start in range(first // PARTITION * PARTITION, len(k), PARTITION):
        at = torch.arange(max(start, first), min(start + PARTITION, len(k)), device=q.device)
        seen = at <= positions[:, None]
        if window is not None:
            seen &= at > positions[:, None] - window
        scores = torch.einsum("tghd,kgd->tghk", q, k[at]) * scale
        scores = torch.where(seen[:, None, None], scores, -torch.inf)
        high = scores.amax(-1)
        p = torch.where(seen[:, None, None], torch.exp(scores - high[..., None]), 0.0)  # a partition without a key: high is -inf, p 0
        p = p.to(act).float()
        new = torch.maximum(top, high)
        old_weight, new_weight = (torch.where(m == -torch.inf, 0.0, torch.exp(m - new)) for m in (top, high))
        total = total * old_weight + p.sum(-1) * new_weight
        out = out * old_weight[..., None] + torch.einsum("tghk,kgd->tghd", p, v[at]) * new_weight[..., None]
        top = new
    return out / total[..., None]
