"""The loads that engines are compared with: fixed lengths, fresh token ids at every call, so that no cache of an earlier run helps.

    name                  prompts                                    tokens in → out, each
    single                1                                          128 → 128
    prefill               1                                          1,024 → 1
    batch8, 32, 64        8, 32, 64                                  128 → 128
    mixed                 64, log-normal lengths, at once            12,994 → 8,870 in all
    prefix                32 that share their first 768 tokens       800 → 64
    long                  1                                          4,096 → 64
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo.errors import ConfigError

SLACK = 4  # outputs beyond those that are measured: which step a prompt ends in is known to one or two
LOWEST, HIGHEST = 1000, 40_000  # token ids: those below are often special; a smaller vocabulary has smaller limits


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts as token ids, and how many tokens to generate after each."""

    prompts: list[list[int]]
    outs: list[int]

    @property
    def tokens_in(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def tokens_out(self) -> int:
        """Tokens to generate."""
        return sum(self.outs)


Ids = Callable[[int], list[int]]


def _mixed_lengths() -> tuple[list[int], list[int]]:
    lengths = np.random.default_rng(0)  # the same lengths at every call
    tokens_in = np.clip(lengths.lognormal(5.0, 0.8, 64), 16, 1024).astype(int)
    tokens_out = np.clip(lengths.lognormal(4.6, 0.8, 64), 8, 512).astype(int)
    return tokens_in.tolist(), tokens_out.tolist()


def batch(size: int, tokens_in: int = 128, tokens_out: int = 128) -> Callable[[Ids], Load]:
    """Equal requests."""
    return lambda ids: Load([ids(tokens_in) for _ in range(size)], [tokens_out] * size)


def decoding(size: int, context: int, steps: int, budget: int) -> Callable[[Ids], Load]:
    """Requests that all decode together for at least so many steps, each with about ``context`` tokens behind it when that begins.

    A prompt that is in decodes while the later ones are computed with what its step leaves of the budget, so the earlier a prompt, the
    shorter it is, and the longer its output. ``budget``: tokens of a step, at least ``size``; at most so many requests may run.
    """
    lengths, outs, waits = [], [], 0.0  # from the last prompt to the first; waits: steps from a prompt's end to the last one's
    for earlier in reversed(range(size)):
        lengths.append(max(1, context - int(waits)))
        outs.append(int(waits) + steps + SLACK)
        waits += lengths[-1] / (budget - earlier)
    return lambda ids: Load([ids(count) for count in reversed(lengths)], list(reversed(outs)))


def _mixed(ids: Ids) -> Load:
    tokens_in, tokens_out = _mixed_lengths()
    return Load([ids(count) for count in tokens_in], tokens_out)


def _prefix(ids: Ids) -> Load:
    shared = ids(768)
    return Load([shared + ids(32) for _ in range(32)], [64] * 32)


WORKLOADS: dict[str, Callable[[Ids], Load]] = {
    "single": batch(1), "prefill": batch(1, 1024, 1), "batch8": batch(8), "batch32": batch(32), "batch64": batch(64), "mixed": _mixed,
    "prefix": _prefix, "long": batch(1, 4096, 64),
}


def make(workload: Callable[[Ids], Load], vocab: int, *seed: int) -> Load:
    """A load with the token ids of a seed."""
    rng = np.random.default_rng(seed)
    low, high = min(LOWEST, vocab // 4), min(HIGHEST, vocab)
    return workload(lambda count: rng.integers(low, high, count).tolist())


def parse_names(names: str) -> list[str]:
    """The names in a comma-separated list of workloads. Raises: ConfigError for an unknown one."""
    found = [each.strip() for each in names.split(",")]
    for name in found:
        if name not in WORKLOADS:
            raise ConfigError(f"there is no workload {name!r}; there are {', '.join(WORKLOADS)}", "workloads")
    return found


def named(names: str, context: int) -> dict[str, Callable[[Ids], Load]]:
    """The workloads of a comma-separated list. Raises: ConfigError for an unknown one, or one that a context of so many tokens has no room for."""
    chosen = {}
    for name in parse_names(names):
        load = make(WORKLOADS[name], HIGHEST, 0)
        if (need := max(len(prompt) + out for prompt, out in zip(load.prompts, load.outs))) > context:
            raise ConfigError(f"the workload {name} needs a context of {need} tokens; here it is {context} (--max-model-len)", "workloads")
        chosen[name] = WORKLOADS[name]
    return chosen
