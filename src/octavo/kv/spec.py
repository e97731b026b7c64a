"""KvSpec: how many bytes a block takes."""

from dataclasses import dataclass

from octavo.config import KV_BITS

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
SCALE_BYTES = 2  # of one token and head, for K and for V each: quantized types only
HEAD_ALIGN = 32  # head size is padded to a multiple of this in the cache: one kernel group of products, and what is spread together


@dataclass(frozen=True, slots=True)
class KvSpec:
    """Shape of the cache. K and V of ``block_size`` tokens, all layers, lie together in one block."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # one of KV_BITS
    block_size: int = 16

    @property
    def head_pad(self) -> int:
        """Head size in memory."""
        return -(-self.head_dim // HEAD_ALIGN) * HEAD_ALIGN

    @property
    def quantized(self) -> bool:
        """Whether each token and head has scales."""
        return self.dtype not in DTYPE_BYTES

    @property
    def bytes_per_layer(self) -> int:
        """Bytes of K and V of one token in one layer, scales included."""
        one = self.head_pad * KV_BITS[self.dtype] // 8 + (SCALE_BYTES if self.quantized else 0)
        return 2 * self.num_kv_heads * one

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token, all layers."""
        return self.num_layers * self.bytes_per_layer

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block."""
        return self.bytes_per_token * self.block_size
