"""The pass that rewrites linears to low precision, and says what it did with each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Optional, Union

import torch
from torch import fx, nn

from lightning_thunder_strategy.compiler.config import check_patterns
from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.module_path import path_name
from lightning_thunder_strategy.compiler.report import warn
from lightning_thunder_strategy.compiler.surgery import copy_program
from lightning_thunder_strategy.compiler.trace import Decision, Trace
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.precision.delayed import DelayedScales
from lightning_thunder_strategy.precision.delayed_programs import Call, Region, connect, forward_amaxes, paths
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

    Attributes:
        delayed: What delayed scaling remembers, ``None`` without it. ThunderPrecision updates and saves it; a loop of
            your own calls its ``update()`` after each optimizer step.
        owner: A prefix of the names that it is kept by.
    """

    precision: Union[str, Recipe]
    skip: Sequence[str] = ("*lm_head",)
    delayed: Optional[DelayedScales] = field(default=None, init=False, compare=False, repr=False)
    owner: str = field(default="", init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        recipe = resolve_recipe(self.precision)
        check_patterns("skip", self.skip)
        object.__setattr__(self, "skip", tuple(self.skip))
        object.__setattr__(self, "delayed", DelayedScales(recipe) if recipe.amax_history_len else None)

    def owned_by(self, owner: str) -> "LowPrecisionLinears":
        """The same pass, with the same memory, for another module: the names of its linears start with ``owner``."""
        other = replace(self)
        object.__setattr__(other, "delayed", self.delayed)
        object.__setattr__(other, "owner", owner)
        return other

    @property
    def recipe(self) -> Recipe:
        return resolve_recipe(self.precision)

    @property
    def functions(self) -> dict[str, str]:
        ours = (scaled_linear, gathered_values, shard_scales, forward_amaxes)
        return {f"{function.__module__}.{function.__qualname__}": "1" for function in ours}

    def cache_key(self) -> Optional[str]:
        return (
            f"{type(self).__qualname__}:{self.recipe!r}:{self.skip!r}"  # the package's sources have a key of their own
        )

    def acquired(self, trace: Trace) -> None:
        assert trace.graph_module is not None
        _own_parts(trace.graph_module)
        path_to = paths(trace.graph_module)
        programs = [module for module in trace.graph_module.modules() if isinstance(module, fx.GraphModule)]
        rewritten = {program: self._rewrite_all(trace, program, program in path_to) for program in programs}
        gathers = {program: self._gathers(linears) for program, linears in rewritten.items()}
        scales = self._connect(trace, rewritten, path_to, gathers)
        for program, uses in gathers.items():
            self._gather(program, uses, scales)
        gathered = {node for uses in gathers.values() for users in uses.values() for node in users}
        for program, linears in rewritten.items():
            for node, decision in linears.items():
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

    def _rewrite_all(self, trace: Trace, program: fx.GraphModule, reached: bool) -> dict[fx.Node, Decision]:
        """What became of each linear of a program."""
        linears = program.graph.find_nodes(op="call_function", target=_LINEAR)
        return {node: self._rewrite(trace, node, reached) for node in linears}

    def _gathers(self, linears: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        """Weights that can be cast before they are gathered, as only rewritten linears use them, and those linears."""
        if self.recipe.scaling != "tensor":
            return {}
        uses: dict[fx.Node, list[fx.Node]] = {}
        for node in linears:
            if node.target is scaled_linear:
                uses.setdefault(node.args[1], []).append(node)
        return {w: users for w, users in uses.items() if stored_shard(w) and set(w.users) <= set(users)}

    def _gather(
        self, program: fx.GraphModule, uses: dict[fx.Node, list[fx.Node]], scales: dict[fx.Node, fx.Node]
    ) -> None:
        known = {weight: scales[users[0]] for weight, users in uses.items()} if scales else None
        recipe = self.recipe
        given = insert_gathers(program, list(uses), recipe.weight, recipe.power_of_two_scales, known)
        for weight, arguments in given.items():
            for node in uses[weight]:
                node.kwargs = {**node.kwargs, **arguments}

    def _connect(
        self,
        trace: Trace,
        rewritten: dict[fx.GraphModule, dict[fx.Node, Decision]],
        path_to: dict[fx.GraphModule, tuple[Region, ...]],
        gathers: dict[fx.GraphModule, dict[fx.Node, list[fx.Node]]],
    ) -> dict[fx.Node, fx.Node]:
        """Delayed scaling, in programs that have gradients: returns for each linear the node of its scales."""
        linears = {n: p for p, decisions in rewritten.items() for n in decisions if n.target is scaled_linear}
        if self.delayed is None or not any(node_value(node).requires_grad for node in linears):
            return {}
        calls = []
        for node, program in linears.items():
            weight = node.args[1]
            seen = stored_shard(weight) if weight in gathers[program] else weight
            path = path_to[program]
            calls.append(Call(self.owner + remembered_name(trace, node, weight, path), path, node, seen))
        device = node_value(calls[0].node).device
        return dict(zip(linears, connect(trace, calls, self.delayed, device)))

    def _rewrite(self, trace: Trace, node: fx.Node, reached: bool) -> Decision:
        x, weight, bias = _arguments(node)
        value, shape = node_value(node), tuple(node_value(weight).shape)
        name = linear_name(trace, node, weight)
        text = f"{shape[1]} to {shape[0]} features"
        reason = self._reason(name, value, node_value(x), shape)
        if reason is None and self.delayed is not None and not reached:
            reason = "delayed scaling does not reach inside of an operator that calls a program, such as torch.cond"
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


def remembered_name(trace: Trace, node: fx.Node, weight: fx.Node, path: Sequence[Region]) -> str:
    """The name of a linear's parameter, which is the same in every program, or that of the linear if it has none."""
    source = _source(weight)
    for region in reversed(path):
        if source.op != "placeholder":
            break
        source = _source(region.argument_of(source))
    origin = trace.origin(source)
    known = origin is not None and origin.kind == "parameter" and origin.origin
    return known.removesuffix(".weight") if known else linear_name(trace, node, weight)


def _source(node: fx.Node) -> fx.Node:
    """The input that a value is a cast or gathered form of."""
    while node.op in ("call_method", "call_function") and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _own_parts(program: fx.GraphModule) -> None:
    """Replace programs inside a program, such as checkpointed regions, by copies: if it cannot be compiled it runs as
    it was read, with what it had."""
    for name, part in list(program.named_children()):
        if isinstance(part, fx.GraphModule):
            setattr(program, name, copy_program(part))
            _own_parts(getattr(program, name))


def _arguments(node: fx.Node) -> tuple[fx.Node, fx.Node, Any]:
    given = {**dict(zip(("input", "weight", "bias"), node.args)), **node.kwargs}
    return given["input"], given["weight"], given.get("bias")
