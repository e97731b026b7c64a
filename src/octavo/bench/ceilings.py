"""The machine's own ceilings, measured with the same kernels and threads in the same process as what is compared with them.

Reading: every byte of a buffer in huge pages once, in four streams a thread with prefetch. Products: the multiply-adds of the linear ops
(or the matrix unit's) on registers alone.
"""

import statistics
from dataclasses import dataclass

import numpy as np

READ_BYTES = 256 << 20  # many times any cache
READS = 3
SPAN = 0.02  # seconds that a loop of products takes, about


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates of all threads together."""

    bytes_per_second: float
    operations_per_second: float  # a multiply-add is two

    def floor(self, nbytes: float, operations: float) -> float:
        """The least seconds that so many bytes and operations take: whichever is the bottleneck."""
        return max(nbytes / self.bytes_per_second, operations / self.operations_per_second)


class Probe:
    """Samples of the ceilings, taken between what is measured: the machine of an hour ago is another one."""

    def __init__(self, num_threads: int | None, isa: str | None = None) -> None:
        from octavo.ops.native import NativeProvider

        provider = NativeProvider(num_threads=num_threads, isa=isa)
        self._pool = provider.pool
        self._memory = provider.new_memory(READ_BYTES, True)
        np.frombuffer(self._memory, np.uint64)[:] = 1  # pages that nobody wrote are all the same one
        _, seconds = self._pool.probe(0, 100_000)
        self._rounds = max(1000, int(100_000 * SPAN / seconds))
        self._reads: list[float] = []
        self._products: list[float] = []
        self._pool.probe(self._memory.address, READ_BYTES)

    def sample(self) -> None:
        """Measure once more."""
        for _ in range(READS):
            done, seconds = self._pool.probe(self._memory.address, READ_BYTES)
            self._reads.append(done / seconds)
        done, seconds = self._pool.probe(0, self._rounds)
        self._products.append(done / seconds)

    def ceilings(self) -> Ceilings:
        """Medians of the samples so far; takes one if there is none."""
        if not self._reads:
            self.sample()
        return Ceilings(statistics.median(self._reads), statistics.median(self._products))
