"""Random modules under random options of ``lts.compile``: equal to eager PyTorch, or a clear refusal."""

import copy
import os
import warnings
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Optional

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lightning_thunder_strategy as lts
from tests.compiler.parity import assert_same, first_loss
from tests.properties.blocks import CUTTING
from tests.properties.programs import Choose, Recipe, draw_recipe

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.0}


@dataclass(frozen=True)
class Call:
    """One call of a module."""

    batch: int
    time: int
    train: bool
    gradients: str  # "backward", "forward", "no_grad" or "inference_mode"
    leaf: bool


@dataclass(frozen=True)
class Sees(lts.Transform):
    """A user's pass that changes nothing."""

    def acquired(self, trace: lts.Trace) -> None:
        str(trace)

    def joint(self, trace: lts.Trace) -> None:
        str(trace)


def draw_calls(choose: Choose) -> list[Call]:
    modes = ("backward", "backward", "forward", "no_grad", "inference_mode")
    return [
        Call(choose((1, 2, 3, 5)), choose((1, 2, 5)), choose((True, True, False)), choose(modes), choose((True, False)))
        for _ in range(choose((1, 2, 3)))
    ]


def draw_config(choose: Choose) -> dict[str, Any]:
    return {
        "mode": choose(("step", "step", "forward", "submodules", "off")),
        "fullgraph": choose((False, False, True)),
        "dynamic": choose((None, None, True, False)),
        "on_error": choose(("fallback", "raise")),
        "eager_random": choose((False, True)),
        "fuel": choose((None, None, None, 0, 1)),
    }


Case = tuple[Recipe, list[Call], dict[str, Any], list[lts.Transform], list[Any]]
EXECUTORS = (["eager"], ["eager"], [lts.executors.SdpaExecutor("math"), "eager"], ["chunked_loss", "sdpa", "eager"])


def draw_case(choose: Choose) -> Case:
    recipe = draw_recipe(choose, dtypes=(torch.float64, torch.float64, torch.float32))
    transforms = choose(([], [Sees()]))
    return recipe, draw_calls(choose), draw_config(choose), transforms, choose(EXECUTORS)


@st.composite
def cases(draw: Any) -> Case:
    return draw_case(lambda options: draw(st.sampled_from(list(options))))


def names(recipe: Recipe) -> set[str]:
    """Blocks and wrappers of a recipe."""
    found, left = set(), list(recipe.parts)
    while left:
        part = left.pop()
        found.add(part if isinstance(part, str) else part[0])
        left += () if isinstance(part, str) else part[1]
    return found


def outcome(module: torch.nn.Module, call: Call, dtype: torch.dtype, seed: int) -> tuple[Any, Optional[Exception]]:
    """Everything that one call leaves behind, or its error."""
    torch.manual_seed(seed)
    x = torch.randn(call.batch, call.time, module.layers[0].width_of_input, dtype=dtype)
    x.requires_grad_(call.leaf and call.gradients in ("backward", "forward"))
    contexts = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    module.train(call.train)
    try:
        with contexts.get(call.gradients, torch.enable_grad)():
            result = module(x)
        if call.gradients == "backward":
            loss = first_loss(result)
            if isinstance(loss, torch.Tensor):
                loss.backward()
    except Exception as error:
        return None, error
    return {
        "result": result,
        "input": x.detach(),
        "gradient of the input": x.grad,
        "gradients": {name: parameter.grad for name, parameter in module.named_parameters()},
        "state": {name: value.detach() for name, value in [*module.named_parameters(), *module.named_buffers()]},
        "attributes": {
            f"{name}.{key}": copy.copy(value)
            for name, child in module.named_modules()
            for key, value in vars(child).items()
            if isinstance(value, (int, list)) and not key.startswith("_")
        },
        "random stream": torch.rand(1),
    }, None


@pytest.mark.parametrize("seed", range(6))
def test_equal_to_eager_or_a_clear_refusal(seed: int) -> None:
    random = Random(seed)
    check(*draw_case(lambda options: random.choice(list(options))))


@pytest.mark.skipif("FUZZ_EXAMPLES" not in os.environ, reason="part of `make fuzz`")
@given(cases())
def test_any_module_is_equal_to_eager_or_a_clear_refusal(case: Case) -> None:
    check(*case)


@pytest.mark.skipif("FUZZ_EXAMPLES" not in os.environ, reason="part of `make fuzz`")
@given(cases(), st.sampled_from(["int8", "int4", "nf4", "fp6", "nvfp4"]))
def test_stored_weights_compute_with_the_values_of_their_bits(case: Case, storage: Any) -> None:
    recipe, calls, config, _, executors = case
    transform = lts.QuantizeWeights(storage, skip=(), min_features=1)
    reference = recipe.make()
    transform.module(reference)
    lts.restore_weights(reference)
    left = ("result", "input", "gradient of the input", "random stream")  # stored weights have no gradients
    check(recipe, calls, config, [transform], executors, reference, left)


def check(
    recipe: Recipe,
    calls: list[Call],
    config: dict[str, Any],
    transforms: list[lts.Transform],
    executors: list[Any],
    reference: Optional[torch.nn.Module] = None,
    keys: Optional[tuple[str, ...]] = None,
) -> None:
    """Compare a compiled module with a plain one, call by call."""
    torch._dynamo.reset()
    reference = recipe.make() if reference is None else reference
    ours = recipe.make()
    for module in (reference, ours):
        module.layers[0].width_of_input = recipe.width
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = lts.CompileConfig(**config)
        compiled = lts.compile(ours, executors=executors, transforms=transforms, config=options)
        for index, call in enumerate(calls):
            if call.gradients == "forward":  # a program has its backward, even if nobody asks for it
                twin = copy.deepcopy(reference)
                if outcome(twin, replace(call, gradients="backward"), recipe.dtype, index)[1] is not None:
                    return
            expected, eager_error = outcome(reference, call, recipe.dtype, index)
            actual, error = outcome(compiled, call, recipe.dtype, index)
            if eager_error is not None:
                return  # in-place edits that autograd refuses in eager mode may be fine in a functional program
            if error is not None:
                assert is_refusal(error, recipe, config), repr(error)
                return
            tolerance = TOLERANCE[recipe.dtype]
            for key in keys or expected:
                assert_same(actual[key], expected[key], f"call {index}: {key}", tolerance, tolerance)


def is_refusal(error: Exception, recipe: Recipe, config: dict[str, Any]) -> bool:
    """Whether the error is one that the options ask for: ``fullgraph`` with something that is not one program."""
    if not config["fullgraph"] or not isinstance(error, lts.CompileError):
        return False
    may_cut = CUTTING | {"Checkpointed"}  # a checkpointed region must not have side effects
    if config["dynamic"]:
        may_cut |= {"Encoder"}  # its fast path wants a bool that follows from an integer of the module
    return bool(names(recipe) & may_cut) and "cannot be compiled as one program" in str(error)
