"""The sampler of the torch provider, one row at a time: the order and the rules are those of table.Program."""

import math
from typing import Any

import numpy as np
import torch

_MASK = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 over 32-bit words. Source: Salmon et al. 2011."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & _MASK, a >> 32 ^ c3 ^ k1, a & _MASK
        k0, k1 = k0 + 0x9E3779B9 & _MASK, k1 + 0xBB67AE85 & _MASK
    return c0, c1, c2, c3


def philox_uniform(seed: int, position: int) -> int:
    """The uniform of (seed, position), as table.Program lays it out, in units of 2^-24."""
    return philox((position, 0, 0, 0), (seed & _MASK, seed >> 32))[0] >> 8


def adjusted(logits: torch.Tensor, slots: Any, slot: int) -> torch.Tensor:
    """Steps 1 and 2: mask, bias, penalties. [V] float32 → a new [V]."""
    x, device = logits.clone(), logits.device
    if (words := slots.mask[slot]) is not None:
        x[~torch.from_numpy(_bits(words, len(x))).to(device)] = -torch.inf
    if (bias := slots.bias[slot]) is not None:
        x += torch.from_numpy(np.ascontiguousarray(bias)).to(device)
    if (seen := slots.seen[slot]) is not None:
        array, (ids, counts, n) = slots.arrays, seen
        ids = torch.from_numpy(ids[:n].astype(np.int64)).to(device)
        counts = torch.from_numpy(counts[:n].astype(np.float32)).to(device)
        repetition, presence, frequency = (_f32(float(array[k][slot]), x) for k in ("repetition", "presence", "frequency"))
        some = x[ids]
        some = torch.where(some > 0, some / repetition, some * repetition)
        some = some - frequency * counts
        x[ids] = torch.where(counts > 0, some - presence, some)
    return x


def choose(x: torch.Tensor, temperature: float, min_p: float, top_k: int, top_p: float, uniform: int) -> int:
    """Steps 3 to 8. ``x`` [V] adjusted logits without NaN, one at least above -inf; ``uniform`` in units of 2^-24 → the id."""
    top = x.max()
    if temperature == 0 or torch.isinf(top):
        return int(torch.argmax(x))
    e = torch.exp((x - top) / _f32(temperature, x))
    q = torch.where(e >= _f32(min_p, x), e * 2.0**30 + 0.5, 0.0).long()
    if top_k > 0 or top_p < 1:
        part = torch.nonzero(q)[:, 0]  # in id order
        part = part[torch.sort(x[part], descending=True, stable=True).indices]  # stable: ties by rising id
        if top_k > 0:
            part = part[:top_k]
        if top_p < 1:
            before = torch.cumsum(q[part], 0) - q[part]
            need = max(1, math.ceil(top_p * float(q[part].sum())))
            part = part[before < need]
        q = torch.zeros_like(q).scatter_(0, part, q[part])
    cumulative = torch.cumsum(q, 0)
    return int(torch.searchsorted(cumulative, int(cumulative[-1]) * uniform >> 24, right=True))


def _f32(value: float, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def sample_tile(logits: torch.Tensor, step: Any, slots: Any, start: int) -> None:
    """Fill the outputs of the rows start … start + len(logits) - 1. ``logits`` [n, V] float32, left as they are."""
    for i, raw in enumerate(logits):
        row = start + i
        slot, target, wanted = int(step["row_slot"][row]), int(step["row_target"][row]), int(step["row_top"][row])
        if not torch.isfinite(raw.max()):  # a NaN is the largest of its row
            step["out_token"][row] = -1
            continue
        token = target if target >= 0 else _sample(raw, slots, slot, int(step["row_pos"][row]))
        step["out_token"][row] = token
        if target < 0 and wanted < 0:
            continue
        logprobs = raw - torch.logsumexp(raw, 0)
        step["out_logprob"][row] = float(logprobs[token])
        step["out_rank"][row] = 1 + int((raw > raw[token]).sum())
        if wanted > 0:
            ids = torch.sort(raw, descending=True, stable=True).indices[:wanted]
            step["top_ids"][row, : len(ids)] = ids.cpu().numpy()
            step["top_logprobs"][row, : len(ids)] = logprobs[ids].cpu().numpy()


def _sample(raw: torch.Tensor, slots: Any, slot: int, position: int) -> int:
    array, mask = slots.arrays, slots.mask[slot]
    x = adjusted(raw, slots, slot)
    if x.max() == -torch.inf:
        return 0 if mask is None else int(np.argmax(_bits(mask, len(x))))
    temperature = float(array["temperature"][slot])
    uniform = philox_uniform(int(array["seed"][slot]), position) if temperature > 0 else 0
    return choose(x, temperature, float(array["min_p"][slot]), int(array["top_k"][slot]), float(array["top_p"][slot]), uniform)


def _bits(words: np.ndarray, count: int) -> np.ndarray:
    """uint32 words → count booleans, the lowest bit first."""
    return np.unpackbits(np.ascontiguousarray(words).astype("<u4").view(np.uint8), bitorder="little")[:count].astype(bool)
