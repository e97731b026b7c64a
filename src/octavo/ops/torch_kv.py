"""The KV store of the torch provider, and what each KV type means (ops/table.py, KV types).

[blocks, layers, 2 (K, V), block size, G, Dp]: K and V of a block lie together, so that a block can be moved whole. Dp: D with zeros up to
a multiple of 32. Codes of int4 take a byte each here.
"""

from typing import Any

import numpy as np
import torch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CODES = {"fp8_e4m3": torch.uint8, "int8": torch.int8, "int4": torch.int8}  # fp8 as its bits: torch moves no float8
SPREAD = ("int8", "int4")  # K is transformed before it is quantized
LEAST_SCALE = 2.0**-60
SLOW = 2.0**-13  # radians a token: in dims that rotate less, a key's bias is subtracted


class TorchKvStore:
    """Blocks of K and V. Zeros from the system: memory is committed when first touched."""

    def __init__(self, kv_spec: Any, num_blocks: int, device: torch.device) -> None:
        shape = (num_blocks, kv_spec.num_layers, 2, kv_spec.block_size, kv_spec.num_kv_heads, kv_spec.head_pad)
        self.dtype: str = kv_spec.dtype
        self.head_dim: int = kv_spec.head_dim
        self.data = torch.zeros(shape, dtype=DTYPES.get(self.dtype) or CODES[self.dtype], device=device)
        self.scales = torch.zeros(shape[:-1], device=device) if self.dtype in CODES else None
        self.num_blocks = num_blocks
        self.block_size = kv_spec.block_size
        self._held = [self.data] if self.scales is None else [self.data, self.scales]
        self.block_bytes = sum(tensor[:1].numel() * tensor.element_size() for tensor in self._held)

    def copy_block(self, source: int, target: int) -> None:
        """K and V of all layers."""
        for held in self._held:
            held[target] = held[source]

    def read_block(self, block: int) -> memoryview:
        """The block's bytes in the host's memory: codes, then scales."""
        return memoryview(np.concatenate([held[block].cpu().contiguous().view(torch.uint8).reshape(-1).numpy() for held in self._held]))

    def write_block(self, block: int, data: memoryview) -> None:
        """Fill a block."""
        left = torch.from_numpy(np.array(data, np.uint8))
        for held in self._held:
            size = held[block].numel() * held.element_size()
            held[block] = left[:size].view(held.dtype).reshape(held[block].shape).to(held.device)
            left = left[size:]

    def write(self, blocks: torch.Tensor, offsets: torch.Tensor, layer: int, part: int, x: torch.Tensor) -> None:
        """K (part 0) or V (1) of tokens, [T, G, D] float32, to where blocks and offsets say."""
        x = torch.nn.functional.pad(x, (0, self.data.shape[-1] - self.head_dim))
        if self.scales is None:
            self.data[blocks, layer, part, offsets] = x.to(self.data.dtype)
            return
        if part == 0 and self.dtype in SPREAD:
            x = spread(x) / 32
        self.data[blocks, layer, part, offsets], self.scales[blocks, layer, part, offsets] = quantize(x, self.dtype)

    def read(self, table: torch.Tensor, length: int, layer: int, part: int) -> torch.Tensor:
        """The first ``length`` tokens of a block table. → [length, G, D] float32."""
        data = self.data[table, layer, part].flatten(0, 1)[:length]
        if self.scales is None:
            return data[..., : self.head_dim].float()
        x = dequantize(data, self.scales[table, layer, part].flatten(0, 1)[:length], self.dtype)
        return (spread(x) if part == 0 and self.dtype in SPREAD else x)[..., : self.head_dim]


def spread(x: torch.Tensor) -> torch.Tensor:
    """The Walsh-Hadamard transform of each 32 of the last dimension, not normed: twice gives 32 times the values."""
    for apart in (16, 8, 4, 2, 1):
        low, high = x.unflatten(-1, (-1, 2, apart)).unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
    return x


def quantize(x: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of the last dimension's rows, and their scales: values are code · scale."""
    most = x.abs().amax(-1)
    most = torch.where(most < torch.inf, most, torch.nan)  # a row with no finite numbers stays one
    if dtype == "fp8_e4m3":
        scale = _upwards(most / 448, 0x7FFFFF)
    elif dtype == "int8":
        scale = _upwards(most / 127, 0xFFFF)
    else:  # the value of largest magnitude is -8
        scale = _upwards(most / 8, 0xFFFF) * torch.where(x.amax(-1) >= -x.amin(-1), -1, 1)
    scale = torch.where(scale.abs() < LEAST_SCALE, 0, scale)
    ratio = torch.where((scale == 0)[..., None], 0, x * (1 / scale)[..., None])
    if dtype == "fp8_e4m3":
        return ratio.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scale
    low, high = (-127, 127) if dtype == "int8" else (-8, 7)
    return ratio.nan_to_num().round().clamp(low, high).to(torch.int8), scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: str) -> torch.Tensor:
    """code · scale, float32."""
    values = codes.view(torch.float8_e4m3fn) if dtype == "fp8_e4m3" else codes
    return values.float() * scale[..., None]


def _upwards(scale: torch.Tensor, below: int) -> torch.Tensor:
    """Up to the next float32 whose bits in ``below`` are zero."""
    up = ((scale.float().contiguous().view(torch.int32) + below) & ~below).view(torch.float32)
    return torch.where(scale == scale, up, scale)
