"""The product of two quantised matrices: by the device's own low-precision units, or emulated."""

from functools import lru_cache
from typing import Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_thunder_strategy.compiler import _torch_compat
from lightning_thunder_strategy.compiler.events import first_line
from lightning_thunder_strategy.precision.formats import FORMATS
from lightning_thunder_strategy.precision.recipe import Recipe
from lightning_thunder_strategy.precision.scaling import Quantized, dequantize, pad_to, quantize

_MULTIPLE = 16  # of the two dimensions of the second operand, on tensor cores


def multiply(a: Quantized, b: Quantized, dtype: torch.dtype, native: bool, fast: bool = False) -> Tensor:
    """``a @ b.T`` as ``[rows of a, rows of b]``.

    Both ways multiply the same numbers; sums are taken in float32 in another order. Emulation multiplies in float32.

    Args:
        a: ``[m, k]``.
        b: ``[n, k]``.
        dtype: Of the result.
        native: Use ``torch._scaled_mm`` or ``torch.nn.functional.scaled_mm``; see :func:`why_not_native`.
        fast: Allow tensor cores to add up with fewer bits (Hopper), as is usual for outputs and not for gradients.
    """
    if not native:
        if a.granularity in ("tensor", "row") and b.granularity in ("tensor", "row"):
            return (a.values.to(torch.float32) @ b.values.to(torch.float32).t() * a.scale * b.scale.t()).to(dtype)
        return (dequantize(a) @ dequantize(b).t()).to(dtype)
    rows = a.values.shape[0], b.values.shape[0]
    if a.granularity in ("tensor", "row"):
        result = _whole_scales(a, b, dtype, fast)
    else:
        result = _block_scales(a, b, dtype, fast)
    return result if result.shape == rows else result[: rows[0], : rows[1]]


def _whole_scales(a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool) -> Tensor:
    """Scales that do not change along the sum: one for the matrix or one for each row."""
    first, second = _pad8(a.values, 1, _MULTIPLE), _pad8(b.values, _MULTIPLE, _MULTIPLE)
    scale_b = b.scale
    if b.granularity == "row":
        scale_b = F.pad(scale_b, (0, 0, 0, second.shape[0] - scale_b.shape[0]), value=1.0).t().contiguous()
    return torch._scaled_mm(first, second.t(), scale_a=a.scale, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)


def _block_scales(a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool) -> Tensor:
    """Blocks of 128 along the sum."""
    second = _pad8(b.values, _MULTIPLE, 1)
    if b.granularity == "128x128":
        scale_b = pad_to(b.scale, 1, 4).contiguous()
    else:
        scale_b = F.pad(b.scale, (0, 0, 0, second.shape[0] - b.values.shape[0]), value=1.0).t().contiguous()
    return block_product(a.values, second, a.scale.t().contiguous(), scale_b, b.granularity == "128x128", dtype, fast)


def multiply_blocks(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, square: bool, dtype: torch.dtype, fast: bool
) -> Tensor:
    """``torch.nn.functional.scaled_mm`` for ``a`` in blocks of 128, and ``b`` too or in squares.

    Args:
        a: ``[m, k]``.
        b: ``[n, k]``.
        scale_a: ``[k/128, m]``: in memory the rows lie next to each other.
        scale_b: ``[k/128, n]``, or for squares ``[n/128, k/128 up to a multiple of four]``.
        square: Whether ``b`` has one scale for 128 x 128.
        dtype: Of the result.
        fast: See :func:`multiply`.
    """
    line, block = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    scale_a, scale_b = (scale.as_strided(scale.shape[::-1], (1, scale.shape[1])) for scale in (scale_a, scale_b))
    kind_b = block if square else line
    return F.scaled_mm(a, b.t(), scale_a, line, scale_b, kind_b, output_dtype=dtype, use_fast_accum=fast)


# An operator of its own: where Inductor has no lowering for torch's (2.11), it would choose the arguments' layout.
block_product = torch.library.custom_op("lightning_thunder_strategy::block_product", multiply_blocks, mutates_args=())


@block_product.register_fake
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, square: bool, dtype: torch.dtype, fast: bool) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


def _pad8(values: Tensor, rows: int, columns: int) -> Tensor:
    """Zeros of an 8-bit type are zero bytes."""
    return pad_to(values.view(torch.uint8), rows, columns).view(values.dtype)


# ---------------------------------------------------------------------------------------------------------- what works


def why_not_native(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> Optional[str]:
    """``None`` if the device multiplies with this recipe's formats and scales itself, else the reason why not.

    On a GPU found by multiplying small matrices once a process and comparing with the emulation. Torch has such
    products on CPU too, but no CPU has units for them: e4m3 by e4m3 with one scale a tensor was 300 times slower
    than emulation.
    """
    if device.type == "cpu":
        return "a CPU has no units for it"
    if recipe.scaling in ("mx", "nvfp4"):
        return f"there is no native product for {recipe.name} in this version"
    if any(FORMATS[name].dtype is None for name in (recipe.input, recipe.weight, recipe.gradient)):
        return "torch has no type for its formats"
    return try_products(recipe, device.type, device.index, dtype)


@lru_cache(maxsize=64)
def try_products(recipe: Recipe, kind: str, index: Optional[int], dtype: torch.dtype) -> Optional[str]:
    """Why torch's products of a recipe cannot be used on a device, or ``None`` if they give the right values."""
    device = torch.device(kind, index)
    products = (
        (recipe.input, recipe.activations, recipe.weight, recipe.weights, True),
        (recipe.gradient, recipe.activations, recipe.weight, recipe.weights, False),
        (recipe.gradient, recipe.activations, recipe.input, recipe.activations, False),
    )
    with _torch_compat.outside_fake_mode(), torch.no_grad(), torch.autocast(kind, enabled=False):
        generator = torch.Generator().manual_seed(0)
        x, y = (torch.randn(size, generator=generator).to(device) for size in ((96, 416), (272, 416)))
        for format_a, kind_a, format_b, kind_b, fast in products:
            a = quantize(x, format_a, kind_a, recipe.power_of_two_scales)
            b = quantize(y, format_b, kind_b, recipe.power_of_two_scales)
            expected = multiply(a, b, torch.float32, native=False)[:96, :272]
            try:
                found = multiply(a, b, dtype, native=True, fast=fast)[:96, :272].to(torch.float32)
            except Exception as error:
                return f"torch {torch.__version__} refuses its products on {kind} ({first_line(error).rstrip('.')})"
            if (found - expected).abs().max() > 0.01 * expected.abs().max():
                return f"torch {torch.__version__} gives other values on {kind}"
    return None
