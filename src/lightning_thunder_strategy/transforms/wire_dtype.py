"""Chooses the element types in which parameters and gradients are communicated."""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import fx

from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.ordering import call, update_value
from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.transforms.parameter_collectives import GATHER, parameter_collectives
from lightning_thunder_strategy.transforms.unshard_policy import parameter_gather

_LAYOUTS = (
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "slice", "expand", "alias", "detach", "unsqueeze",
    "squeeze",
)  # fmt: skip
_CASTS = ("aten::_to_copy", "prims::convert_element_type")


@dataclass(frozen=True)
class CastBeforeGather(Transform):
    """Casts a parameter's shard, and gathers the result, where the gathered parameter is only used in that cast.

    Under autocast that is the case for all that matrix multiplications use: half the bytes, the same values.
    """

    def joint(self, trace: Trace) -> None:
        _cast_shards(trace)

    def partitioned(self, forward: Trace, backward: Optional[Trace]) -> None:
        if backward is None:  # a program without gradients has no joint form
            _cast_shards(forward)


@dataclass(frozen=True)
class ReduceIn(Transform):
    """Reduces gradients in another element type than they have.

    Attributes:
        dtype: Name of the type, such as ``"float32"``.
    """

    dtype: str

    def partitioned(self, forward: Trace, backward: Optional[Trace]) -> None:
        wanted = getattr(torch, self.dtype)
        for trace in (forward, backward):
            for item in parameter_collectives(trace) if trace is not None else ():
                graph, gradient = item.launch.graph, item.launch.args[0]
                assert isinstance(gradient, fx.Node)
                had = node_value(gradient).dtype
                if item.op == GATHER or had == wanted or not had.is_floating_point:
                    continue
                with graph.inserting_before(item.launch):
                    cast = _cast(graph, gradient, wanted, item.launch)
                item.launch.replace_input_with(gradient, cast)
                update_value(item.launch)
                update_value(item.wait)
                with graph.inserting_after(item.wait):
                    back = _cast(graph, item.wait, had, item.wait)
                item.wait.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)


def _cast_shards(trace: Trace) -> None:
    graph = trace.graph
    for wait in list(graph.nodes):
        chain = parameter_gather(wait)
        if chain is None:
            continue
        found = _only_cast(wait)
        if found is None:
            continue
        dtype, forms, casts = found
        gather = chain[1]
        shard = gather.args[0]
        assert isinstance(shard, fx.Node)
        with graph.inserting_before(gather):
            cast = _cast(graph, shard, dtype, gather)
        gather.replace_input_with(shard, cast)
        for node in (gather, wait, *forms):
            update_value(node)
        for node in casts:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)


def _only_cast(wait: fx.Node) -> Optional[tuple[torch.dtype, list[fx.Node], list[fx.Node]]]:
    """If all that happens to a gathered parameter is one cast: the type, the views in between, and the casts."""
    forms: list[fx.Node] = []
    casts: list[fx.Node] = []
    pending = [wait]
    while pending:
        for user in pending.pop().users:
            name = user.target._schema.name if isinstance(user.target, torch._ops.OpOverload) else ""
            if _is_cast(user):
                casts.append(user)
            elif name.removeprefix("aten::") in _LAYOUTS:
                forms.append(user)
                pending.append(user)
            else:
                return None
    types = {node_value(cast).dtype for cast in casts}
    had = node_value(wait).dtype
    if len(types) != 1 or next(iter(types)).itemsize >= had.itemsize or not had.is_floating_point:
        return None
    order = {node: index for index, node in enumerate(wait.graph.nodes)}
    return types.pop(), sorted(forms, key=order.__getitem__), casts


def _is_cast(node: fx.Node) -> bool:
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    return name in _CASTS and set(node.kwargs) <= {"dtype"}


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    return call(graph, torch.ops.prims.convert_element_type.default, node, dtype, like=like)
