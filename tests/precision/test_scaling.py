"""Quantised matrices against numpy in float64 with ml_dtypes' rounding."""

import ml_dtypes
import numpy as np
import pytest
import torch

from lightning_thunder_strategy.precision.formats import FORMATS
from lightning_thunder_strategy.precision.hadamard import hadamard, transform
from lightning_thunder_strategy.precision.scaling import BLOCKS, dequantize, quantize
from tests.precision.test_formats import ORACLES

KINDS = ["tensor", "row", *BLOCKS]


def matrix(rows: int = 40, columns: int = 300, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-6, 6, (rows, 1), generator=generator))
    return torch.randn(rows, columns, generator=generator) * spread


def reference(x: torch.Tensor, name: str, kind: str) -> np.ndarray:
    """Block by block, in float64, with scales rounded as the formats say."""
    form, data = FORMATS[name], x.double().numpy()
    result = np.zeros_like(data)
    rows, columns = {"tensor": data.shape, "row": (1, data.shape[1])}.get(kind) or BLOCKS[kind]
    whole = np.float32(np.abs(data).max()) / np.float32(form.largest * 448.0)
    for i in range(0, data.shape[0], rows):
        for j in range(0, data.shape[1], columns):
            block = data[i : i + rows, j : j + columns]
            amax = np.abs(block).max()
            if kind == "1x32":
                scale = 2.0 ** (np.floor(np.log2(amax)) - form.largest_exponent)
            elif kind in ("1x16", "16x16"):
                level = np.float32(amax) / np.float32(form.largest) * (np.float32(1) / whole)
                scale = np.float64(np.float32(level.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * whole))
            else:
                scale = np.float64(np.float32(amax) / np.float32(form.largest))
            inverse = np.float32(1) / np.float32(scale)
            scaled = block.astype(np.float32) * inverse
            rounded = np.clip(scaled, -form.largest, form.largest).astype(ORACLES[name]).astype(np.float64)
            result[i : i + rows, j : j + columns] = rounded * scale
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_same_as_the_reference(name: str, kind: str) -> None:
    x = matrix()
    found = dequantize(quantize(x, name, kind))[: x.shape[0], : x.shape[1]]
    expected = reference(x, name, kind)
    # The last bit of a float32 scale may differ between numpy and torch; a value may then round the other way.
    differs = ~np.isclose(found.numpy(), expected, rtol=3e-7, atol=0)
    assert differs.mean() < 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["e4m3", "e2m1"])
def test_nan_and_infinity_make_nan_of_what_shares_the_scale(name: str, kind: str, bad: float) -> None:
    x = matrix(160, 256)
    x[3, 5] = bad
    found = dequantize(quantize(x, name, kind))
    assert found[3, 5].isnan()
    alone = kind not in ("tensor", "1x16", "16x16")  # which have one scale for all, alone or besides
    assert found[-1, -1].isnan() == (not alone)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_tiny_numbers(name: str, kind: str) -> None:
    assert not dequantize(quantize(torch.zeros(16, 128), name, kind)).any()
    tiny = torch.full((16, 128), 1e-44)
    assert dequantize(quantize(tiny, name, kind)).isfinite().all()
    half = torch.zeros(16, 128)
    half[:, :64] = matrix(16, 64)
    assert not dequantize(quantize(half, name, kind))[:, 64:].any()


def test_power_of_two_scales_never_saturate() -> None:
    q = quantize(matrix(), "e4m3", "row", power_of_two_scales=True)
    assert torch.equal(q.scale.frexp().mantissa, torch.full_like(q.scale, 0.5))
    assert q.values.float().abs().max() <= 448
    up = quantize(matrix(), "e4m3", "1x32", scale_up=True)
    assert (dequantize(up)[:40, :300] - matrix()).abs().div(matrix().abs()).max() < 0.07  # half a step of e4m3


def test_transposed_square_blocks_hold_the_same_numbers() -> None:
    x = matrix(64, 96)
    there, back = dequantize(quantize(x, "e2m1", "16x16")), dequantize(quantize(x.t(), "e2m1", "16x16"))
    assert torch.equal(there, back.t())


def test_random_rounding_is_right_in_the_mean() -> None:
    torch.manual_seed(0)
    x = matrix(16, 64)
    mean = torch.stack([dequantize(quantize(x, "e2m1", "1x16", random=True)) for _ in range(500)]).mean(0)
    nearest = dequantize(quantize(x, "e2m1", "1x16"))
    inside = x.abs() < 0.9 * x.abs().unflatten(1, (-1, 16)).amax(2).repeat_interleave(16, 1)  # not saturated
    assert (mean - x)[inside].abs().mean() < 0.2 * (nearest - x)[inside].abs().mean()


def test_hadamard_is_orthogonal_and_keeps_products() -> None:
    h = hadamard(torch.device("cpu"))
    assert torch.equal(h @ h.t(), torch.eye(16))
    assert h.abs().unique().tolist() == [0.25]
    a, b = matrix(8, 64, 1), matrix(8, 64, 2)
    torch.testing.assert_close(transform(a) @ transform(b).t(), a @ b.t(), rtol=1e-4, atol=1e-4)
    outlier = torch.zeros(1, 16)
    outlier[0, 7] = 16.0
    assert transform(outlier).abs().max() == 4.0
