"""The index of prefixes whose K and V are still in blocks. For now the one that knows none."""

from collections.abc import Sequence
from typing import Protocol

from octavo.errors import UnsupportedError


class PrefixIndex(Protocol):
    """Finds the blocks that already hold a sequence's beginning."""

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Full blocks that hold ``tokens`` from the first on; they are in use by some table."""


class NoPrefixIndex:
    """Knows no prefix: every request computes all of its tokens."""

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Nothing."""
        return []


def make_prefix_index(enabled: bool) -> PrefixIndex:
    """The index for ``enable_prefix_caching``.

    Raises: UnsupportedError when it is asked for: this version has none.
    """
    if enabled:
        raise UnsupportedError(
            "enable_prefix_caching=True: this version has no prefix cache; leave it off (False)", "enable_prefix_caching"
        )
    return NoPrefixIndex()
