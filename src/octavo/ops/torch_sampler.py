"""The sampler of the torch provider, one row at a time: the order and the rules are those of table.Program."""

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


def philox_uniform(seed: int, position: int) -> float:
    """The uniform in [0, 1) of (seed, position), as table.Program lays it out."""
    return (philox((position, 0, 0, 0), (seed & _MASK, seed >> 32))[0] >> 8) * 2.0**-24


def adjusted(logits: torch.Tensor, slots: Any, slot: int) -> torch.Tensor:
    """Steps 1 and 2: mask, bias, penalties. [V] float32 → a new [V]."""
    x, device = logits.clone(), logits.device
    if (words := slots.mask[slot]) is not None:
        bits = np.unpackbits(np.ascontiguousarray(words).astype("<u4").view(np.uint8), bitorder="little")[: len(x)]
        x[~torch.from_numpy(bits.astype(bool)).to(device)] = -torch.inf
    if (bias := slots.bias[slot]) is not None:
        x += torch.from_numpy(np.ascontiguousarray(bias)).to(device)
    if (seen := slots.seen[slot]) is not None:
        array, (ids, counts, n) = slots.arrays, seen
        ids = torch.from_numpy(ids[:n].astype(np.int64)).to(device)
        counts = torch.from_numpy(counts[:n].astype(np.float32)).to(device)
        repetition, presence, frequency = (torch.tensor(float(array[k][slot]), device=device) for k in ("repetition", "presence", "frequency"))
        some = x[ids]
        some = torch.where(some > 0, some / repetition, some * repetition)
        some = some - frequency * counts
        x[ids] = torch.where(counts > 0, some - presence, some)
    return x


def choose(x: torch.Tensor, temperature: float, min_p: float, top_k: int, top_p: float, u: float) -> int:
    """Steps 3 to 8. ``x`` [V] adjusted logits, ``u`` the row's uniform → the id."""
    top = x.max()
    if temperature == 0 or not torch.isfinite(top):  # no id allowed, or a NaN: there is no distribution to draw from
        return int(torch.argmax(x))
    e = torch.exp((x - top) / torch.tensor(temperature, dtype=torch.float32, device=x.device))
    if min_p > 0:
        e = torch.where(e >= torch.tensor(min_p, dtype=torch.float32, device=x.device), e, 0.0)
    if 0 < top_k < len(e) or top_p < 1:
        falling, ids = torch.sort(e, descending=True, stable=True)  # stable: ties by rising id
        if top_k > 0:
            falling[top_k:] = 0.0
        if top_p < 1:
            mass = torch.cumsum(falling.double(), 0)
            before = mass - falling.double()
            falling[1:][before[1:] >= top_p * mass[-1]] = 0.0
        e = torch.zeros_like(e).scatter_(0, ids, falling)
    cumulative = torch.cumsum(e.double(), 0)
    above = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    return above if above < len(e) else int(torch.nonzero(e)[-1])


def sample_tile(logits: torch.Tensor, step: Any, slots: Any, start: int) -> None:
    """Fill the outputs of the rows start … start + len(logits) - 1. ``logits`` [n, V] float32, left as they are."""
    for i, raw in enumerate(logits):
        row = start + i
        slot, target, wanted = int(step["row_slot"][row]), int(step["row_target"][row]), int(step["row_top"][row])
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
    array = slots.arrays
    temperature = float(array["temperature"][slot])
    u = philox_uniform(int(array["seed"][slot]), position) if temperature > 0 else 0.0
    return choose(adjusted(raw, slots, slot), temperature, float(array["min_p"][slot]), int(array["top_k"][slot]), float(array["top_p"][slot]), u)
