"""Runs functions on the fake tensors of a program that Dynamo has read. Checked on torch 2.13."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


def run_on_fakes(function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``function`` returns for these fake values, after its backward has run too. Nothing is computed.

    Args:
        function: A differentiable function.
        args: Plain values and fake tensors, all of one fake mode.
        kwargs: The same.
    """
    modes = [value.fake_mode for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    mode = modes[0] if modes else None  # Dynamo's; the tracing context may hold another already
    symbols = getattr(mode, "shape_env", None)
    nothing = contextlib.nullcontext()
    with mode or nothing, symbols.ignore_fresh_unbacked_symbols() if symbols is not None else nothing:
        args, kwargs = tree_map(_leaf, (tuple(args), dict(kwargs)))
        result = function(*args, **kwargs)
        inputs = [value for value in tree_leaves((args, kwargs)) if _differentiable(value)]
        results = [value for value in tree_leaves(result) if _differentiable(value)]
        if inputs and results:
            gradients = [torch.ones_like(value) for value in results]
            torch.autograd.grad(results, inputs, gradients, allow_unused=True)
    return result


def is_plain_fake(value: torch.Tensor) -> bool:
    """Whether a value of a program is a fake tensor and not, say, a distributed one that holds such."""
    from torch._subclasses.fake_tensor import FakeTensor

    return type(value) is FakeTensor


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _leaf(value: Any) -> Any:
    """A tensor that is the start of a graph of its own: the program's own graph is left alone."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
