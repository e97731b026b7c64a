"""Rounding to bfloat16 against torch."""

import numpy as np
import pytest
import torch

from octavo.quant import bf16


def test_every_upper_half_with_every_kind_of_lower_half() -> None:
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    values = (upper[:, None] | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).view(np.float32)
    ours = bf16.to_bits(values)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    nan = np.isnan(values)
    assert np.array_equal(ours[~nan], theirs[~nan])
    assert np.isnan(bf16.from_bits(ours[nan])).all()
    assert (ours[nan] & 0x40).all() and np.array_equal(ours[nan] >> 15, values.view(np.uint32)[nan] >> 31)


def test_random_values_across_pieces() -> None:
    values = np.random.default_rng(1).standard_normal((3, 200_001), dtype=np.float32)
    theirs = torch.from_numpy(values).to(torch.bfloat16)
    assert np.array_equal(bf16.to_bits(values), theirs.view(torch.uint16).numpy())
    assert np.array_equal(bf16.to_bits(values.T), theirs.view(torch.uint16).numpy().T)
    assert np.array_equal(bf16.from_bits(bf16.to_bits(values)), theirs.float().numpy())


def test_there_and_back_is_exact() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    back = bf16.to_bits(bf16.from_bits(bits))
    nan = np.isnan(bf16.from_bits(bits))
    assert np.array_equal(back[~nan], bits[~nan])
    assert np.array_equal(back[nan], bits[nan] | 0x40)


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,)])
def test_small_shapes(shape: tuple[int, ...]) -> None:
    assert bf16.to_bits(np.ones(shape, np.float32)).shape == shape
    assert bf16.from_bits(np.ones(shape, np.uint16)).shape == shape


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="float64"):
        bf16.to_bits(np.ones(3))
    with pytest.raises(TypeError, match="int16"):
        bf16.from_bits(np.ones(3, np.int16))
