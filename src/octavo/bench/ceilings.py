"""The machine's own ceilings, measured with the same kernels and threads in the same process as what is compared with them.

Reading: every byte of a buffer in huge pages once, in four streams a thread with prefetch. Products: the multiply-adds of the linear ops
(or the matrix unit's) on registers alone.
"""

import statistics
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

READ_BYTES = 256 << 20  # many times any cache
READS = 3
BITS = 0, 8, 4  # of what products are measured: numbers, codes
SPAN = 0.02  # seconds that a loop of products takes, about


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates of all threads together."""

    bytes_per_second: float
    operations_per_second: float  # of activations and weights as numbers; a multiply-add is two
    codes_per_second: float  # the same, of quantized ones, whose codes have 8 bits
    few_bits_per_second: float  # or fewer: some instruction sets multiply those faster

    def floor(self, work: "Amount") -> float:
        """The least seconds that work takes: whichever of memory and arithmetic is the bottleneck."""
        return max(work.nbytes / self.bytes_per_second, work.operations / self.operations_per_second + work.codes / self.codes_per_second
                   + work.few_bits / self.few_bits_per_second)


class Amount(NamedTuple):
    """What is read, and computed: operations on numbers, on codes of 8 bits, on those of fewer."""

    nbytes: float = 0.0
    operations: float = 0.0
    codes: float = 0.0
    few_bits: float = 0.0

    def __add__(self, other: object) -> "Amount":  # a tuple's own + would join them
        if not isinstance(other, Amount):
            return NotImplemented
        return Amount(*(mine + its for mine, its in zip(self, other, strict=True)))

    def divided(self, by: float) -> "Amount":
        """A part of it."""
        return Amount(*(each / by for each in self))


class Probe:
    """Samples of the ceilings, taken between what is measured: the machine of an hour ago is another one."""

    def __init__(self, num_threads: int | None, isa: str | None = None) -> None:
        from octavo.ops.native import NativeProvider

        provider = NativeProvider(num_threads=num_threads, isa=isa)
        self._pool = provider.pool
        self._memory = provider.new_memory(READ_BYTES, True)
        np.frombuffer(self._memory, np.uint64)[:] = 1  # pages that nobody wrote are all the same one
        self._rounds = [max(1000, int(100_000 * SPAN / self._pool.probe(0, 100_000, bits)[1])) for bits in BITS]
        self._reads: list[float] = []
        self._products: list[list[float]] = [[] for _ in BITS]
        self._pool.probe(self._memory.address, READ_BYTES)

    def sample(self) -> None:
        """Measure once more."""
        for _ in range(READS):
            done, seconds = self._pool.probe(self._memory.address, READ_BYTES)
            self._reads.append(done / seconds)
        for bits, rounds, products in zip(BITS, self._rounds, self._products, strict=True):
            done, seconds = self._pool.probe(0, rounds, bits)
            products.append(done / seconds)

    def ceilings(self) -> Ceilings:
        """Medians of the samples so far; takes one if there is none."""
        if not self._reads:
            self.sample()
        return Ceilings(statistics.median(self._reads), *(statistics.median(rates) for rates in self._products))
