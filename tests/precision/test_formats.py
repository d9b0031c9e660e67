"""Rounding against ml_dtypes and torch's own types, for every format."""

import ml_dtypes
import numpy as np
import pytest
import torch

from lightning_thunder_strategy.precision.formats import FORMATS, cast, power_of_two, round_to

ORACLES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


def numbers(name: str) -> torch.Tensor:
    """Every number of the format, every midpoint, both neighbours of those, and numbers of all sizes."""
    grid = grid_of(name)
    middles = (grid[1:] + grid[:-1]) / 2
    near = torch.cat([torch.nextafter(middles, torch.tensor(side)) for side in (float("inf"), float("-inf"))])
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(20000, generator=generator) * 2.0 ** torch.randint(-20, 17, (20000,), generator=generator)
    return torch.cat([grid, middles, near, spread, torch.tensor([0.0, -0.0, 1e-45, 1e30, -1e30])])


def grid_of(name: str) -> torch.Tensor:
    """All finite numbers of the format, by decoding every bit pattern with ml_dtypes."""
    codes = np.arange(2 ** FORMATS[name].bits, dtype=np.uint8)
    values = codes.view(ORACLES[name]).astype(np.float32)
    return torch.from_numpy(np.unique(values[np.isfinite(values)]))


@pytest.mark.parametrize("name", FORMATS)
def test_rounds_as_ml_dtypes(name: str) -> None:
    form = FORMATS[name]
    x = numbers(name)
    expected = x.clamp(-form.largest, form.largest).numpy().astype(ORACLES[name]).astype(np.float32)
    assert torch.equal(round_to(x, form), torch.from_numpy(expected))
    assert torch.equal(cast(x, form).float(), torch.from_numpy(expected))


@pytest.mark.parametrize("name", FORMATS)
def test_arithmetic_equals_hardware_rounding(name: str) -> None:
    """The way without torch's type, forced by noise of one half away from ties, agrees too."""
    form = FORMATS[name]
    x = numbers(name)
    low = round_to(x, form, torch.zeros_like(x))
    grid = grid_of(name)
    clamped = x.clamp(-form.largest, form.largest)
    below = grid[(torch.searchsorted(grid, clamped, right=True) - 1).clamp(min=0)]
    assert torch.equal(low, below)


@pytest.mark.parametrize("name", FORMATS)
def test_attributes_are_those_of_the_format(name: str) -> None:
    form, grid = FORMATS[name], grid_of(name)
    assert grid.max() == form.largest
    assert 2.0**form.largest_exponent <= form.largest < 2.0 ** (form.largest_exponent + 1)
    assert grid[grid > 0].min() == 2.0 ** (form.smallest_exponent - form.mantissa_bits)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("random", [False, True])
def test_nan_and_infinity_are_not_hidden(name: str, random: bool) -> None:
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0])
    noise = torch.full_like(x, 0.25) if random else None
    assert round_to(x, FORMATS[name], noise).isnan().tolist() == [True, True, True, False]
    assert cast(x, FORMATS[name], noise).float().isnan().tolist() == [True, True, True, False]


@pytest.mark.parametrize("name", FORMATS)
def test_random_rounding_has_the_right_mean(name: str) -> None:
    form = FORMATS[name]
    low, high = grid_of(name)[-5:-3].tolist()
    x = torch.full((200_000,), low + 0.3 * (high - low))
    rounded = round_to(x, form, torch.rand(x.shape, generator=torch.Generator().manual_seed(1)))
    assert set(rounded.tolist()) == {low, high}
    assert abs((rounded == high).float().mean().item() - 0.3) < 0.005


def test_scales_are_powers_of_two() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(5000, generator=generator) * 2.0 ** torch.randint(-120, 120, (5000,), generator=generator)
    mantissa, exponent = np.frexp(x.numpy().astype(np.float64))  # x = mantissa * 2**exponent, mantissa in [0.5, 1)
    assert torch.equal(power_of_two(x, up=False), torch.from_numpy(2.0 ** (exponent - 1.0)).float())
    above = torch.from_numpy(np.where(mantissa == 0.5, 2.0 ** (exponent - 1.0), 2.0**exponent)).float()
    assert torch.equal(power_of_two(x, up=True), above)


def test_scales_hold_what_e8m0_holds() -> None:
    codes = np.arange(256, dtype=np.uint8)
    powers = torch.from_numpy(codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    finite = powers[:255]
    assert powers[255].isnan()
    for up in (False, True):
        assert torch.equal(power_of_two(finite, up), finite)
        assert torch.equal(power_of_two(finite, up).to(torch.float8_e8m0fnu).float(), finite)
        edges = power_of_two(torch.tensor([0.0, 1e-45, float("inf"), float("nan"), 3e38]), up)
        assert edges[:2].tolist() == [2.0**-127] * 2
        assert edges[2:4].isnan().all()
        assert edges[4] == 2.0**127
