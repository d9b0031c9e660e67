"""Number formats of 8, 6 and 4 bits, and rounding to them exactly as hardware does.

Sources: "OCP 8-bit Floating Point Specification (OFP8)" 1.0 for e4m3 and e5m2, and "OCP Microscaling Formats (MX)
Specification" 1.0 for e2m3, e3m2, e2m1 and the scale format e8m0.
"""

from dataclasses import dataclass
from typing import Literal, Optional

import torch
from torch import Tensor

FormatName = Literal["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"]

_F32_BIAS, _F32_MANTISSA = 127, 23


@dataclass(frozen=True)
class Format:
    """One format: a sign, an exponent and a mantissa.

    Attributes:
        name: Such as ``e4m3``: four bits of exponent, three of mantissa.
        mantissa_bits: Bits of mantissa, without the leading one.
        smallest_exponent: Power of two of the smallest normal number; below it the spacing stays.
        largest: The largest finite number. Larger ones saturate to it.
        bits: Bits of one number.
        dtype: Torch's type for it, if it has one.
    """

    name: str
    mantissa_bits: int
    smallest_exponent: int
    largest: float
    bits: int
    dtype: Optional[torch.dtype] = None

    @property
    def largest_exponent(self) -> int:
        """Power of two of the largest finite number."""
        return int(torch.tensor(self.largest).frexp().exponent) - 1


FORMATS: dict[str, Format] = {
    item.name: item
    for item in (
        Format("e4m3", 3, -6, 448.0, 8, torch.float8_e4m3fn),
        Format("e5m2", 2, -14, 57344.0, 8, torch.float8_e5m2),
        Format("e2m3", 3, 0, 7.5, 6),
        Format("e3m2", 2, -2, 28.0, 6),
        Format("e2m1", 1, 0, 6.0, 4),
    )
}


def round_to(x: Tensor, form: Format, noise: Optional[Tensor] = None) -> Tensor:
    """The number of the format nearest to each element, ties to even; saturating.

    NaN stays NaN. Infinity becomes NaN, because a saturated infinity would hide it.

    Args:
        x: float32, any shape.
        form: The format.
        noise: Uniform in [0, 1), the shape of ``x``: round down or up at random instead, so that the mean is ``x``.

    Returns:
        float32, holding only numbers of the format and NaN.
    """
    finite = torch.where(x.abs() == float("inf"), float("nan"), x).clamp(-form.largest, form.largest)
    if form.dtype is not None and noise is None:
        return finite.to(form.dtype).to(torch.float32)
    exponent = (finite.view(torch.int32) >> _F32_MANTISSA) & 0xFF
    exponent = exponent.clamp(min=form.smallest_exponent + _F32_BIAS)
    spacing = ((exponent - form.mantissa_bits) << _F32_MANTISSA).view(torch.float32)
    steps = finite / spacing  # exact: the spacing is a power of two
    rounded = torch.round(steps) if noise is None else torch.floor(steps + noise)
    rounded = (rounded * spacing).clamp(-form.largest, form.largest)
    return torch.where(finite.isnan(), finite, rounded)  # the bits of NaN say nothing of a spacing


def cast(x: Tensor, form: Format, noise: Optional[Tensor] = None) -> Tensor:
    """As :func:`round_to`, in the format's type, or in bfloat16 (which holds its numbers exactly) if torch has none.

    Args:
        x: float32, any shape.
        form: The format.
        noise: As for :func:`round_to`.
    """
    if form.dtype is None:
        return round_to(x, form, noise).to(torch.bfloat16)
    if noise is not None:
        return round_to(x, form, noise).to(form.dtype)
    finite = torch.where(x.abs() == float("inf"), float("nan"), x)
    return finite.clamp(-form.largest, form.largest).to(form.dtype)


def power_of_two(x: Tensor, up: bool) -> Tensor:
    """Positive numbers rounded to a power of two, as the scale format e8m0 stores them (2**-127 to 2**127).

    Args:
        x: float32, not negative.
        up: To the next larger power instead of the next smaller one; a power of two stays.

    Returns:
        float32; NaN for NaN and infinity; 2**-127 for zero.
    """
    bits = x.view(torch.int32)
    exponent = bits >> _F32_MANTISSA
    if up:
        exponent = exponent + ((bits & ((1 << _F32_MANTISSA) - 1)) != 0).to(torch.int32)
        exponent = torch.where(x <= 2.0**-127, 0, exponent)  # a subnormal up to the smallest scale
    exponent = exponent.clamp(0, 254)
    stored = torch.where(exponent == 0, 1 << (_F32_MANTISSA - 1), exponent << _F32_MANTISSA)
    return torch.where(x.isfinite(), stored.view(torch.float32), float("nan"))
