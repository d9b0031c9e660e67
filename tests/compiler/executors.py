"""Executors for tests: they run regions as they are, and refuse what they are told to refuse."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import fx

from lightning_thunder_strategy.executors import FusionExecutor, OperatorExecutor

POINTWISE = ("add", "sub", "mul", "div", "sin", "cos", "exp", "tanh", "sigmoid", "relu", "gelu", "neg", "pow")


def overload(node: fx.Node) -> str:
    """``sin`` for ``aten.sin.default``; empty for what is no operation."""
    target = node.target
    if node.op != "call_function":
        return ""
    return target._schema.name.split("::")[1] if isinstance(target, torch._ops.OpOverload) else str(target)


class Running(FusionExecutor):
    """Takes everything and runs the FX graph."""

    name = "running"

    def __init__(self) -> None:
        self.regions: list[list[str]] = []

    def supports(self, node: fx.Node) -> Optional[str]:
        return None

    def fuse(self, region: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list], Sequence[Any]]:
        operations = [node for node in region.graph.nodes if node.op == "call_function"]
        self.regions.append([overload(node) for node in operations if node.target is not operator.getitem])
        assert len(inputs) == len(region.graph.find_nodes(op="placeholder"))
        return lambda args: region(*args)


class Pointwise(Running):
    """Takes pointwise operations only."""

    name = "pointwise"

    def supports(self, node: fx.Node) -> Optional[str]:
        return None if overload(node) in POINTWISE else "it is not pointwise"


class Refusing(Running):
    """Fails to compile regions with one of the named operations."""

    name = "refusing"

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def fuse(self, region: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list], Sequence[Any]]:
        found = [overload(node) for node in region.graph.nodes if overload(node) in self.names]
        if found:
            raise NotImplementedError(f"no kernel for {found[0]}\nand more lines")
        return super().fuse(region, inputs)


class EveryThird(Running):
    """Fails on every third region it is asked to compile."""

    name = "third"

    def fuse(self, region: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list], Sequence[Any]]:
        result = super().fuse(region, inputs)
        if len(self.regions) % 3 == 1:
            raise RuntimeError("not this one")
        return result


class SineSquared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin() * x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (2 * x).sin()


def sine(input: torch.Tensor) -> torch.Tensor:
    """Not the sine, so that its use shows."""
    return SineSquared.apply(input)


@torch.library.custom_op("lts_tests::opaque_sine", mutates_args=())
def opaque_sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 10


@opaque_sine.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return grad * x.cos() * 10


opaque_sine.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))


class Sine(OperatorExecutor):
    """Runs ``sin`` of matrices with a function of its own."""

    name = "sine"

    def __init__(self, function: Callable = sine) -> None:
        self.function = function

    def considers(self, node: fx.Node) -> bool:
        return node.target in ("sin", torch.sin)

    def replacement(self, node: fx.Node) -> "Callable | str":
        value = node.meta["example_value"]
        return self.function if value.dim() == 2 else f"it takes matrices, and this has {value.dim()} dimensions"
