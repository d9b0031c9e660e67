"""The pass that rewrites linears to low precision, and says what it did with each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Optional, Union

import torch
from torch import fx, nn

from lightning_thunder_strategy.compiler.config import check_patterns
from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.module_path import path_name
from lightning_thunder_strategy.compiler.report import warn
from lightning_thunder_strategy.compiler.trace import Decision, Trace
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.precision.gathering import (
    gathered_values,
    insert_gathers,
    settle_gathers,
    shard_scales,
    stored_shard,
)
from lightning_thunder_strategy.precision.linear import scaled_linear
from lightning_thunder_strategy.precision.product import why_not_native
from lightning_thunder_strategy.precision.recipe import Recipe, resolve_recipe

_LINEAR = torch.nn.functional.linear  # what programs call, whether by F.linear or by nn.Linear
_announced: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class LowPrecisionLinears(Transform):
    """Computes linears in low precision: replaces calls of ``F.linear`` before autograd.

    The module tree, parameters and checkpoints stay as they are.

    Args:
        precision: A name such as ``"fp8"``, or a recipe.
        skip: Patterns of module names (as in ``fnmatch``): these modules, and all inside them, are left alone.
    """

    precision: Union[str, Recipe]
    skip: Sequence[str] = ("*lm_head",)

    def __post_init__(self) -> None:
        resolve_recipe(self.precision)
        check_patterns("skip", self.skip)
        object.__setattr__(self, "skip", tuple(self.skip))

    @property
    def recipe(self) -> Recipe:
        return resolve_recipe(self.precision)

    @property
    def functions(self) -> dict[str, str]:
        ours = (scaled_linear, gathered_values, shard_scales)
        return {f"{function.__module__}.{function.__qualname__}": "1" for function in ours}

    def cache_key(self) -> Optional[str]:
        return (
            f"{type(self).__qualname__}:{self.recipe!r}:{self.skip!r}"  # the package's sources have a key of their own
        )

    def acquired(self, trace: Trace) -> None:
        assert trace.graph_module is not None
        for program in _programs(trace.graph_module):
            linears = program.graph.find_nodes(op="call_function", target=_LINEAR)
            decisions = [self._rewrite(trace, node) for node in linears]
            gathered = self._gather(program, linears)
            for node, decision in zip(linears, decisions):
                if node in gathered:
                    decision = replace(decision, choice=f"{decision.choice}, weight gathered as {self.recipe.weight}")
                trace.decisions.append(decision)
            if program is not trace.graph_module:
                program.recompile()

    def joint(self, trace: Trace) -> None:
        settle_gathers(trace.graph)

    def partitioned(self, forward: Trace, backward: Optional[Trace]) -> None:
        if backward is None:  # without gradients there was no joint program
            settle_gathers(forward.graph)

    def _gather(self, program: fx.GraphModule, linears: Sequence[fx.Node]) -> set[fx.Node]:
        """Cast weights before they are gathered, where only rewritten linears use them. Returns the linears."""
        if self.recipe.scaling != "tensor":
            return set()
        rewritten = [node for node in linears if node.target is scaled_linear]
        uses: dict[fx.Node, list[fx.Node]] = {}
        for node in rewritten:
            uses.setdefault(node.args[1], []).append(node)
        weights = [weight for weight, users in uses.items() if stored_shard(weight) and set(weight.users) <= set(users)]
        given = insert_gathers(program, weights, self.recipe.weight, self.recipe.power_of_two_scales)
        for weight, arguments in given.items():
            for node in uses[weight]:
                node.kwargs = {**node.kwargs, **arguments}
        return {node for weight in given for node in uses[weight]}

    def _rewrite(self, trace: Trace, node: fx.Node) -> Decision:
        x, weight, bias = _arguments(node)
        value, shape = node_value(node), tuple(node_value(weight).shape)
        name = linear_name(trace, node, weight)
        text = f"{shape[1]} to {shape[0]} features"
        reason = self._reason(name, value, node_value(x), shape)
        if reason is not None:
            return Decision(name, text, "left alone", reason)
        why = why_not_native(self.recipe, value.device, value.dtype)
        node.args = (x, weight, bias)
        node.target = scaled_linear
        node.kwargs = {**self.recipe.arguments(), "native": why is None, "dtype": value.dtype}
        if why is not None:
            self._announce(value.device, why)
        return Decision(name, text, f"{self.recipe.name}, {'native' if why is None else 'emulated'}", why or "")

    def _reason(self, name: str, value: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...]) -> Optional[str]:
        """Why a linear is left alone, or ``None``."""
        parts = name.split(".")
        owners = [".".join(parts[: end + 1]) for end in range(len(parts))]
        pattern = next((p for p in self.skip if any(fnmatchcase(owner, p) for owner in owners)), None)
        if pattern is not None:
            return f"its name is in skip={pattern!r}"
        if min(shape) < self.recipe.min_features:
            return f"too small: fewer than min_features={self.recipe.min_features} input or output features"
        if not value.dtype.is_floating_point or value.dtype.itemsize > 4:
            return f"it computes in {str(value.dtype).removeprefix('torch.')}"
        if x.ndim == 0 or x.is_complex():
            return "its input is not a matrix of real numbers"
        return None

    def _announce(self, device: torch.device, why: str) -> None:
        """Once for each kind of device: it was asked for something that it cannot do itself."""
        key = (self.recipe.name, device.type)
        if key not in _announced:
            _announced.add(key)
            warn(
                f"precision {self.recipe.name!r} is emulated on {device.type}: linears compute with its numbers, but "
                f"no faster than in float32, because {why}."
            )


def linear_name(trace: Trace, node: fx.Node, weight: fx.Node) -> str:
    """The module that calls a linear, as users name it, or the parameter that it is called with."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1] if stack else ("", None)
    path = path_name(path)
    origin = trace.origin(_source(weight))
    parameter = (origin.origin or origin.name).removesuffix(".weight") if origin is not None else ""
    if parameter and f".{path}".endswith(f".{parameter}"):
        return parameter  # the path may start with what wraps the module
    if path and isinstance(kind, type) and issubclass(kind, nn.Linear):
        return path  # its weight may be known by another module's name
    return parameter or path or node.name


def _source(node: fx.Node) -> fx.Node:
    """The input that a value is a cast or gathered form of."""
    while node.op in ("call_method", "call_function") and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _programs(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """A program and those inside it, such as regions that are checkpointed."""
    seen = set()
    for module in gm.modules():
        if isinstance(module, fx.GraphModule) and id(module.graph) not in seen:
            seen.add(id(module.graph))
            yield module


def _arguments(node: fx.Node) -> tuple[fx.Node, fx.Node, Any]:
    given = {**dict(zip(("input", "weight", "bias"), node.args)), **node.kwargs}
    return given["input"], given["weight"], given.get("bias")
