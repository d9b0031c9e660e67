"""Quantised matrices: low-precision values and the scales that give them their size back.

Every matrix here has the dimension that a product sums over last, ``[rows, k]``; blocks lie along it. With ``largest``
the largest number of the format, a scale is ``amax / largest`` over the numbers that share it, so that
``value * scale`` is the matrix again.
"""

from dataclasses import dataclass
from typing import Literal, Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_thunder_strategy.precision.formats import FORMATS, Format, FormatName, cast, power_of_two, round_to

Granularity = Literal["tensor", "row", "1x128", "128x128", "1x32", "1x16", "16x16"]
"""What shares a scale. ``1x32`` has scales that are powers of two (e8m0, as MX formats do), ``1x16`` and ``16x16`` have
scales in e4m3 under one float32 scale of the whole matrix (as NVFP4 does), the others have float32 scales."""

BLOCKS: dict[str, tuple[int, int]] = {"1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32), "1x16": (1, 16),
                                      "16x16": (16, 16)}  # fmt: skip

_SMALLEST = 2.0**-126  # of a scale: its reciprocal is still a normal float32


@dataclass(frozen=True)
class Quantized:
    """A matrix in low precision.

    Attributes:
        values: ``[rows, k]``, padded with zeros to whole blocks; in the format's type, or bfloat16 if torch has none.
        scale: float32: ``[]`` for a tensor, ``[rows, 1]`` for rows, else one for each block, ``[rows/a, k/b]``.
        granularity: What shares a scale.
    """

    values: Tensor
    scale: Tensor
    granularity: Granularity


def quantize(
    x: Tensor,
    format_name: FormatName,
    granularity: Granularity,
    power_of_two_scales: bool = False,
    scale_up: bool = False,
    random: bool = False,
    scale: Optional[Tensor] = None,
) -> Quantized:
    """A matrix in low precision, with scales from its own largest magnitudes.

    NaN or infinity in a matrix makes everything that shares its scale NaN.

    Args:
        x: ``[rows, k]``, any floating type.
        format_name: The format of the values.
        granularity: What shares a scale.
        power_of_two_scales: Round float32 scales up to a power of two, which multiplies exactly.
        scale_up: For ``1x32``: round the scale up, so that nothing saturates
            (https://arxiv.org/abs/2506.08027), instead of down, as the MX specification does.
        random: Round values at random, so that their mean is right (stochastic rounding).
        scale: float32 ``[]``, for ``tensor``: the scale, if it is known from elsewhere. Values beyond it saturate; only
            those that are NaN or infinite become NaN.
    """
    form = FORMATS[format_name]
    x = _padded(x, granularity)
    noise = torch.rand(x.shape, device=x.device, dtype=torch.float32) if random else None
    if scale is not None:
        return Quantized(cast(x.to(torch.float32) * (1.0 / scale), form, noise), scale, "tensor")
    if granularity in ("tensor", "row"):
        amax = x.abs().amax(dim=1, keepdim=True)
        if granularity == "tensor":  # after rows, because a reduction over rows fuses with what makes them
            amax = amax.amax()
        scale = largest_to_scale(amax, form.largest, power_of_two_scales)
        return Quantized(cast(x.to(torch.float32) * (1.0 / scale), form, noise), scale, granularity)
    rows, columns = BLOCKS[granularity]
    blocks = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # [rows/a, a, k/b, b]
    amax = blocks.abs().amax(dim=(1, 3)).to(torch.float32)
    if granularity == "1x32":
        scale = _mx_scale(amax, form, scale_up)
    elif granularity in ("1x16", "16x16"):
        scale = _nv_scale(amax, form)
    else:
        scale = largest_to_scale(amax, form.largest, power_of_two_scales)
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    scaled = (blocks.to(torch.float32) * inverse[:, None, :, None]).flatten(2, 3).flatten(0, 1)
    return Quantized(cast(scaled, form, noise), scale, granularity)


def dequantize(q: Quantized) -> Tensor:
    """The matrix in float32, with padding."""
    values = q.values.to(torch.float32)
    if q.granularity in ("tensor", "row"):
        return values * q.scale
    rows, columns = BLOCKS[q.granularity]
    blocks = values.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return (blocks * q.scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)


def _padded(x: Tensor, granularity: Granularity) -> Tensor:
    """With zeros up to whole blocks."""
    if granularity not in BLOCKS:
        return x
    rows, columns = BLOCKS[granularity]
    return pad_to(x, rows, columns)


def pad_to(x: Tensor, rows: int, columns: int) -> Tensor:
    """A matrix with zeros below and to the right, up to multiples of ``rows`` and ``columns``."""
    below, right = -x.shape[0] % rows, -x.shape[1] % columns
    return F.pad(x, (0, right, 0, below)) if below or right else x


def largest_to_scale(amax: Tensor, largest: float, power_of_two_scales: bool = False) -> Tensor:
    """Float32 scales for numbers up to ``amax`` in a format that holds numbers up to ``largest``."""
    amax = amax.to(torch.float32)
    scale = (amax / largest).clamp(min=_SMALLEST)
    if power_of_two_scales:
        scale = power_of_two(scale, up=True)
    return torch.where(amax == 0, 1.0, scale)


def largest_magnitude(x: Tensor) -> Tensor:
    """Float32 ``[]``; of an empty tensor zero. Taken over rows first: that fuses with what makes them."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return x.abs().amax(-1).amax().to(torch.float32)


def _mx_scale(amax: Tensor, form: Format, up: bool) -> Tensor:
    """MX specification 1.0, section 6.3: the largest power of two in the block over that of the format."""
    if up:
        return power_of_two(amax / form.largest, up=True)
    return power_of_two(amax * 2.0**-form.largest_exponent, up=False)


def _nv_scale(amax: Tensor, form: Format) -> Tensor:
    """Both levels as one number: e4m3 for a block, float32 for the matrix (https://arxiv.org/abs/2509.25149)."""
    e4m3 = FORMATS["e4m3"]
    whole = largest_to_scale(amax.amax(), form.largest * e4m3.largest)
    block = round_to(amax / form.largest * (1.0 / whole), e4m3)
    return block * whole
