"""PrefixIndex: which block holds which piece of text. How a request finds what others have computed already.

A full block's key is a hash of its tokens and of the key before it, so it stands for the whole sequence up to its end:

    root = H(salt, adapter)    key 1 = H(root, tokens 0 … 15)    key 2 = H(key 1, tokens 16 … 31)    …

The keys form a tree (a radix tree with one block an edge) without being linked: to walk down is to hash on. Sequences with another salt or
adapter start at another root and never meet. H is BLAKE2b of 256 bits: nobody can make two texts with one key, so equal keys are equal texts.
"""

from array import array
from collections.abc import Collection, Sequence
from hashlib import blake2b

KEY_BYTES = 32


def root_key(salt: str, adapter: str) -> bytes:
    """The key before the first block. Lengths are hashed too, so that salt and adapter cannot run into each other."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (salt, adapter)]
    return blake2b(b"".join(len(part).to_bytes(8, "little") + part for part in parts), digest_size=KEY_BYTES).digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the full block with these tokens behind the block (or root) with the key ``parent``."""
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=KEY_BYTES).digest()


class PrefixIndex:
    """Keys and blocks, one to one. ``keys`` arguments are a sequence's own memo: its root, then the keys of its leading
    full blocks, as far as they were asked for; the methods extend it, so that no block is hashed twice.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def find(self, tokens: Sequence[int], keys: list[bytes], most: int) -> list[int]:
        """The blocks that hold the sequence's leading full blocks, ``most`` at most. Hashes no further than it finds."""
        found: list[int] = []
        while len(found) < most:
            block = self._blocks.get(self.key(tokens, keys, len(found) + 1))
            if block is None:
                break
            found.append(block)
        return found

    def key(self, tokens: Sequence[int], keys: list[bytes], number: int) -> bytes:
        """The key of the sequence's ``number``-th block, from 1; 0: its root."""
        size = self._size
        while len(keys) <= number:
            end = len(keys) * size
            assert end <= len(tokens), f"a block up to token {end} of {len(tokens)} has no key yet"
            keys.append(block_key(keys[-1], tokens[end - size : end]))
        return keys[number]

    def put(self, key: bytes, block: int) -> bool:
        """Let a block be found under a key. False, and nothing done, where the key has a block already: that one stays,
        as others may have it in their tables, and this one is its table's alone."""
        if key in self._blocks:
            return False
        assert block not in self._keys, f"block {block} has a key already"
        self._blocks[key] = block
        self._keys[block] = key
        return True

    def holder(self, key: bytes) -> int | None:
        """The block under a key."""
        return self._blocks.get(key)

    def key_of(self, block: int) -> bytes:
        """The key of a block that has one."""
        return self._keys[block]

    def all_keys(self) -> list[bytes]:
        """Every key that has a block."""
        return list(self._blocks)

    def remove(self, block: int) -> None:
        """A block holds something else from now on."""
        del self._blocks[self._keys.pop(block)]

    def check(self, kept: Collection[int]) -> None:
        """Restate the invariants: keys and blocks are one to one, and the blocks are those that the pool keeps.

        Raises: AssertionError.
        """
        assert {block: key for key, block in self._blocks.items()} == self._keys, "a key has two blocks, or a block two keys"
        assert set(kept) == self._keys.keys(), f"the pool keeps the blocks {sorted(kept)}, the index has keys of {sorted(self._keys)}"
