"""Puts the operations of a program into an order that can run, and makes new ones."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from lightning_thunder_strategy.compiler.emit import node_value


def sort_stably(graph: fx.Graph) -> None:
    """Move operations behind what they use. Those that could run where they are stay in their order."""
    nodes = list(graph.nodes)
    missing = {node: sum(1 for used in node.all_input_nodes) for node in nodes}
    place = {node: index for index, node in enumerate(nodes)}
    order: list[fx.Node] = []
    for node in nodes:
        stack = [node] if missing[node] == 0 else []
        while stack:
            ready = stack.pop()
            order.append(ready)
            missing[ready] = -1
            freed = []
            for user in ready.users:
                missing[user] -= 1
                if missing[user] == 0 and place[user] < place[node]:
                    freed.append(user)
            stack += sorted(freed, key=place.__getitem__, reverse=True)
    assert len(order) == len(nodes), "the program has a cycle"
    output = graph.output_node()
    for node in order:
        if node is not output:
            output.prepend(node)


def call(graph: fx.Graph, function: Callable, *args: Any, like: fx.Node) -> fx.Node:
    """A new operation at the graph's insertion point, with the value that it would have.

    Args:
        graph: The program.
        function: An operator.
        args: Its arguments.
        like: Which operation's source line it belongs to.
    """
    node = graph.call_function(function, args)
    values = tree_map_only(fx.Node, node_value, args)
    mode = next(value.fake_mode for value in _tensors(values) if hasattr(value, "fake_mode"))
    with mode, torch.no_grad():
        node.meta["val"] = function(*values)
    for key in ("stack_trace", "nn_module_stack"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    return node


def update_value(node: fx.Node) -> None:
    """Compute an operation's value again, because what it uses has changed."""
    args, kwargs = tree_map_only(fx.Node, node_value, (node.args, node.kwargs))
    mode = next(value.fake_mode for value in _tensors(args) if hasattr(value, "fake_mode"))
    with mode, torch.no_grad():
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
    node.meta.pop("tensor_meta", None)


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from _tensors(value)
