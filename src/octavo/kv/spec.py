"""KvSpec: how many bytes a block takes."""

from dataclasses import dataclass

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
HEAD_ALIGN = 32  # head size is padded to a multiple of this in the cache: one kernel group of products


@dataclass(frozen=True, slots=True)
class KvSpec:
    """Shape of the cache. K and V of ``block_size`` tokens, all layers, lie together in one block."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # bfloat16 | float32
    block_size: int = 16

    @property
    def head_pad(self) -> int:
        """Head size in memory."""
        return -(-self.head_dim // HEAD_ALIGN) * HEAD_ALIGN

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_pad * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block."""
        return self.bytes_per_token * self.block_size
