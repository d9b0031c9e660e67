"""A linear in low precision, forward and backward, as plain torch operations."""

from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from lightning_thunder_strategy.precision.formats import FormatName
from lightning_thunder_strategy.precision.hadamard import SIZE, transform
from lightning_thunder_strategy.precision.product import multiply
from lightning_thunder_strategy.precision.recipe import Recipe, Scaling
from lightning_thunder_strategy.precision.scaling import Granularity, Quantized, largest_magnitude, pad_to, quantize


def scaled_linear(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    formats: tuple[FormatName, FormatName, FormatName],
    scaling: Scaling,
    native: bool,
    dtype: torch.dtype,
    weight_values: Optional[Tensor] = None,
    weight_scales: Optional[Tensor] = None,
    weight_index: int = 0,
    scales: Optional[Tensor] = None,
    gradient_amax: Optional[Tensor] = None,
    **options: Any,
) -> Tensor:
    """``F.linear`` whose three products are computed in low precision. The bias is added outside of them.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``.
        bias: ``[out]``.
        formats: Of the input, the weight and the gradient.
        scaling: What shares a scale, see :class:`~lightning_thunder_strategy.precision.recipe.Recipe`.
        native: By the device's own products, or emulated.
        dtype: Of the result, as autocast and the arguments would make it.
        weight_values: The weight in its format, if it was cast before (``scaling="tensor"``): then ``weight`` only says
            what the gradient belongs to.
        weight_scales: The scales of several weights.
        weight_index: Which of them is this weight's.
        scales: Delayed scaling: float32 ``[3]``, the scales of input, weight and gradient.
        gradient_amax: Delayed scaling: float32 ``[]``; its gradient is the largest magnitude of the output's gradient.
        options: More of the recipe's fields.
    """
    settings = _Settings(Recipe(*formats, scaling, **options), native, dtype)
    flat = x.reshape(-1, x.shape[-1])
    with torch.autocast(x.device.type, enabled=False):
        if flat.shape[0] == 0:
            result = flat.to(dtype) @ weight.to(dtype).t()
        else:
            given = (None, None, None) if scales is None else scales.unbind()
            if weight_scales is not None:
                given = (given[0], weight_scales[weight_index], given[2])
            result = _ScaledLinear.apply(flat, weight, settings, weight_values, gradient_amax, *given)
        if bias is not None:
            result = result + bias.to(dtype)
    return result.reshape(*x.shape[:-1], weight.shape[0])


@dataclass(frozen=True)
class _Settings:
    recipe: Recipe
    native: bool
    dtype: torch.dtype

    def quantize(
        self,
        x: Tensor,
        format_name: FormatName,
        granularity: Granularity,
        random: bool = False,
        scale: Optional[Tensor] = None,
    ) -> Quantized:
        recipe = self.recipe
        return quantize(x, format_name, granularity, recipe.power_of_two_scales, recipe.scale_up, random, scale)

    def multiply(self, a: Quantized, b: Quantized, rows: int, columns: int, fast: bool = False) -> Tensor:
        result = multiply(a, b, self.dtype, self.native, fast)
        return result if result.shape == (rows, columns) else result[:rows, :columns]


class _ScaledLinear(torch.autograd.Function):
    """``x @ weight.T`` for ``x`` of two dimensions."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        settings: _Settings,
        values: Optional[Tensor],
        gradient_amax: Optional[Tensor],
        x_scale: Optional[Tensor],
        weight_scale: Optional[Tensor],
        gradient_scale: Optional[Tensor],
    ) -> Tensor:
        recipe = settings.recipe
        a = settings.quantize(x, recipe.input, recipe.activations, scale=x_scale)
        if values is not None and weight_scale is not None:
            b = Quantized(values, weight_scale, "tensor")
        else:
            b = settings.quantize(weight, recipe.weight, recipe.weights, scale=weight_scale)
        ctx.settings = settings
        if recipe.scaling == "tensor":  # the transposed matrices are made of the same numbers
            ctx.save_for_backward(a.values, a.scale, b.values, b.scale, gradient_scale)
        else:
            ctx.save_for_backward(x, weight)
        ctx.types = x.dtype, weight.dtype
        return settings.multiply(a, b, x.shape[0], weight.shape[0], fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Optional[Tensor], ...]:
        way = _tensor_backward if ctx.settings.recipe.scaling == "tensor" else _other_backward
        with torch.autocast(gradient.device.type, enabled=False):
            of_x, of_weight = way(ctx, gradient)
        types = ctx.types
        return (
            None if of_x is None else of_x.to(types[0]),
            None if of_weight is None else of_weight.to(types[1]),
            None,
            None,
            largest_magnitude(gradient) if ctx.needs_input_grad[4] else None,
            None,
            None,
            None,
        )


def _tensor_backward(ctx: Any, gradient: Tensor) -> tuple[Optional[Tensor], Optional[Tensor]]:
    settings, recipe = ctx.settings, ctx.settings.recipe
    x, x_scale, weight, weight_scale, gradient_scale = ctx.saved_tensors
    random = recipe.gradient_rounding == "stochastic"
    g = settings.quantize(gradient, recipe.gradient, "tensor", random, gradient_scale)
    of_x = of_weight = None
    if ctx.needs_input_grad[0]:
        w = _transposed(weight, weight_scale)
        of_x = settings.multiply(g, w, gradient.shape[0], weight.shape[1])
    if ctx.needs_input_grad[1]:
        sides = _transposed(g.values, g.scale), _transposed(x, x_scale)
        of_weight = settings.multiply(*sides, weight.shape[0], weight.shape[1])
    return of_x, of_weight


def _transposed(values: Tensor, scale: Tensor) -> Quantized:
    return Quantized(values.t().contiguous(), scale, "tensor")


def _other_backward(ctx: Any, gradient: Tensor) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """Scales along the sum differ in each product, so each matrix is quantised again, across."""
    settings, recipe = ctx.settings, ctx.settings.recipe
    x, weight = ctx.saved_tensors
    random = recipe.gradient_rounding == "stochastic"
    of_x = of_weight = None
    if ctx.needs_input_grad[0]:
        g = settings.quantize(gradient, recipe.gradient, recipe.activations, random)
        w = settings.quantize(weight.t().contiguous(), recipe.weight, recipe.weights)
        of_x = settings.multiply(g, w, gradient.shape[0], weight.shape[1])
    if ctx.needs_input_grad[1]:
        sides = gradient.t().contiguous(), x.t().contiguous()
        if recipe.hadamard:
            sides = tuple(transform(pad_to(side, 1, SIZE)) for side in sides)
        g = settings.quantize(sides[0], recipe.gradient, recipe.activations, random)
        a = settings.quantize(sides[1], recipe.input, recipe.activations)
        of_weight = settings.multiply(g, a, weight.shape[0], weight.shape[1])
    return of_x, of_weight
