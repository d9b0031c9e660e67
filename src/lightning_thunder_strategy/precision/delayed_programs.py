"""Delayed scales in programs: they come in as an input, and amaxes go out, the gradients' as a gradient.

Nothing in a program edits the state, so it does not matter whether, or how often, a part is computed again: the amaxes
of the forward are an output, which a forward that is computed again in the backward does not make; that of a linear's
output gradient is what autograd takes for the gradient of an element of a second input, which every call gets anew.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from lightning_thunder_strategy.compiler import _torch_aot
from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.precision.delayed import KINDS, DelayedScales
from lightning_thunder_strategy.precision.scaling import largest_magnitude

_FORWARD, _BACKWARD = slice(0, 2), slice(2, 3)  # of the kinds


def forward_amaxes(x: Tensor, weight: Tensor) -> Tensor:
    """Float32 ``[2]``: the largest magnitudes of a linear's input and weight; of a distributed one, of this rank's
    part. An empty tensor's is zero."""
    with torch.no_grad():
        tensors = [x.detach(), weight.detach()]
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return torch.stack([largest_magnitude(tensor) for tensor in local])


@dataclass(frozen=True)
class Region:
    """A call of a checkpointed region.

    Attributes:
        outside: The program that calls it.
        node: The call.
    """

    outside: fx.GraphModule
    node: fx.Node

    @property
    def inside(self) -> fx.GraphModule:
        """The region's program."""
        return getattr(self.outside, str(self.node.args[0].target))  # type: ignore[union-attr]

    def argument_of(self, inside: fx.Node) -> fx.Node:
        """What one of its inputs is outside."""
        index = self.inside.graph.find_nodes(op="placeholder").index(inside)
        return self.node.args[1 + index]  # type: ignore[return-value]

    def hand_in(self, value: fx.Node) -> fx.Node:
        """Give it one more argument. Returns what that is inside."""
        with self.inside.graph.inserting_before(first_operation(self.inside.graph)):
            inside = self.inside.graph.placeholder(value.name)
        self.node.args = (*self.node.args, value)
        return inside

    def hand_out(self, value: fx.Node) -> fx.Node:
        """Let it return one more value. Returns what that is outside."""
        output = self.inside.graph.output_node()
        results = tuple(output.args[0])  # type: ignore[arg-type]
        output.args = ((*results, value),)
        with self.outside.graph.inserting_after(self.node):
            return self.outside.graph.call_function(operator.getitem, (self.node, len(results)))


def first_operation(graph: fx.Graph) -> fx.Node:
    """The first node that is not an input."""
    return next(node for node in graph.nodes if node.op != "placeholder")


@dataclass(frozen=True)
class Call:
    """One linear of a program.

    Attributes:
        name: The linear's.
        path: The regions that it is in, from the outside.
        node: Its call.
        weight: Its weight, or this rank's shard of it if the weight itself is not needed.
    """

    name: str
    path: tuple[Region, ...]
    node: fx.Node
    weight: fx.Node


def paths(program: fx.GraphModule) -> dict[fx.GraphModule, tuple[Region, ...]]:
    """A program and its checkpointed regions, each with the calls that lead there; without those called twice."""
    found: dict[fx.GraphModule, tuple[Region, ...]] = {}
    twice = set()
    waiting: list[tuple[fx.GraphModule, tuple[Region, ...]]] = [(program, ())]
    while waiting:
        inside, path = waiting.pop(0)
        if inside in found:
            twice.add(inside)
            continue
        found[inside] = path
        calls = [Region(inside, node) for node in inside.graph.nodes if _torch_aot.is_checkpoint(node)]
        waiting += [(region.inside, (*path, region)) for region in calls]
    return {inside: path for inside, path in found.items() if not any(region.inside in twice for region in path)}


def connect(trace: Trace, calls: Sequence[Call], delayed: DelayedScales, device: torch.device) -> list[fx.Node]:
    """Give an acquired program its inputs and outputs for delayed scaling.

    Args:
        trace: The program.
        calls: Its rewritten linears, whose keyword arguments ``scales`` and ``gradient_amax`` are set.
        delayed: The state that calls of the program read and add to.
        device: Where the scales are needed.

    Returns:
        For each linear float32 ``[3]``, the scales of its input, weight and gradient, in the program that calls it.
    """
    graph = trace.graph
    rows = delayed.rows([call.name for call in calls], device)
    scales = trace.add_input("delayed_scales", torch.empty(len(calls), len(KINDS), dtype=torch.float32, device=device))
    gradients = trace.add_input("gradient_amaxes", _one_of_each(rows))
    given, amaxes = [], []
    with graph.inserting_before(first_operation(graph)):
        each = [graph.call_function(torch.unbind, (node,)) for node in (scales, gradients)]
        inputs = [[graph.call_function(operator.getitem, (of, i)) for of in each] for i in range(len(calls))]
    for call, values in zip(calls, inputs):
        for region in call.path:
            values = [region.hand_in(value) for value in values]
        call.node.kwargs = {**call.node.kwargs, "scales": values[0]}
        if node_value(call.node).requires_grad:  # otherwise the input would make it so
            call.node.kwargs = {**call.node.kwargs, "gradient_amax": values[1]}
        given.append(values[0])
        with call.node.graph.inserting_before(call.node):
            found = call.node.graph.call_function(forward_amaxes, (call.node.args[0], call.weight))
        for region in reversed(call.path):
            found = region.hand_out(found)
        amaxes.append(found)
    output = graph.output_node()
    with graph.inserting_before(output):
        together = graph.call_function(torch.stack, (amaxes,))
    output.args = ((*output.args[0], together),)  # type: ignore[misc]
    trace.call_through(lambda compiled: _with_state(compiled, delayed, rows))
    return given


def _one_of_each(rows: Tensor) -> Tensor:
    return torch.zeros(len(rows), dtype=torch.float32, device=rows.device, requires_grad=True)


def _with_state(compiled: Callable, delayed: DelayedScales, rows: Tensor) -> Callable:
    """How a compiled program is called as if it had no state."""

    def run(*inputs: Any) -> Any:
        gradients = _one_of_each(rows)
        gradients.register_hook(lambda found: delayed.observe(rows, found[:, None], _BACKWARD))
        *results, amaxes = compiled(*inputs, delayed.scales(rows), gradients)
        delayed.observe(rows, amaxes, _FORWARD)
        return tuple(results)

    return run
