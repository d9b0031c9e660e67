"""Which numbers a linear computes with: formats, scales and rounding, and the named choices."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Union, get_args

from lightning_thunder_strategy.compiler.config import check_choice
from lightning_thunder_strategy.compiler.refusals import told_by_the_parser_too
from lightning_thunder_strategy.precision.formats import FormatName
from lightning_thunder_strategy.precision.scaling import Granularity

Scaling = Literal["tensor", "row", "block", "mx", "nvfp4"]
Rounding = Literal["nearest", "stochastic"]
PrecisionName = Literal[
    "fp8", "fp8-rowwise", "fp8-block", "fp8-delayed", "mxfp8", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp4", "nvfp4"
]  # fmt: skip


@told_by_the_parser_too
@dataclass(frozen=True)
class Recipe:
    """How the three products of a linear are computed: output, gradient of the input, gradient of the weight.

    Args:
        input: Format of the input.
        weight: Format of the weight.
        gradient: Format of the output's gradient.
        scaling: What shares a scale. ``"tensor"``: the whole tensor. ``"row"``: each row and column. ``"block"``: 128
            numbers, 128 x 128 of a weight. ``"mx"``: 32 numbers, scales are powers of two. ``"nvfp4"``: 16 numbers,
            16 x 16 of a weight, scales in e4m3 under one of the whole tensor.
        power_of_two_scales: Round float32 scales up to powers of two (``"tensor"``, ``"row"``, ``"block"``).
        scale_up: Round ``"mx"`` scales up, so that nothing saturates, instead of down as the specification does.
        gradient_rounding: ``"nearest"``, or ``"stochastic"``: at random with the right mean.
        hadamard: Multiply both sides of the weight's gradient by a random Hadamard matrix of 16 x 16, which spreads
            outliers and leaves the product as it is.
        min_features: Linears with fewer input or output features are left alone.
        amax_history_len: Delayed scaling (``"tensor"``): in training a scale follows from the largest magnitude in this
            many optimizer steps before, instead of from the tensor itself (0).

    Raises:
        ValueError: If a value is not allowed.
    """

    input: FormatName = "e4m3"
    weight: FormatName = "e4m3"
    gradient: FormatName = "e5m2"
    scaling: Scaling = "tensor"
    power_of_two_scales: bool = False
    scale_up: bool = False
    gradient_rounding: Rounding = "nearest"
    hadamard: bool = False
    min_features: int = 128
    amax_history_len: int = 0

    def __post_init__(self) -> None:
        for name in ("input", "weight", "gradient"):
            check_choice(name, getattr(self, name), get_args(FormatName))
        check_choice("scaling", self.scaling, get_args(Scaling))
        check_choice("gradient_rounding", self.gradient_rounding, get_args(Rounding))
        for name in ("power_of_two_scales", "scale_up", "hadamard"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed: choose True or False.")
        if not isinstance(self.min_features, int) or isinstance(self.min_features, bool) or self.min_features < 1:
            raise ValueError(f"min_features={self.min_features!r} is not allowed: choose a whole number from 1.")
        length = self.amax_history_len
        if not isinstance(length, int) or isinstance(length, bool) or length < 0:
            raise ValueError(f"amax_history_len={length!r} is not allowed: choose a whole number from 0.")
        if length and self.scaling != "tensor":
            raise ValueError(
                f"amax_history_len={length} is not allowed with scaling={self.scaling!r}: only with scaling='tensor'."
            )
        if self.power_of_two_scales and self.scaling in ("mx", "nvfp4"):
            raise ValueError(
                f"power_of_two_scales=True is not allowed with scaling={self.scaling!r}, whose scales have a format of "
                "their own: leave it out."
            )
        if self.scale_up and self.scaling != "mx":
            raise ValueError(f"scale_up=True is not allowed with scaling={self.scaling!r}: only with scaling='mx'.")
        if self.hadamard and self.scaling not in ("mx", "nvfp4"):
            raise ValueError(
                f"hadamard=True is not allowed with scaling={self.scaling!r}: only with 'mx' and 'nvfp4', whose blocks "
                "are small."
            )

    @property
    def name(self) -> str:
        """The name that stands for this recipe, or a description of it."""
        alike = replace(self, min_features=Recipe.min_features)
        known = next((name for name, recipe in RECIPES.items() if recipe == alike), None)
        delayed = ", delayed" if self.amax_history_len else ""
        return known or f"{self.input}/{self.weight}/{self.gradient} {self.scaling}{delayed}"

    @property
    def activations(self) -> Granularity:
        """What shares a scale in inputs and gradients."""
        kinds: dict[str, Granularity] = {"tensor": "tensor", "row": "row", "block": "1x128", "mx": "1x32"}
        return kinds.get(self.scaling, "1x16")

    @property
    def weights(self) -> Granularity:
        """What shares a scale in weights."""
        kinds: dict[str, Granularity] = {"block": "128x128", "nvfp4": "16x16"}
        return kinds.get(self.scaling, self.activations)

    def arguments(self) -> dict[str, Any]:
        """The arguments of :func:`~lightning_thunder_strategy.precision.linear.scaled_linear` that stand for it."""
        more = {field.name: getattr(self, field.name) for field in fields(self) if field.name in _OPTIONS}
        changed = {name: value for name, value in more.items() if value != getattr(Recipe, name)}
        return {"formats": (self.input, self.weight, self.gradient), "scaling": self.scaling, **changed}


_OPTIONS = ("power_of_two_scales", "scale_up", "gradient_rounding", "hadamard")

RECIPES: dict[str, Recipe] = {
    # One scale a tensor, e5m2 for the wider range of gradients: https://arxiv.org/abs/2209.05433
    "fp8": Recipe(),
    "fp8-rowwise": Recipe(gradient="e4m3", scaling="row", power_of_two_scales=True),
    # DeepSeek-V3, section 3.3: https://arxiv.org/abs/2412.19437
    "fp8-block": Recipe(gradient="e4m3", scaling="block"),
    # NVIDIA Transformer Engine's DelayedScaling: see precision/delayed.py
    "fp8-delayed": Recipe(amax_history_len=1024),
    # https://arxiv.org/abs/2506.08027: e4m3 for all tensors, scales rounded up
    "mxfp8": Recipe(gradient="e4m3", scaling="mx", scale_up=True),
    # OCP Microscaling Formats specification 1.0; one format for all tensors, as in https://arxiv.org/abs/2310.10537
    "mxfp6-e2m3": Recipe("e2m3", "e2m3", "e2m3", "mx"),
    "mxfp6-e3m2": Recipe("e3m2", "e3m2", "e3m2", "mx"),
    # https://arxiv.org/abs/2502.20586
    "mxfp4": Recipe("e2m1", "e2m1", "e2m1", "mx", gradient_rounding="stochastic", hadamard=True),
    # https://arxiv.org/abs/2509.25149
    "nvfp4": Recipe("e2m1", "e2m1", "e2m1", "nvfp4", gradient_rounding="stochastic", hadamard=True),
}


def resolve_recipe(precision: Union[str, Recipe]) -> Recipe:
    """A recipe by name, or as it is.

    Raises:
        ValueError: If there is no such name; the message lists those that there are.
    """
    if isinstance(precision, Recipe):
        return precision
    check_choice("precision", precision, tuple(RECIPES))
    return RECIPES[precision]
