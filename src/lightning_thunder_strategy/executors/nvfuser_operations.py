"""Which of nvFuser's operations stand for which primitive operations of torch.

The names of nvFuser's operations and their arguments are those of its ``python/python_direct/ops.cpp``.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import torch
from torch import fx

from lightning_thunder_strategy.compiler.emit import node_value

aten, prims = torch.ops.aten, torch.ops.prims

TYPES = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Int",
    torch.int32: "Int32",
    torch.bool: "Bool",
}

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

_MOST = 2**62  # an end of a slice from here on means: to the end


class Translation:
    """nvFuser's values for the operations of one program.

    Args:
        fusion: nvFuser's ``FusionDefinition``, open.
        types: nvFuser's ``DataType``.
    """

    def __init__(self, fusion: Any, types: Any) -> None:
        self.ops = fusion.ops
        self._fusion = fusion
        self._types = types
        self._values: dict[fx.Node, Any] = {}
        self.integers: list[fx.Node] = []  # numbers that the fusion takes as inputs, after its tensors

    def __getitem__(self, value: Any) -> Any:
        """What nvFuser has for an argument: a value of the fusion, or a plain number."""
        if isinstance(value, (list, tuple)):
            return [self[item] for item in value]
        if not isinstance(value, fx.Node):
            return value
        if value not in self._values:
            assert not isinstance(node_value(value), torch.Tensor), f"{value} is not computed yet"
            self._values[value] = self._fusion.define_scalar(None, dtype=self._types.Int)
            self.integers.append(value)
        return self._values[value]

    def __setitem__(self, node: fx.Node, value: Any) -> None:
        self._values[node] = value

    def type(self, dtype: torch.dtype) -> Any:
        return getattr(self._types, TYPES[dtype])

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """``value`` in a type, as it is if it has that already."""
        wanted = self.type(dtype)
        return value if value.dtype() == wanted else self.ops.cast(value, wanted)

    def translate(self, node: fx.Node) -> None:
        """Give nvFuser one operation."""
        if node.target is aten.copy_.default:  # of a decomposition, into a value of its own
            target, source = node.args[0], node.args[1]
            self._values[target] = self._values[node] = self.cast(self[source], node_value(target).dtype)
            return
        result = OPERATIONS[node.target](self, node)
        value = node_value(node)
        if isinstance(value, torch.Tensor):
            result = self.cast(result, value.dtype)
        self._values[node] = result


Rule = Callable[[Translation, fx.Node], Any]


def problem(node: fx.Node) -> Optional[str]:
    """Why a primitive operation cannot be given to nvFuser, or ``None`` if it can.

    ``node_value`` of it and of its arguments are fake tensors of fixed sizes.
    """
    if node.target is operator.getitem or node.target is aten.copy_.default:
        return None
    if node.target not in OPERATIONS:
        return f"nvFuser has nothing for {node.target}"
    for used in (node, *node.all_input_nodes):
        value = node_value(used)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype not in TYPES:
                return f"nvFuser has no values of type {tensor.dtype}"
            if isinstance(tensor, torch.Tensor) and tensor.numel() == 0:
                return "it has a tensor without elements"
    if used_op := next((used for used in node.all_input_nodes if used.op == "get_attr"), None):
        return f"it uses a constant, {used_op.target}"
    limit = _LIMITS.get(node.target)
    return None if limit is None else limit(node)


# ------------------------------------------------------------------------------------------------------------ pointwise


def _unary(name: str) -> Rule:
    return lambda t, node: getattr(t.ops, name)(t[node.args[0]])


def _binary(name: str) -> Rule:
    return lambda t, node: getattr(t.ops, name)(t[node.args[0]], t[node.args[1]])


def _where(t: Translation, node: fx.Node) -> Any:
    condition, first, second = (t[argument] for argument in node.args)
    return t.ops.where(condition, first, second)


def _cast(t: Translation, node: fx.Node) -> Any:
    return t.ops.cast(t[node.args[0]], t.type(node_value(node).dtype))


# ----------------------------------------------------------------------------------------------------------- reductions


def _reduction(name: str) -> Rule:
    def reduce(t: Translation, node: fx.Node) -> Any:
        dims = list(node.args[1]) if len(node.args) > 1 else list(range(node_value(node.args[0]).dim()))
        value = t.cast(t[node.args[0]], node_value(node).dtype)  # sums of integers are made in the result's type
        return getattr(t.ops, name)(value, dims=dims, keepdim=False) if dims else t.ops.set(value)

    return reduce


def _correction(node: fx.Node) -> float:
    given = node.kwargs.get("correction", node.args[2] if len(node.args) > 2 else None)
    return 1 if given is None else given


def _var(t: Translation, node: fx.Node) -> Any:
    return t.ops.var(t[node.args[0]], dims=list(node.args[1]), correction=int(_correction(node)), keepdim=False)


def _var_mean(t: Translation, node: fx.Node) -> Any:
    x = node_value(node.args[0])
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims = [dim % x.dim() for dim in dims] if dims else list(range(x.dim()))
    given = node.kwargs.get("correction")
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    keep = bool(node.kwargs.get("keepdim", False))
    results = t.ops.var_mean(
        t.cast(t[node.args[0]], wide), dims=dims, correction=1 if given is None else int(given), keepdim=keep
    )
    return [t.cast(result, x.dtype) for result in results]


def _whole_correction(node: fx.Node) -> Optional[str]:
    given = node.kwargs.get("correction")
    number = 1 if given is None else given
    if node.target is prims.var.default:
        number = _correction(node)
    if node_value(node.args[0]).dim() == 0:
        return "nvFuser has no variance of a single number"
    return None if float(number).is_integer() else f"nvFuser has no variance with correction={number}"


# --------------------------------------------------------------------------------------------------------------- shapes


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
    elif any(isinstance(place, int) and place < 0 for place in (start, end)):
        raise NotImplementedError("a slice that counts from the end of a symbolic size is not translated to nvFuser")
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
    if isinstance(index, fx.Node) or (index < 0 and not isinstance(size, int)):
        raise NotImplementedError("a selection at a symbolic place is not translated to nvFuser")
    index = index if index >= 0 else index + size
    return t.ops.squeeze(_sliced(t, node, dim, index, index + 1), dims=[dim])


def _cat(t: Translation, node: fx.Node) -> Any:
    result = node_value(node)
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return t.ops.cat([t.cast(t[part], result.dtype) for part in node.args[0]], dim=dim % result.dim())


def _slice_backward(t: Translation, node: fx.Node) -> Any:
    _, sizes, dim, start, end, _ = node.args
    if not all(isinstance(number, int) for number in (sizes[dim], start, end)):
        raise NotImplementedError("the gradient of a slice of a symbolic size is not translated to nvFuser")
    dim %= len(sizes)
    first, last, _ = slice(start, end).indices(sizes[dim])
    return _padded(t, node, dim, first, sizes[dim] - max(last, first))


def _select_backward(t: Translation, node: fx.Node) -> Any:
    _, sizes, dim, index = node.args
    if not all(isinstance(number, int) for number in (sizes[dim], index)):
        raise NotImplementedError("the gradient of a selection of a symbolic size is not translated to nvFuser")
    dim %= len(sizes)
    index %= sizes[dim]
    new = [place == dim for place in range(len(sizes))]
    value = t.ops.broadcast(t[node.args[0]], is_broadcast_dim=new)
    return _padded(t, node, dim, index, sizes[dim] - index - 1, value)


def _padded(t: Translation, node: fx.Node, dim: int, before: int, after: int, value: Any = None) -> Any:
    """Zeros around a value in one dimension. Widths are given innermost dimension first, as in ``F.pad``."""
    widths = [0] * (2 * (node_value(node).dim() - dim))
    widths[-2:] = before, after
    return t.ops.pad(t[node.args[0]] if value is None else value, pad_widths=widths)


# ------------------------------------------------------------------------------------------------------------ constants


def _full(t: Translation, node: fx.Node) -> Any:
    return _filled(t, node, t[list(node.args[0])], node.args[1])


def _constant(number: int) -> Rule:
    return lambda t, node: _filled(t, node, t[list(node.args[0])], number)


def _full_like(t: Translation, node: fx.Node) -> Any:
    return _filled(t, node, _shape_of(t, node.args[0]), node.args[1])


def _constant_like(number: int) -> Rule:
    return lambda t, node: _filled(t, node, _shape_of(t, node.args[0]), number)


def _scalar_tensor(t: Translation, node: fx.Node) -> Any:
    return _filled(t, node, [], node.args[0])


def _shape_of(t: Translation, source: fx.Node) -> list[Any]:
    shape = node_value(source).shape
    return [size if isinstance(size, int) else t.ops.size(t[source], dim) for dim, size in enumerate(shape)]


def _filled(t: Translation, node: fx.Node, shape: list[Any], number: Any) -> Any:
    dtype = node_value(node).dtype
    kind = bool if dtype == torch.bool else float if dtype.is_floating_point else int
    value = t[number] if isinstance(number, fx.Node) else kind(number)
    return t.ops.full(shape=shape, fill_value=value, dtype=t.type(dtype))


def _same(t: Translation, node: fx.Node) -> Any:
    return t[node.args[0]]


# ---------------------------------------------------------------------------------------------------------------- table

_ANY_NUMBER = ("abs", "neg", "bitwise_not", "sign")  # the other unary ones take floating point numbers
_UNARY = {
    name: name
    for name in (
        *("acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "exp", "exp2", "expm1"),
        *("erf", "erfc", "floor", "lgamma", "log", "log10", "log1p", "log2", "reciprocal", "round"),
        *("rsqrt", "signbit", "sin", "sinh", "sqrt", "tan", "tanh", "trunc", "isfinite", *_ANY_NUMBER),
    )
} | {"erf_inv": "erfinv"}
_BINARY = {
    name: name
    for name in (
        *("add", "sub", "mul", "div", "atan2", "fmod", "maximum", "minimum", "pow", "remainder", "nextafter"),
        *("eq", "ge", "gt", "le", "lt", "ne", "bitwise_and", "bitwise_or", "bitwise_xor"),
    )
} | {"shift_left": "bitwise_left_shift", "shift_right_arithmetic": "bitwise_right_shift"}
_REDUCTIONS = {"sum": "sum", "prod": "prod", "amax": "max", "amin": "min"}


def _primitive(name: str) -> torch._ops.OpOverload:
    return getattr(prims, name).default


OPERATIONS: Mapping[Any, Rule] = {
    **{_primitive(name): _unary(other) for name, other in _UNARY.items()},
    **{_primitive(name): _binary(other) for name, other in _BINARY.items()},
    **{_primitive(name): _reduction(other) for name, other in _REDUCTIONS.items()},
    prims.where.default: _where,
    prims.convert_element_type.default: _cast,
    prims.clone.default: _unary("set"),
    prims.var.default: _var,
    aten.var_mean.correction: _var_mean,
    operator.getitem: lambda t, node: t[node.args[0]][node.args[1]],
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
    aten.full.default: _full,
    aten.zeros.default: _constant(0),
    aten.ones.default: _constant(1),
    aten.full_like.default: _full_like,
    aten.zeros_like.default: _constant_like(0),
    aten.ones_like.default: _constant_like(1),
    aten.scalar_tensor.default: _scalar_tensor,
}
_LIMITS: Mapping[Any, Callable[[fx.Node], Optional[str]]] = {
    **{
        _primitive(name): lambda node: (
            None if node_value(node.args[0]).is_floating_point() else "nvFuser has it for floating point numbers only"
        )
        for name in _UNARY
        if name not in _ANY_NUMBER
    },
    prims.var.default: _whole_correction,
    aten.var_mean.correction: _whole_correction,
    aten.slice.Tensor: _unit_step,
    aten.slice_backward.default: _unit_step,
}
KEPT = frozenset(
    op for op in OPERATIONS if isinstance(op, torch._ops.OpOverload) and op.namespace == "aten"
)  # these are not broken down
