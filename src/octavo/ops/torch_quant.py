"""What quantized weights mean, in plain torch: numbers on a grid, multiplied with activations on another.

Differs from the native kernels in the order of float32 operations only. Source: docs/decisions/0010.
"""

from typing import NamedTuple

import torch

from octavo.ops.torch_kv import spread

LEAST = 2.0**-60  # of a group's largest magnitude; below, the group is zero
FIRST_RANGE, RANGES = 13.5, 8  # int4: ranges tried, in steps of a half


class Quantized(NamedTuple):
    """A matrix [N, K] float32 on its grid, and how many k of an activation row share a scale.

    0: all do, and the row is spread first. Then K is filled up to a multiple of 32, where rounding leaves something in ``weight``, too.
    """

    weight: torch.Tensor
    group: int

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, K] act → [n, N] float32: x is put on its grid first."""
        x = eight_bits(x.float(), self.group) if self.group else _spread_eight_bits(x.float())
        return torch.nn.functional.linear(x, self.weight)


def eight_bits(x: torch.Tensor, group: int) -> torch.Tensor:
    """Each group of the last dimension (the last may be short) on 255 symmetric steps of its largest magnitude / 127."""
    return torch.cat([_eight_bits(part) for part in x.split(group, dim=-1)], dim=-1)


def int8(weight: torch.Tensor) -> Quantized:
    """One scale for each row of the matrix, and of the activations; both are spread."""
    return Quantized(_spread_eight_bits(weight), 0)


def int4(weight: torch.Tensor, step: int) -> Quantized:
    """16 steps from a minimum, both by group of ``step``: the best of several ranges, each refined by least squares."""
    return Quantized(torch.cat([_four_bits(part, step == 32) for part in weight.split(step, dim=-1)], dim=-1), step)


def _spread_eight_bits(x: torch.Tensor) -> torch.Tensor:
    return spread(_eight_bits(spread(torch.nn.functional.pad(x, (0, -x.shape[-1] % 32)))) / 32)


def _eight_bits(x: torch.Tensor) -> torch.Tensor:
    top = x.abs().amax(-1, keepdim=True)
    codes = torch.where(top >= LEAST, (x * (127.0 / top)).round(), 0.0)
    return torch.where(top.isfinite(), codes * (top / 127.0), torch.nan)


def _four_bits(x: torch.Tensor, half: bool) -> torch.Tensor:
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    best, least = x, torch.full_like(low, torch.inf)
    for turn in range(-1, RANGES):
        scale, minimum = (high - low) / (15.0 if turn < 0 else FIRST_RANGE + 0.5 * turn), low
        if turn >= 0:
            scale, minimum = _least_squares(x, _codes(x, scale, minimum), scale, minimum)
        if half:
            scale, minimum = scale.half().float(), minimum.half().float()
        found = _codes(x, scale, minimum) * scale + minimum
        error = (found - x).square().sum(-1, keepdim=True)
        best, least = torch.where(error < least, found, best), torch.minimum(error, least)
    return best


def _codes(x: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    return torch.where(scale > 0, ((x - minimum) / scale).round().clamp(0, 15), 0.0)


def _least_squares(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    n, sq, sx = x.shape[-1], q.sum(-1, keepdim=True), x.sum(-1, keepdim=True)
    qq, qx = q.square().sum(-1, keepdim=True), (q * x).sum(-1, keepdim=True)
    det = n * qq - sq * sq
    return torch.where(det > 0, (n * qx - sq * sx) / det, scale), torch.where(det > 0, (sx * qq - sq * qx) / det, minimum)
