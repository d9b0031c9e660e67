"""The three products of a linear against float64 products of independently rounded matrices."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from lightning_thunder_strategy.precision import product
from lightning_thunder_strategy.precision.hadamard import transform
from lightning_thunder_strategy.precision.linear import scaled_linear
from lightning_thunder_strategy.precision.product import multiply, try_products, why_not_native
from lightning_thunder_strategy.precision.recipe import RECIPES, Recipe, resolve_recipe
from lightning_thunder_strategy.precision.scaling import quantize
from tests.precision.test_scaling import reference

CPU = torch.device("cpu")
NAMES = [name for name in RECIPES if name != "fp8-delayed"]  # alone it computes as fp8: see test_delayed.py


def inputs(tokens: int = 24, features: int = 160, out: int = 96) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = (tokens, features), (out, features), (tokens, out)
    return tuple(torch.randn(size, generator=generator) for size in sizes)


def arguments(recipe: Recipe, native: bool = False, dtype: torch.dtype = torch.float32) -> dict:
    return {**recipe.arguments(), "native": native, "dtype": dtype}


def expected_products(recipe: Recipe, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    def rounded(matrix: torch.Tensor, name: str, kind: str) -> torch.Tensor:
        return torch.from_numpy(reference(matrix, name, kind))

    gt, xt = g.t().contiguous(), x.t().contiguous()
    if recipe.hadamard:
        gt, xt = (transform(F.pad(side, (0, -side.shape[1] % 16))) for side in (gt, xt))
    a, b = recipe.activations, recipe.weights
    return [
        rounded(x, recipe.input, a) @ rounded(w, recipe.weight, b).t(),
        rounded(g, recipe.gradient, a) @ rounded(w.t().contiguous(), recipe.weight, b).t(),
        rounded(gt, recipe.gradient, a) @ rounded(xt, recipe.input, a).t(),
    ]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fp8-rowwise"])  # its scales: see below
def test_products_are_those_of_rounded_matrices(name: str) -> None:
    recipe = dataclasses.replace(resolve_recipe(name), gradient_rounding="nearest", scale_up=False)
    x, w, g = inputs()
    x.requires_grad_(), w.requires_grad_()
    y = scaled_linear(x, w, None, **arguments(recipe))
    y.backward(g)
    for found, expected in zip((y, x.grad, w.grad), expected_products(recipe, x.detach(), w.detach(), g)):
        # a last bit of a scale may round one value the other way
        assert (found.double() - expected).norm() < 2e-3 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name, tokens, features, out",
    [("fp8", 17, 33, 19), ("fp8-rowwise", 24, 160, 96), ("fp8-rowwise", 17, 33, 19), ("fp8-rowwise", 1, 48, 64)],
)
def test_native_and_emulated_agree(name: str, tokens: int, features: int, out: int, dtype: torch.dtype) -> None:
    """On CPU torch has these two products, slowly."""
    recipe = resolve_recipe(name)
    if name == "fp8-rowwise" and (reason := try_products(recipe, "cpu", None, dtype)) is not None:
        pytest.skip(reason)
    results = []
    for native in (True, False):
        x, w, g = (t.to(dtype) for t in inputs(tokens, features, out))
        x.requires_grad_(), w.requires_grad_()
        y = scaled_linear(x, w, None, **arguments(recipe, native, dtype))
        y.backward(g)
        results.append((y, x.grad, w.grad))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for native, emulated in zip(*results):
        assert native.dtype == dtype
        torch.testing.assert_close(native, emulated, rtol=tolerance, atol=tolerance)


def test_what_is_native_is_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    assert "no native product for nvfp4" in why_not_native(RECIPES["nvfp4"], gpu, torch.float32)
    assert "no type for its formats" in why_not_native(Recipe("e2m3", "e2m3"), gpu, torch.float32)
    assert why_not_native(RECIPES["fp8"], CPU, torch.float32) == "a CPU has no units for it"
    reason = try_products(RECIPES["fp8-block"], "cpu", None, torch.float32)
    a, b = (quantize(torch.randn(128, 256), "e4m3", kind) for kind in ("1x128", "128x128"))
    if reason is None:
        multiply(a, b, torch.float32, native=True)
    else:
        assert "refuses its products on cpu" in reason
        with pytest.raises(Exception):  # noqa: B017 - whatever torch raises
            multiply(a, b, torch.float32, native=True)
    try_products.cache_clear()
    monkeypatch.setattr(product, "_whole_scales", lambda a, b, dtype, fast: torch.zeros(a.values.shape[0], 272))
    assert "gives other values on cpu" in try_products(RECIPES["fp8"], "cpu", None, torch.float32)
    try_products.cache_clear()


@pytest.mark.parametrize("tokens, features, out", [(1, 256, 128), (100, 272, 416), (16, 4096, 512)])
@pytest.mark.parametrize("name", ["fp8", "fp8-rowwise", "fp8-block"])
def test_native_products_have_the_layouts_that_gpus_need(
    name: str, tokens: int, features: int, out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device torch checks sizes and strides as CUDA does."""
    monkeypatch.setattr(product, "block_product", product.multiply_blocks)
    recipe = RECIPES[name]
    with torch.no_grad():
        x, w, g = (torch.empty(size, device="meta") for size in ((tokens, features), (out, features), (tokens, out)))
        products = (
            (x, recipe.activations, w, recipe.weights),
            (g, recipe.activations, w.t().contiguous(), recipe.weights),
            (g.t().contiguous(), recipe.activations, x.t().contiguous(), recipe.activations),
        )
        for a, kind_a, b, kind_b in products:
            sides = quantize(a, "e4m3", kind_a), quantize(b, "e4m3", kind_b)
            found = multiply(*sides, torch.bfloat16, native=True)
            assert found.shape == (sides[0].values.shape[0], sides[1].values.shape[0])


@pytest.mark.parametrize("name", NAMES)
def test_error_is_what_the_format_gives(name: str) -> None:
    """Against the exact linear: a wrong scale or a transposed operand would be far off."""
    bound = {"fp8": 0.05, "fp8-rowwise": 0.05, "fp8-block": 0.05, "mxfp8": 0.05, "mxfp6-e2m3": 0.06,
             "mxfp6-e3m2": 0.1, "mxfp4": 0.3, "nvfp4": 0.25}[name]  # fmt: skip
    torch.manual_seed(0)
    x, w, g = inputs()
    bias = torch.randn(96)
    exact = [t.clone().requires_grad_() for t in (x, w, bias)]
    low = [t.clone().requires_grad_() for t in (x, w, bias)]
    (y := F.linear(*exact)).backward(g)
    (z := scaled_linear(*low, **arguments(resolve_recipe(name)))).backward(g)
    assert 0.001 < (z - y).norm() / y.norm() < bound
    for a, b in zip(exact[:2], low[:2]):
        assert 0.001 < (a.grad - b.grad).norm() / a.grad.norm() < 1.6 * bound
    torch.testing.assert_close(low[2].grad, exact[2].grad)  # the bias is outside


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_are_not_hidden(name: str, bad: float) -> None:
    x, w, g = inputs()
    x[2, 3] = bad
    y = scaled_linear(x, w, None, **arguments(resolve_recipe(name)))
    assert not y[2].isfinite().any()
    x, w, g = inputs()
    x.requires_grad_(), w.requires_grad_()
    g[2, 3] = bad
    scaled_linear(x, w, None, **arguments(resolve_recipe(name))).backward(g)
    assert not x.grad[2].isfinite().any()
    assert not w.grad[3].isfinite().any()


@pytest.mark.parametrize("name", ["fp8", "fp8-block", "nvfp4"])
def test_shapes_and_what_needs_gradients(name: str) -> None:
    options = arguments(resolve_recipe(name))
    _, w, _ = inputs()
    x = torch.randn(2, 3, 160, requires_grad=True)
    assert scaled_linear(x, w, None, **options).shape == (2, 3, 96)
    assert scaled_linear(x[0, 0], w, None, **options).shape == (96,)
    scaled_linear(x, w, None, **options).sum().backward()  # a frozen weight
    assert x.grad.shape == x.shape
    w.requires_grad_()
    scaled_linear(x.detach(), w, None, **options).sum().backward()
    assert w.grad.shape == w.shape
    empty = torch.randn(0, 160, requires_grad=True)
    w.grad = None
    scaled_linear(empty, w, torch.ones(96), **options).sum().backward()
    assert not w.grad.any()


def test_random_rounding_averages_out() -> None:
    recipe = RECIPES["nvfp4"]
    x, w, g = inputs(16, 64, 64)
    torch.manual_seed(0)
    means = {}
    for rounding in ("nearest", "stochastic"):
        options = arguments(dataclasses.replace(recipe, gradient_rounding=rounding))
        total = torch.zeros_like(x)
        for _ in range(40):
            leaf = x.clone().requires_grad_()
            scaled_linear(leaf, w, None, **options).backward(g)
            total += leaf.grad / 40
        means[rounding] = total
    weight = torch.from_numpy(reference(w.t().contiguous(), "e2m1", "16x16")).float()
    right = g @ weight.t()  # the gradient itself not rounded
    errors = {rounding: (mean - right).norm() for rounding, mean in means.items()}
    assert errors["stochastic"] < 0.4 * errors["nearest"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"input": "e9m9"}, "input='e9m9' is not allowed: choose one of 'e4m3'"),
        ({"scaling": "column"}, "scaling='column' is not allowed"),
        ({"gradient_rounding": "up"}, "gradient_rounding='up' is not allowed"),
        ({"hadamard": 1}, "hadamard=1 is not allowed"),
        ({"hadamard": True}, "hadamard=True is not allowed with scaling='tensor'"),
        ({"min_features": 0}, "min_features=0 is not allowed"),
        ({"scaling": "mx", "power_of_two_scales": True}, "power_of_two_scales=True is not allowed with scaling='mx'"),
        ({"amax_history_len": -1}, "amax_history_len=-1 is not allowed: choose a whole number from 0"),
        ({"amax_history_len": 2, "scaling": "row"}, "amax_history_len=2 is not allowed with scaling='row'"),
        ({"scale_up": True}, "scale_up=True is not allowed with scaling='tensor'"),
    ],
)
def test_refused_recipes(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match="is not allowed") as error:
        Recipe(**options)
    assert message in str(error.value)


def test_names() -> None:
    assert all(resolve_recipe(name).name == name for name in RECIPES)
    assert Recipe("e5m2").name == "e5m2/e4m3/e5m2 tensor"
    with pytest.raises(ValueError, match="precision='fp7' is not allowed: choose one of 'fp8', 'fp8-rowwise'"):
        resolve_recipe("fp7")
