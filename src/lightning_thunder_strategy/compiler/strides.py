"""Kernels whose results have other strides than a program was traced with: it gets those of the trace."""

import operator
from collections.abc import Iterable

import torch
from torch import fx

from lightning_thunder_strategy.compiler import _torch_compat
from lightning_thunder_strategy.compiler.emit import node_value

_STRIDES_DIFFER = (  # from those that the program was traced with, if the input is permuted
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten._native_batch_norm_legit.default,
    torch.ops.aten._native_batch_norm_legit.no_stats,
    torch.ops.aten._native_batch_norm_legit_functional.default,
    torch.ops.aten._native_batch_norm_legit_no_training.default,
    torch.ops.aten._batch_norm_with_update.default,
    torch.ops.aten._batch_norm_with_update_functional.default,
)


def allow_other_strides(nodes: Iterable[fx.Node]) -> None:
    """Let views copy where they must. Some of torch's kernels (BatchNorm, the backward of log-softmax) give results
    with other strides than the program was traced with, of which no view may be possible."""
    for node in nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
        if node.target in _STRIDES_DIFFER:
            for part in list(node.users):
                if part.target is operator.getitem and part.args[1] == 0:
                    _give_traced_strides(part)


def _give_traced_strides(node: fx.Node) -> None:
    """Copy a value into the strides that it was traced with: AOTAutograd makes views of results by them."""
    value = node_value(node)
    order = sorted(range(value.dim()), key=lambda dim: -_torch_compat.size_hint(value.stride(dim)))
    if order == list(range(value.dim())) or value.is_contiguous(memory_format=torch.channels_last):
        return
    inverse = [order.index(dim) for dim in range(value.dim())]
    aten, contiguous = torch.ops.aten, {"memory_format": torch.contiguous_format}
    with node.graph.inserting_after(node):
        dense = node.graph.call_function(aten.permute.default, (node, order))
    with node.graph.inserting_after(dense):
        copy = node.graph.call_function(aten.clone.default, (dense,), contiguous)
    with node.graph.inserting_after(copy):
        result = node.graph.call_function(aten.permute.default, (copy, inverse))
    dense.meta["val"], copy.meta["val"] = value.permute(order), value.permute(order).clone(**contiguous)
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not dense)
