"""n > 1: one request of the caller becomes n plain requests, each with a seed of its own."""

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: multiples of it visit every 64-bit value once


def mix(value: int) -> int:
    """Scramble 64 bits, one to one. Source: Stafford 2011, variant 13; Steele, Lea & Flood 2014 (SplitMix64)."""
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def child_seed(seed: int, index: int) -> int:
    """The seed of sample ``index`` of a request with this (unsigned 64-bit) seed.

    Sample 0 keeps the seed, so n=1 and the first of n draw alike. The others get mix(seed + index · GOLDEN): distinct
    from each other for every index below 2^64, and a function of nothing but the two numbers.
    """
    return seed & MASK if index == 0 else mix(seed + index * GOLDEN)


def engine_seed(seed: int, number: int) -> int:
    """The seed of the engine's ``number``-th request that came without one: reproducible from the engine's own seed."""
    return mix(mix(seed) + (number + 1) * GOLDEN)


def child_id(request_id: str, index: int, n: int) -> str:
    """The id under which sample ``index`` of ``n`` runs; the request's own when it is the only one."""
    return request_id if n == 1 else f"{request_id}/{index}"
