"""Weights stored in few bits: whole numbers that name values, packed into bytes, and a scale for each group.

A matrix is ``[rows, k]`` with the dimension that a product sums over last; groups lie along it.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_thunder_strategy.precision.formats import FORMATS, FormatName
from lightning_thunder_strategy.precision.scaling import largest_to_scale, quantize

StorageName = Literal["int8", "int4", "nf4", "fp6", "nvfp4"]


@dataclass(frozen=True)
class Storage:
    """How a weight is stored.

    Attributes:
        name: Such as ``"nf4"``.
        bits: Bits of one number, packed.
        group: Numbers that share a scale; 0: a whole row.
    """

    name: StorageName
    bits: int
    group: int

    @property
    def multiple(self) -> int:
        """What the number of input features must be a multiple of."""
        return self.group or 8 // self.bits


STORAGES: dict[str, Storage] = {
    item.name: item
    for item in (
        Storage("int8", 8, 0),
        Storage("int4", 4, 64),
        Storage("nf4", 4, 64),
        Storage("fp6", 6, 32),
        Storage("nvfp4", 4, 16),
    )
}
_FLOATS: dict[str, FormatName] = {"fp6": "e2m3", "nvfp4": "e2m1"}


def resolve_storage(name: str) -> Storage:
    """The storage of this name.

    Raises:
        ValueError: If there is none, with those that are.
    """
    if name not in STORAGES:
        raise ValueError(f"storage={name!r} is not known: choose from {', '.join(map(repr, get_args(StorageName)))}.")
    return STORAGES[name]


def _values(name: StorageName) -> tuple[float, ...]:
    """The value of each code, for storages whose codes are not whole numbers themselves.

    ``nf4``: the 16 levels of "QLoRA" (https://arxiv.org/abs/2305.14314, section 3 and appendix E): quantiles of the
    normal distribution that are equally likely, eight above zero, seven below, and zero, scaled to [-1, 1]. ``fp6`` and
    ``nvfp4``: the numbers of e2m3 and e2m1; the first bit of a code is the sign.
    """
    if name == "nf4":
        last = 0.5 * (1 - 1 / 30 + 1 - 1 / 32)  # the outermost quantile: the mean for 15 and for 16 levels
        above = torch.special.ndtri(torch.linspace(last, 0.5, 9, dtype=torch.float64)[:-1])
        below = -torch.special.ndtri(torch.linspace(last, 0.5, 8, dtype=torch.float64)[:-1])
        levels = torch.cat([below, torch.zeros(1, dtype=torch.float64), above]).sort().values
        return tuple((levels / levels.max()).tolist())
    form = FORMATS[_FLOATS[name]]
    count = 1 << (form.bits - 1)
    positive = []
    for code in range(count):
        exponent, mantissa = code >> form.mantissa_bits, code & ((1 << form.mantissa_bits) - 1)
        fraction = mantissa / (1 << form.mantissa_bits) + (exponent > 0)
        positive.append(fraction * 2.0 ** (max(exponent, 1) - 1 + form.smallest_exponent))
    return (*positive, *(-value for value in positive))


VALUES: dict[str, tuple[float, ...]] = {name: _values(name) for name in ("nf4", "fp6", "nvfp4")}
"""The value of each code."""


def encode(weight: Tensor, storage: Storage) -> dict[str, Tensor]:
    """A matrix in few bits.

    ``int8``: symmetric, one float32 scale a row. ``int4``: 16 equal steps from the smallest to the largest number of a
    group, both in bfloat16. ``nf4``: a float32 scale a group. ``fp6``: e2m3 under powers of two (OCP Microscaling
    Formats 1.0). ``nvfp4``: e2m1 under e4m3 scales and one float32 scale (https://arxiv.org/abs/2509.25149).

    Args:
        weight: ``[rows, k]``, any floating type; ``k`` a multiple of ``storage.multiple``.
        storage: How.

    Returns:
        ``codes`` (uint8, ``[rows, k * bits / 8]``) and what gives the numbers their size.

    Raises:
        ValueError: If the matrix holds NaN or infinity, which no storage has.
    """
    weight = weight.detach().to(torch.float32)
    if not weight.isfinite().all():
        raise ValueError("NaN or infinity cannot be stored in few bits.")
    if storage.name == "int8":
        scale = largest_to_scale(weight.abs().amax(dim=1, keepdim=True), 127.0)
        codes = (weight / scale).round().clamp(-127, 127) + 128
        return {"codes": codes.to(torch.uint8), "scale": scale}
    if storage.name in _FLOATS:
        return _encode_floats(weight, storage)
    groups = weight.unflatten(1, (-1, storage.group))
    if storage.name == "int4":
        smallest = groups.amin(dim=2, keepdim=True).to(torch.bfloat16)
        step = ((groups.amax(dim=2, keepdim=True) - smallest.float()) / 15).to(torch.bfloat16)
        steps = (groups - smallest.float()) / torch.where(step == 0, 1.0, step.float())
        codes = steps.round().clamp(0, 15)
        extra = {"scale": step.squeeze(2), "smallest": smallest.squeeze(2)}
    else:
        scale = largest_to_scale(groups.abs().amax(dim=2, keepdim=True), 1.0)
        codes = _nearest(groups / scale, VALUES[storage.name])
        extra = {"scale": scale.squeeze(2)}
    return {"codes": pack(codes.flatten(1).to(torch.uint8), storage.bits), **extra}


def _encode_floats(weight: Tensor, storage: Storage) -> dict[str, Tensor]:
    granularity = "1x32" if storage.group == 32 else "1x16"
    made = quantize(weight, _FLOATS[storage.name], granularity)  # type: ignore[arg-type]
    values = torch.tensor(VALUES[storage.name], device=weight.device)
    positive = values[: len(values) // 2]
    codes = torch.searchsorted(positive, made.values.float().abs())
    codes = codes + torch.where(made.values.float() < 0, len(positive), 0)
    packed = pack(codes.to(torch.uint8), storage.bits)
    if storage.name == "fp6":
        return {"codes": packed, "scale": (made.scale.log2().round() + 127).to(torch.uint8)}  # e8m0
    whole = largest_to_scale(weight.abs().amax(), FORMATS["e2m1"].largest * FORMATS["e4m3"].largest)
    return {"codes": packed, "scale": (made.scale / whole).to(torch.float8_e4m3fn).view(torch.uint8), "whole": whole}


def decode(parts: dict[str, Tensor], storage: Storage, dtype: torch.dtype) -> Tensor:
    """The matrix that :func:`encode` stored, ``[rows, k]`` in ``dtype``. Plain operations, which executors fuse."""
    codes = unpack(parts["codes"], storage.bits)
    if storage.name == "int8":
        return ((codes.to(torch.float32) - 128) * parts["scale"]).to(dtype)
    groups = codes.unflatten(1, (-1, storage.group))
    scale = parts["scale"]
    if storage.name == "int4":
        smallest = parts["smallest"].to(torch.float32)
        return (
            (groups.to(torch.float32) * scale.to(torch.float32)[..., None] + smallest[..., None]).flatten(1).to(dtype)
        )
    if storage.name == "fp6":
        scale = (scale.to(torch.int32) << 23).view(torch.float32)  # e8m0 is the exponent of a float32
    elif storage.name == "nvfp4":
        scale = scale.view(torch.float8_e4m3fn).to(torch.float32) * parts["whole"]
    table = torch.tensor(VALUES[storage.name], dtype=torch.float32, device=codes.device)
    return (table[groups.to(torch.int32)] * scale[..., None]).flatten(1).to(dtype)


def _nearest(x: Tensor, values: tuple[float, ...]) -> Tensor:
    """The index of the value nearest to each element; ``values`` rise."""
    table = torch.tensor(values, dtype=torch.float32, device=x.device)
    return torch.bucketize(x, (table[1:] + table[:-1]) / 2)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes of 8, 6 or 4 bits (uint8, ``[rows, k]``) without the bits between them, the first code lowest."""
    if bits == 8:
        return codes
    if bits == 4:
        low, high = codes.unflatten(1, (-1, 2)).unbind(2)
        return low | (high << 4)
    a, b, c, d = codes.unflatten(1, (-1, 4)).unbind(2)  # four codes in three bytes
    return torch.stack([a | (b << 6), (b >> 2) | (c << 4), (c >> 4) | (d << 2)], dim=2).flatten(1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """What :func:`pack` packed."""
    if bits == 8:
        return packed
    if bits == 4:
        return torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)
    x, y, z = packed.unflatten(1, (-1, 3)).unbind(2)
    codes = [x & 63, (x >> 6) | ((y & 15) << 2), (y >> 4) | ((z & 3) << 4), z >> 2]
    return torch.stack(codes, dim=2).flatten(1)


def stored_bytes(parts: dict[str, Tensor]) -> int:
    """Bytes in memory and on disk."""
    return sum(part.numel() * part.element_size() for part in parts.values())
