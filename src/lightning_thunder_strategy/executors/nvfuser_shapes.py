"""nvFuser's operations for views, slices and concatenations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import torch
from torch import fx

from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.executors.nvfuser_values import Rule, Translation

aten, prims = torch.ops.aten, torch.ops.prims

VIEWS = (  # these only look at their first argument's memory in another way
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh.default,
)

SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)  # and these, into several
_MOST = 2**62  # an end of a slice from here on means: to the end


def _broadcast(t: Translation, node: fx.Node) -> Any:
    source, shape, dims = node_value(node.args[0]), list(node.args[1]), list(node.args[2])
    for place, dim in enumerate(dims):
        if _same_size(source.shape[place], node_value(node).shape[dim]):
            shape[dim] = -1  # as it is
    return t.ops.broadcast_in_dim(t[node.args[0]], shape=t[shape], broadcast_dims=dims)


def _expand(t: Translation, node: fx.Node) -> Any:
    source, result = node_value(node.args[0]), node_value(node)
    new = result.dim() - source.dim()
    shape = list(node.args[1])
    for place in range(source.dim()):
        if _same_size(source.shape[place], result.shape[new + place]):
            shape[new + place] = -1
    return t.ops.broadcast_in_dim(t[node.args[0]], shape=t[shape], broadcast_dims=list(range(new, result.dim())))


def _same_size(first: Any, second: Any) -> bool:
    return str(first) == str(second)  # of symbolic sizes too, without a guard


def _reshape(t: Translation, node: fx.Node) -> Any:
    return _to_shape(t, node, list(node.args[1]))


def _to_own_shape(t: Translation, node: fx.Node) -> Any:
    return _to_shape(t, node, list(node_value(node).shape))


def _to_shape(t: Translation, node: fx.Node, shape: Sequence[Any]) -> Any:
    source, result = node_value(node.args[0]).shape, node_value(node).shape
    if [str(size) for size in source] == [str(size) for size in result]:
        return t[node.args[0]]
    known = [size if isinstance(size, int) else want for size, want in zip(result, shape)]
    if any(isinstance(size, torch.SymInt) for size in known):
        raise NotImplementedError(f"{node.target} to the symbolic shape {known} is not translated to nvFuser")
    return t.ops.reshape(t[node.args[0]], new_shape=t[known])


def _permute(t: Translation, node: fx.Node) -> Any:
    rank = node_value(node).dim()
    return _permuted(t, node, [dim % rank for dim in node.args[1]])


def _transpose(t: Translation, node: fx.Node) -> Any:
    order = list(range(node_value(node).dim()))
    if order:
        first, second = (0, -1) if node.target is aten.t.default else node.args[1:]
        order[first], order[second] = order[second], order[first]
    return _permuted(t, node, order)


def _permuted(t: Translation, node: fx.Node, order: list[int]) -> Any:
    value = t[node.args[0]]
    return value if order == sorted(order) else t.ops.permute(value, dims=order)


def _unsqueeze(t: Translation, node: fx.Node) -> Any:
    rank = node_value(node).dim()
    return t.ops.broadcast(t[node.args[0]], is_broadcast_dim=[dim == node.args[1] % rank for dim in range(rank)])


def _squeeze(t: Translation, node: fx.Node) -> Any:
    shape = node_value(node.args[0]).shape
    given = node.args[1] if len(node.args) > 1 else range(len(shape))
    dims = [given] if isinstance(given, int) else list(given)
    found = sorted({dim % max(len(shape), 1) for dim in dims} & {d for d, size in enumerate(shape) if str(size) == "1"})
    return t.ops.squeeze(t[node.args[0]], dims=found) if found else t[node.args[0]]


def _slice(t: Translation, node: fx.Node) -> Any:
    dim, start, end, _ = _slice_arguments(node)
    size = node_value(node.args[0]).shape[dim]
    if isinstance(size, int) and not isinstance(start, fx.Node) and not isinstance(end, fx.Node):
        start, end, _ = slice(start, end).indices(size)
    return _sliced(t, node, dim, start, end)


def _sliced(t: Translation, node: fx.Node, dim: int, start: Any, end: Any) -> Any:
    value = t[node.args[0]]
    source = node_value(node.args[0]).shape
    starts: list[Any] = [0] * len(source)
    ends = [size if isinstance(size, int) else t.ops.size(value, d) for d, size in enumerate(source)]
    starts[dim] = t[start]
    if not isinstance(end, int) or end < _MOST:
        ends[dim] = t[end]
    if starts[dim] == 0 and end == source[dim]:
        return value
    return t.ops.slice(value, start_indices=starts, end_indices=ends, strides=[1] * len(source))


def _slice_arguments(node: fx.Node) -> tuple[int, Any, Any, Any]:
    given = dict(enumerate(node.args[1:]))
    start = given.get(1)
    end = given.get(2)
    rank = node_value(node.args[0]).dim()
    return given.get(0, 0) % rank, 0 if start is None else start, _MOST if end is None else end, given.get(3, 1)


def _unit_step(node: fx.Node) -> Optional[str]:
    step = node.args[5] if node.target is aten.slice_backward.default else _slice_arguments(node)[3]
    return None if step == 1 else f"nvFuser slices in steps of 1, and this one has {step}"


def _select(t: Translation, node: fx.Node) -> Any:
    source, dim, index = node_value(node.args[0]), node.args[1], node.args[2]
    dim %= source.dim()
    size = source.shape[dim]
    index = index if index >= 0 else index + size
    return t.ops.squeeze(_sliced(t, node, dim, index, index + 1), dims=[dim])


def _cat(t: Translation, node: fx.Node) -> Any:
    result = node_value(node)
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return t.ops.cat([t.cast(t[part], result.dtype) for part in node.args[0]], dim=dim % result.dim())


def _slice_backward(t: Translation, node: fx.Node) -> Any:
    _, sizes, dim, start, end, _ = node.args
    dim %= len(sizes)
    if isinstance(sizes[dim], int):
        start, end, _ = slice(start, end).indices(sizes[dim])
        return _padded(t, node, dim, start, sizes[dim] - max(end, start))
    return _padded(t, node, dim, start, 0)  # to the end: see symbolic_problem


def _select_backward(t: Translation, node: fx.Node) -> Any:
    _, sizes, dim, index = node.args
    dim %= len(sizes)
    index %= sizes[dim]
    new = [place == dim for place in range(len(sizes))]
    value = t.ops.broadcast(t[node.args[0]], is_broadcast_dim=new)
    return _padded(t, node, dim, index, sizes[dim] - index - 1, value)


def symbolic_problem(node: fx.Node) -> Optional[str]:
    """Why an operation that can be given to nvFuser with fixed sizes cannot with those that it has, if it cannot."""
    if node.target in (aten.slice.Tensor, aten.select.int):
        source = node_value(node.args[0])
        dim = node.args[1] if len(node.args) > 1 else 0
        places, size = node.args[2:4], source.shape[dim]
    elif node.target in (aten.slice_backward.default, aten.select_backward.default):
        dim, places, size = node.args[2], node.args[3:5], node_value(node).shape[node.args[2]]
    else:
        return None
    if node.target is aten.select.int or node.target is aten.select_backward.default:
        fixed = isinstance(places[0], int) and (isinstance(size, int) or (places[0] >= 0 and len(node.args) == 3))
        return None if fixed else "it selects at a place of a symbolic size"
    numbers = [place for place in places if isinstance(place, int)]
    if isinstance(size, int):
        fixed = len(numbers) == len([place for place in places if place is not None]) or len(places) < 1
    else:
        fixed = all(place >= 0 for place in numbers)
    if node.target is aten.slice_backward.default and not isinstance(size, int):
        fixed = len(numbers) == 2 and numbers[0] >= 0 and numbers[1] >= _MOST
    return None if fixed else "it slices at a place of a symbolic size"


def _padded(t: Translation, node: fx.Node, dim: int, before: int, after: int, value: Any = None) -> Any:
    """Zeros around a value in one dimension. Widths are given innermost dimension first, as in ``F.pad``."""
    widths = [0] * (2 * (node_value(node).dim() - dim))
    widths[-2:] = before, after
    return t.ops.pad(t[node.args[0]] if value is None else value, pad_widths=widths)


def _same(t: Translation, node: fx.Node) -> Any:
    return t[node.args[0]]


SHAPES: Mapping[Any, Rule] = {
    prims.broadcast_in_dim.default: _broadcast,
    aten.expand.default: _expand,
    prims.reshape.default: _reshape,
    prims.split_dim.default: _to_own_shape,
    prims.collapse_view.default: _to_own_shape,
    prims.collapse.default: _to_own_shape,
    prims.view_of.default: _same,
    aten.view.default: _reshape,
    aten.reshape.default: _reshape,
    aten._unsafe_view.default: _reshape,
    prims.transpose.default: _permute,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.unsqueeze.default: _unsqueeze,
    prims.squeeze.default: _squeeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten.cat.default: _cat,
    aten.alias.default: _same,
    aten.detach.default: _same,
}
SHAPE_LIMITS: Mapping[Any, Callable[[fx.Node], Optional[str]]] = {
    aten.slice.Tensor: _unit_step,
    aten.slice_backward.default: _unit_step,
}
