"""Gradients that a backward returns share no memory: optimizers and clipping edit them in place."""

import torch
from torch import fx

from lightning_thunder_strategy.compiler import _torch_aot
from lightning_thunder_strategy.compiler.emit import node_value

_ATEN = torch.ops.aten
# Operations that return all elements of their input, in its memory.
_SAME_ELEMENTS = {
    _ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default, _ATEN.alias.default, _ATEN.detach.default,
    _ATEN.t.default, _ATEN.transpose.int, _ATEN.permute.default, _ATEN.squeeze.default, _ATEN.squeeze.dim,
    _ATEN.squeeze.dims, _ATEN.unsqueeze.default, torch.ops._c10d_functional.wait_tensor.default,
}  # fmt: skip


def separate_gradients(backward: fx.GraphModule) -> None:
    """Copy a gradient whose elements another gradient of the program has already.

    Two parameters that are added get one and the same gradient. Autograd copies it where both are one plain tensor; it
    does not see that views, or the local parts of two DTensors, are.

    Args:
        backward: A backward program whose outputs are described.
    """
    result = backward.graph.output_node()
    outputs = list(result.args[0])  # type: ignore[arg-type]
    seen: set[fx.Node] = set()
    for place, (kind, _) in enumerate(_torch_aot.output_descriptions(backward.graph)):
        gradient = outputs[place]
        if kind != "gradient" or not (isinstance(gradient, fx.Node) and isinstance(node_value(gradient), torch.Tensor)):
            continue  # none, or the mesh of a DTensor
        source = _elements_of(gradient)
        if source in seen:
            with backward.graph.inserting_before(result):
                outputs[place] = backward.graph.call_function(_ATEN.clone.default, (gradient,))
            outputs[place].meta = {key: value for key, value in gradient.meta.items() if key != "desc"}
        seen.add(source)
    if outputs != list(result.args[0]):  # type: ignore[arg-type]
        result.args = (tuple(outputs),)
        backward.recompile()


def _elements_of(node: fx.Node) -> fx.Node:
    while node.target in _SAME_ELEMENTS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
