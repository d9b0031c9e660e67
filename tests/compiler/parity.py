"""Compares a compiled function or module with eager PyTorch: results, gradients, state and random stream."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import lightning_thunder_strategy as lts


def eager_compiled(function: Any, **config: Any) -> Any:
    """``lts.compile`` with the eager executor, as one graph unless ``fullgraph=False`` is given."""
    config.setdefault("fullgraph", True)
    return lts.compile(function, executors=["eager"], config=lts.CompileConfig(**config))


def assert_same(actual: Any, expected: Any, where: str = "result", rtol: float = 0.0, atol: float = 0.0) -> None:
    """Equal structure, types and values; tensors bit-equal unless a tolerance is given."""
    assert type(actual) is type(expected), f"{where}: {type(actual)} is not {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape, where
        assert actual.requires_grad == expected.requires_grad, f"{where}: requires_grad"
        named = lambda message: f"{where}: {message}"  # noqa: E731
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True, msg=named)
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}[{key!r}]", rtol, atol)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for index, (one, other) in enumerate(zip(actual, expected)):
            assert_same(one, other, f"{where}[{index}]", rtol, atol)
    elif dataclasses.is_dataclass(expected) and not isinstance(expected, type):
        for item in dataclasses.fields(expected):
            assert_same(getattr(actual, item.name), getattr(expected, item.name), f"{where}.{item.name}", rtol, atol)
    else:
        assert actual == expected, f"{where}: {actual!r} is not {expected!r}"


def first_loss(result: Any) -> torch.Tensor:
    """The sum of all differentiable results."""
    leaves = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
    return sum((leaf.abs() if leaf.is_complex() else leaf).double().square().sum() for leaf in leaves)


def check_module(
    make: Callable[[], nn.Module],
    calls: Sequence[tuple],
    *,
    train: bool = True,
    backward: bool = True,
    loss: Callable[[Any], torch.Tensor] = first_loss,
    rtol: float = 0.0,
    atol: float = 0.0,
    compiler: Callable[[nn.Module], nn.Module] = eager_compiled,
) -> nn.Module:
    """Call an eager and a compiled copy of a module with each of ``calls``; compare everything after each.

    Returns:
        The compiled module.
    """
    torch.manual_seed(0)
    reference = make().train(train)
    compiled = compiler(copy.deepcopy(reference))
    for index, arguments in enumerate(calls):
        outcomes = []
        for module in (reference, compiled):
            args = copy.deepcopy(arguments)
            torch.manual_seed(index)
            result = module(*args)
            if backward:
                loss(result).backward()
            after = torch.rand(1)
            grads = [getattr(arg, "grad", None) for arg in args if isinstance(arg, torch.Tensor)]
            state = {
                "result": result,
                "inputs": [a.detach() if isinstance(a, torch.Tensor) else None for a in args],
                "input gradients": grads,
                "gradients": {n: p.grad for n, p in module.named_parameters()},
                "parameters": {n: p.detach() for n, p in module.named_parameters()},
                "buffers": {n: b.detach() for n, b in module.named_buffers()},
                "random stream": after,
            }
            outcomes.append(state)
        for key, value in outcomes[0].items():
            tolerance = (rtol, atol) if key != "random stream" else (0.0, 0.0)
            assert_same(outcomes[1][key], value, f"call {index}: {key}", *tolerance)
    return compiled


def check_function(function: Callable, *arguments: Any, **config: Any) -> Any:
    """Call a function eagerly and compiled on equal copies of the arguments; compare results, gradients, edits."""
    compiled = eager_compiled(function, **config)
    outcomes = []
    for candidate in (function, compiled):
        args = copy.deepcopy(arguments)
        torch.manual_seed(0)
        result = candidate(*args)
        loss = first_loss(result)
        if isinstance(loss, torch.Tensor):
            loss.backward()
        tensors = [a for a in torch.utils._pytree.tree_leaves(args) if isinstance(a, torch.Tensor)]
        outcomes.append(
            [result, [a.detach() for a in tensors], [a.grad if a.is_leaf else None for a in tensors], torch.rand(1)]
        )
    assert_same(outcomes[1], outcomes[0], getattr(function, "__name__", "function"))
    return compiled
