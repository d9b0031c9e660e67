"""Weights in few bits against independent computations of what each storage holds."""

import ml_dtypes
import numpy as np
import pytest
import torch

from lightning_thunder_strategy.precision.storage import (
    STORAGES,
    VALUES,
    decode,
    encode,
    pack,
    resolve_storage,
    stored_bytes,
    unpack,
)

BITS = {"int8": 8.125, "int4": 4.5, "nf4": 4.5, "fp6": 6.25, "nvfp4": 4.5}  # a number, scales included, k = 256


def normal(rows: int = 24, columns: int = 256) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_packing_keeps_every_code_and_no_bit_between(bits: int) -> None:
    codes = (torch.arange(4 * 64) % (1 << bits)).to(torch.uint8).view(4, 64)
    packed = pack(codes, bits)
    assert packed.shape == (4, 64 * bits // 8)
    assert torch.equal(unpack(packed, bits), codes)
    number = int.from_bytes(bytes(packed[1].tolist()), "little")
    assert [(number >> (bits * index)) & ((1 << bits) - 1) for index in range(64)] == codes[1].tolist()


@pytest.mark.parametrize("name", STORAGES)
def test_sizes_and_that_storing_again_changes_nothing(name: str) -> None:
    weight, storage = normal(), STORAGES[name]
    parts = encode(weight, storage)
    assert stored_bytes(parts) * 8 / weight.numel() == pytest.approx(BITS[name], abs=0.01)
    value = decode(parts, storage, torch.float32)
    assert torch.equal(decode(encode(value, storage), storage, torch.float32), value)


def test_int8_is_the_nearest_of_254_steps_of_each_row() -> None:
    weight = normal()
    value = decode(encode(weight, STORAGES["int8"]), STORAGES["int8"], torch.float32)
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((value - weight).abs() <= step / 2 * 1.0001).all()
    assert torch.equal((value / step).round().abs().amax(dim=1), torch.full((24,), 127.0))


def test_int4_is_within_half_a_step_of_each_group() -> None:
    weight = normal() + 3  # far from symmetric
    value = decode(encode(weight, STORAGES["int4"]), STORAGES["int4"], torch.float32)
    groups = weight.unflatten(1, (-1, 64))
    width = groups.amax(2) - groups.amin(2)
    error = (value - weight).abs().unflatten(1, (-1, 64)).amax(2)
    rounding = groups.abs().amax(2) / 2**8  # of the smallest number and of the step, to bfloat16
    assert (error <= width / 30 + 2 * rounding).all() and (error > width / 60).any()


def test_nf4_has_the_published_levels_and_takes_the_nearest() -> None:
    """Levels as printed in appendix E of https://arxiv.org/abs/2305.14314."""
    published = [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]  # fmt: skip
    np.testing.assert_allclose(VALUES["nf4"], published, atol=3e-7)
    weight = normal()
    value = decode(encode(weight, STORAGES["nf4"]), STORAGES["nf4"], torch.float32).unflatten(1, (-1, 64))
    groups = weight.unflatten(1, (-1, 64))
    table = torch.tensor(VALUES["nf4"]) * groups.abs().amax(2)[..., None]
    nearest = (groups[..., None] - table[:, :, None]).abs().amin(3)
    torch.testing.assert_close((value - groups).abs(), nearest, rtol=1e-4, atol=1e-6)


def test_codes_of_floats_are_their_bits() -> None:
    for name, dtype in (("fp6", ml_dtypes.float6_e2m3fn), ("nvfp4", ml_dtypes.float4_e2m1fn)):
        codes = np.arange(len(VALUES[name]), dtype=np.uint8)
        assert codes.view(dtype).astype(np.float32).tolist() == list(VALUES[name])


def test_fp6_is_ml_dtypes_rounding_under_powers_of_two() -> None:
    weight = normal()
    groups = weight.unflatten(1, (-1, 32)).numpy()
    scale = 2.0 ** (np.floor(np.log2(np.abs(groups).max(axis=2, keepdims=True))) - 2)
    wanted = np.clip(groups / scale, -7.5, 7.5).astype(ml_dtypes.float6_e2m3fn).astype(np.float32) * scale
    value = decode(encode(weight, STORAGES["fp6"]), STORAGES["fp6"], torch.float32)
    assert torch.equal(value, torch.from_numpy(wanted).flatten(1).float())


def test_nvfp4_is_ml_dtypes_rounding_under_two_levels_of_scales() -> None:
    weight = normal()
    groups = weight.unflatten(1, (-1, 16)).numpy()
    whole = np.float32(np.abs(groups).max() / np.float32(6 * 448))
    block = (np.abs(groups).max(axis=2, keepdims=True) / 6 / whole).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scale = block * whole
    wanted = np.clip(groups / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
    value = decode(encode(weight, STORAGES["nvfp4"]), STORAGES["nvfp4"], torch.float32)
    close = torch.isclose(value, torch.from_numpy(wanted).flatten(1), rtol=1e-6)
    assert close.float().mean() > 0.999  # the others lie between two numbers, up to float32's rounding


@pytest.mark.parametrize("name", STORAGES)
def test_zeros_extremes_and_other_types(name: str) -> None:
    storage = STORAGES[name]
    weight = torch.zeros(4, 128)
    weight[1, 3], weight[2] = 1e-30, 3e4
    value = decode(encode(weight, storage), storage, torch.float32)
    assert torch.equal(value[0], torch.zeros(128)) and torch.equal(value[3], torch.zeros(128))
    torch.testing.assert_close(value[2], weight[2], rtol=0.05, atol=0)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert decode(encode(normal().to(dtype), storage), storage, dtype).dtype == dtype
    for wrong in (float("nan"), float("inf")):
        weight[0, 0] = wrong
        with pytest.raises(ValueError, match="NaN or infinity"):
            encode(weight, storage)


def test_an_unknown_name_lists_those_that_are() -> None:
    with pytest.raises(ValueError, match="'int3' is not known: choose from 'int8', 'int4'"):
        resolve_storage("int3")
