"""Kernels whose results have other strides than a program was traced with: it gets those of the trace."""

import operator
from collections.abc import Collection, Sequence
from typing import Optional

import torch
from torch import fx

from lightning_thunder_strategy.compiler import _torch_compat
from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.surgery import is_operation

_STRIDES_DIFFER = (  # from those that the program was traced with, if the input is permuted
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten._native_batch_norm_legit.default,
    torch.ops.aten._native_batch_norm_legit.no_stats,
    torch.ops.aten._native_batch_norm_legit_functional.default,
    torch.ops.aten._native_batch_norm_legit_no_training.default,
    torch.ops.aten._batch_norm_with_update.default,
    torch.ops.aten._batch_norm_with_update_functional.default,
)


def allow_other_strides(graph: fx.Graph, nodes: Collection[fx.Node], saved: Collection[int] = ()) -> None:
    """Let views copy where they must. Some of torch's kernels (BatchNorm, the backward of log-softmax) give results
    with other strides than the program was traced with, of which no view may be possible.

    Where all of the program runs eagerly, what follows keeps these strides, as random numbers are drawn in the order of
    memory, and what is returned gets the traced ones: AOTAutograd makes views of results by them. Where other
    executors take regions, which are compiled for the traced strides, the kernel's result gets them at once.

    Args:
        graph: The program.
        nodes: Its operations that run eagerly.
        saved: Outputs that only the backward reads.
    """
    found = []
    for node in nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
        if node.target in _STRIDES_DIFFER:
            found += [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
    found = [node for node in found if _order(node_value(node)) is not None]
    found += filter(_fill_in_place, nodes)
    if any(is_operation(node) and node not in nodes for node in graph.nodes):
        for node in found:
            _give_traced_strides(node, list(node.users))
        return
    result = graph.output_node()
    for node in dict.fromkeys(_returned(result, saved)):
        if isinstance(node_value(node), torch.Tensor) and _follows(node, found):
            _give_traced_strides(node, [result])


def _fill_in_place(node: fx.Node) -> bool:
    """``bernoulli_`` of a new tensor, as in ``F.alpha_dropout``, fills it in the order of its memory; the operator that
    stands for it in a program without edits does not. Whether ``node`` is one, which it no longer is then."""
    if node.target is not torch.ops.aten.bernoulli.p:
        return False
    new = node.args[0]
    if new.target is not torch.ops.aten.empty_like.default or len(new.users) > 1 or "memory_format" in new.kwargs:
        return False
    node.target = torch.ops.aten.bernoulli_.float
    return True


def _returned(result: fx.Node, saved: Collection[int]) -> list[fx.Node]:
    values = result.args[0] if isinstance(result.args[0], (tuple, list)) else result.args
    return [value for index, value in enumerate(values) if isinstance(value, fx.Node) and index not in saved]


def _follows(node: fx.Node, sources: Sequence[fx.Node]) -> bool:
    """Whether a value is computed from one of ``sources``."""
    if not sources:
        return False
    seen, waiting = set(), [node]
    while waiting:
        value = waiting.pop()
        if value in sources:
            return True
        if value not in seen:
            seen.add(value)
            waiting += value.all_input_nodes
    return False


def _order(value: torch.Tensor) -> Optional[list[int]]:
    """Dimensions from the one with the largest stride on; ``None`` if they are in order, or channels are last."""
    order = sorted(range(value.dim()), key=lambda dim: -_torch_compat.size_hint(value.stride(dim)))
    in_order = order == list(range(value.dim())) or value.is_contiguous(memory_format=torch.channels_last)
    return None if in_order else order


def _give_traced_strides(node: fx.Node, users: Collection[fx.Node]) -> None:
    """Copy a value into the strides that it was traced with, for some of its users, if it has others."""
    value = node_value(node)
    order = _order(value) or list(range(value.dim()))
    if value.dim() < 2 or (value.dim() == 4 and not value.is_contiguous() and order == list(range(4))):
        return  # channels last, which kernels keep
    steps = [(torch.ops.aten.contiguous.default, (), lambda x: x.contiguous())]
    if order != list(range(value.dim())):
        inverse = [order.index(dim) for dim in range(value.dim())]
        permute = torch.ops.aten.permute.default
        steps.insert(0, (permute, (order,), lambda x: x.permute(order)))
        steps.append((permute, (inverse,), lambda x: x.permute(inverse)))
    last = node
    for target, args, compute in steps:
        with node.graph.inserting_after(last):
            step = node.graph.call_function(target, (last, *args))
        step.meta["val"] = compute(node_value(last))
        last = step
    last.meta = dict(node.meta)
    for user in users:
        user.replace_input_with(node, last)
