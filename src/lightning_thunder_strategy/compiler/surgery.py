"""Cuts programs into regions and puts them together again."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import fx, nn

from lightning_thunder_strategy.compiler import _torch_compat
from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.expressions import identifier


def copy_program(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy with its own graph; nested programs and constants are shared."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    made = graph.output(graph.graph_copy(gm.graph, values))
    made.meta = dict(gm.graph.output_node().meta)
    copy = fx.GraphModule(gm, graph)
    copy.meta = dict(gm.meta)
    return copy


def is_operation(node: fx.Node) -> bool:
    """Whether a node does work; taking a part of a tuple does not."""
    return node.op == "call_function" and node.target is not operator.getitem


def keep_parts_together(graph: fx.Graph) -> None:
    """Move whatever takes a part of an operation's tuple right behind that operation, so that no tuple is cut off."""
    for node in list(graph.nodes):
        if not is_operation(node):
            continue
        for part in reversed(parts(node)):
            node.append(part)


def parts(node: fx.Node) -> list[fx.Node]:
    """What takes a part of the tuple that ``node`` returns, and parts of those."""
    direct = [user for user in node.users if user.target is operator.getitem and user.args[0] is node]
    return [found for part in direct for found in (part, *parts(part))]


def region_inputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """What a region takes from outside; constants and nested programs are its own."""
    used = [used for node in nodes for used in node.all_input_nodes]
    inside = set(nodes)
    return list(dict.fromkeys(node for node in used if node not in inside and node.op != "get_attr"))


def region_outputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    inside = set(nodes)
    return [node for node in nodes if any(user not in inside for user in node.users)]


def extract(
    gm: fx.GraphModule, nodes: Sequence[fx.Node], names: Optional[Mapping[fx.Node, str]] = None
) -> tuple[fx.GraphModule, list[Any]]:
    """Some consecutive operations as a program of their own, and the fake values of its inputs."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    inputs = region_inputs(nodes)
    for node in inputs:
        values[node] = graph.placeholder(identifier((names or {}).get(node, node.name)))
        values[node].meta = dict(node.meta)
    for node in nodes:
        for used in node.all_input_nodes:
            if used.op == "get_attr" and used not in values:
                values[used] = graph.node_copy(used)
        values[node] = graph.node_copy(node, values.__getitem__)
    outputs = region_outputs(nodes)
    made = graph.output(tuple(values[node] for node in outputs))
    made.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    return fx.GraphModule(gm, graph), [node_value(node) for node in inputs]


def assemble(
    gm: fx.GraphModule,
    regions: Sequence[tuple[str, Sequence[fx.Node]]],
    make: Callable[[str, Sequence[fx.Node]], nn.Module],
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """The program with each region as one call.

    Args:
        gm: The program.
        regions: Label and operations of each region.
        make: Gives the module that is called for a region.

    Returns:
        The new program, and for each operation outside of the regions its copy.
    """
    starts = {nodes[0]: (label, nodes) for label, nodes in regions if nodes}
    inside = {node for _, nodes in regions for node in nodes}
    graph, values, modules = fx.Graph(), {}, {}
    for node in gm.graph.nodes:
        if node in starts:
            label, nodes = starts[node]
            modules[label] = make(label, nodes)
            outputs = region_outputs(nodes)
            call = graph.call_module(label, tuple(values[used] for used in region_inputs(nodes)))
            call.meta["val"] = tuple(node_value(output) for output in outputs)
            for index, output in enumerate(outputs):
                values[output] = graph.call_function(operator.getitem, (call, index))
                values[output].meta = dict(output.meta)
                values[output].name = output.name
        if node not in inside:
            values[node] = graph.node_copy(node, values.__getitem__)
            if node.op == "output":
                values[node].meta = dict(node.meta)
    attributes = {str(node.target): _get(gm, str(node.target)) for node in gm.graph.find_nodes(op="get_attr")}
    return fx.GraphModule({**attributes, **modules}, graph), values


def _get(gm: fx.GraphModule, target: str) -> Any:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value


# ------------------------------------------------------------------------------------------------------------- strides


@dataclass(frozen=True)
class Layout:
    """The strides a program was compiled for: numbers, or for symbolic sizes the order of the dimensions."""

    strides: tuple[int, ...] = ()
    order: Optional[tuple[int, ...]] = None

    def restored(self, value: torch.Tensor) -> torch.Tensor:
        """``value``, or a copy with these strides if it has others."""
        strides = self.strides if self.order is None else _dense(value.shape, self.order)
        same = (size <= 1 or have == want for size, have, want in zip(value.shape, value.stride(), strides))
        if all(same):
            return value
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def layout_of(value: Any) -> Optional[Layout]:
    """The layout of a fake tensor, or ``None`` if it has none that could be restored."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    strides = tuple(value.stride())
    if all(isinstance(stride, int) for stride in strides):
        return Layout(strides)
    known = [_torch_compat.size_hint(stride) for stride in strides]
    shape = [_torch_compat.size_hint(size) for size in value.shape]
    order = tuple(sorted(range(len(known)), key=lambda dim: (-known[dim], dim)))
    return Layout(order=order) if _dense(shape, order) == tuple(known) else None


def _dense(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor without gaps whose dimensions lie in memory in this order, outermost first."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


class CompiledRegion(nn.Module):
    """Calls a compiled region. What does not have the traced strides, going in or coming out, is copied into those."""

    def __init__(
        self, function: Callable[[list], Sequence[Any]], inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        super().__init__()
        self.function = function
        self.inputs = [layout_of(value) for value in inputs]
        self.outputs = [layout_of(value) for value in outputs]

    def forward(self, *args: Any) -> Any:
        results = self.function([_restored(value, layout) for value, layout in zip(args, self.inputs)])
        return [_restored(value, layout) for value, layout in zip(results, self.outputs)]


def _restored(value: Any, layout: Optional[Layout]) -> Any:
    return value if layout is None or not isinstance(value, torch.Tensor) else layout.restored(value)
