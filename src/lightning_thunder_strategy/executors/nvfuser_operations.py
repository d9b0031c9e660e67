"""Which of nvFuser's operations stand for which primitive operations of torch.

The names of nvFuser's operations and their arguments are those of its ``python/python_direct/ops.cpp``.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch
from torch import fx

from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.executors.nvfuser_shapes import SHAPE_LIMITS, SHAPES
from lightning_thunder_strategy.executors.nvfuser_values import TYPES, Rule, Translation

aten, prims = torch.ops.aten, torch.ops.prims


def translate(t: Translation, node: fx.Node) -> None:
    """Give nvFuser one operation."""
    if node.target is aten.copy_.default:  # of a decomposition, into a value of its own
        target, source = node.args[0], node.args[1]
        t[target] = t[node] = t.cast(t[source], node_value(target).dtype)
        return
    result, value = OPERATIONS[node.target](t, node), node_value(node)
    t[node] = t.cast(result, value.dtype) if isinstance(value, torch.Tensor) else result


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
    **SHAPES,
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
    **SHAPE_LIMITS,
}
KEPT = frozenset(
    op for op in OPERATIONS if isinstance(op, torch._ops.OpOverload) and op.namespace == "aten"
)  # these are not broken down
