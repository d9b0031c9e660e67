"""Finds RMSNorm: ``F.rms_norm``, and written out as in LitGPT and in Hugging Face's Llama and Gemma.

``y = x / sqrt(mean(x^2) + eps) * weight``. Where values are rounded to the type of ``x`` differs: with ``"end"`` all is
computed in float32 and rounded once (``F.rms_norm``, LitGPT, Gemma); with ``"normalized"`` the normalized values are
rounded, and the product with the weight is computed in that type (Llama).
"""

import inspect
from dataclasses import dataclass
from typing import Any, Literal, Optional, Union

import torch
import torch.nn.functional as F
from torch import fx

from lightning_thunder_strategy.compiler.pattern_parts import cast_source, is_op, obstacle, operands, tensor_of
from lightning_thunder_strategy.executors.registered import is_call_of

Rounding = Literal["end", "normalized"]
_SIGNATURE = inspect.signature(lambda input, normalized_shape, weight=None, eps=None: None)


@dataclass(frozen=True)
class RmsNorm:
    """A normalization over the last dimension.

    Attributes:
        x: What is normalized.
        weight: ``[features]``, or ``None``.
        eps: Added to the mean of the squares.
        rounding: Where values are rounded to the type of ``x``.
        covers: The operations before the last one.
    """

    x: fx.Node
    weight: Optional[fx.Node]
    eps: float
    rounding: Rounding
    covers: tuple[fx.Node, ...]


def is_rms_norm(node: fx.Node) -> bool:
    """Whether ``node`` is the last operation of an RMSNorm."""
    if is_call_of(node, F.rms_norm):
        return True
    if _parse(node) is None:
        return False
    users = list(node.users)
    return len(users) != 1 or _parse(users[0]) is None  # else the weight, or the last cast, comes after it


def find_rms_norm(node: fx.Node) -> Union[RmsNorm, str]:
    """The RMSNorm whose last operation ``node`` is, or why a kernel cannot take it.

    Args:
        node: One that :func:`is_rms_norm` takes.
    """
    found = _of_call(node) if is_call_of(node, F.rms_norm) else _of_parts(node)
    if isinstance(found, str):
        return found
    x, weight = tensor_of(found.x), tensor_of(found.weight)
    assert x is not None
    if not isinstance(x.shape[-1], int) or x.shape[-1] == 0:
        return f"its rows have {x.shape[-1]} features, and the kernel takes 1 or more, known in advance"
    if weight is not None and (weight.shape != x.shape[-1:] or weight.device != x.device):
        return f"its weight is {list(weight.shape)} on {weight.device}"
    return found


def _of_call(node: fx.Node) -> Union[RmsNorm, str]:
    given = _SIGNATURE.bind(*node.args, **node.kwargs)
    given.apply_defaults()
    x, shape, weight, eps = given.arguments.values()
    value, result = tensor_of(x), tensor_of(node)
    if value is None or result is None:
        return "the types of its arguments are not known"
    if len(shape) != 1:
        return f"it normalizes {len(shape)} dimensions, and the kernel one"
    types = {value.dtype, result.dtype, *([] if weight is None else [tensor_of(weight).dtype])}  # type: ignore
    if len(types) != 1:
        return f"it mixes types: {', '.join(sorted(map(str, types)))}"
    computed = torch.promote_types(value.dtype, torch.float32)  # whose eps torch takes
    return RmsNorm(x, weight, torch.finfo(computed).eps if eps is None else eps, "end", ())


@dataclass(frozen=True)
class _Parts:
    x: fx.Node
    eps: float
    weight: Optional[fx.Node]
    computed: torch.dtype  # of the normalization
    product: torch.dtype  # of the normalized values as the weight meets them
    covers: tuple[fx.Node, ...]


def _of_parts(node: fx.Node) -> Union[RmsNorm, str]:
    parts = _parse(node)
    assert parts is not None
    x, weight, result = tensor_of(parts.x), tensor_of(parts.weight), tensor_of(node)
    assert x is not None and result is not None
    if parts.computed != torch.float32:
        return f"it is computed in {parts.computed}, and the kernel computes in float32"
    if result.dtype != x.dtype:
        return f"it takes {x.dtype} and gives {result.dtype}"
    rounding: Rounding = "end"
    if x.dtype != torch.float32 and weight is not None and parts.product != torch.float32:
        if parts.product != x.dtype or weight.dtype != x.dtype:
            return f"it rounds to {parts.product} and weighs in {weight.dtype}, and x is {x.dtype}"
        rounding = "normalized"
    problem = obstacle(node, parts.covers)
    return problem or RmsNorm(parts.x, parts.weight, parts.eps, rounding, parts.covers)


def _parse(node: fx.Node) -> Optional[_Parts]:
    """The parts, if ``node`` is the normalization, its product with a weight, or the cast of either."""
    last, covers = node, []
    source = cast_source(node)
    if source is not None:
        last, covers = source, [source]
    found = _weighted(last) or _normalization(last)
    if found is None:
        return None
    if source is not None and tensor_of(node).dtype != tensor_of(found.x).dtype:  # type: ignore[union-attr]
        return None  # such as a cast that belongs to what comes next
    return _ordered(found, covers, node)


def _weighted(node: fx.Node) -> Optional[_Parts]:
    if not is_op(node, "mul"):
        return None
    for normalized, weight in operands(node):
        value = tensor_of(weight)
        if value is None or weight is normalized or value.dim() != 1 or not value.is_floating_point():
            continue
        source = cast_source(normalized)
        found = _normalization(normalized if source is None else source)
        if found is None:
            continue
        covers = list(found.covers)
        covers += [normalized] if source is None else [source, normalized]
        narrow = cast_source(weight)
        if narrow is not None and len(weight.users) == 1 and value.dtype == torch.float32:
            covers += [weight]
            weight = narrow
        product = tensor_of(normalized).dtype  # type: ignore[union-attr]
        return _Parts(found.x, found.eps, weight, found.computed, product, tuple(covers))
    return None


def _normalization(node: Any) -> Optional[_Parts]:
    """``x * rsqrt(mean(x^2) + eps)`` or ``x / sqrt(mean(x^2) + eps)``."""
    if is_op(node, "mul"):
        pairs, root = list(operands(node)), "rsqrt"
    elif is_op(node, "div") and len(node.args) == 2 and not node.kwargs:
        pairs, root = [tuple(node.args)], "sqrt"
    else:
        return None
    for x, factor in pairs:
        if not isinstance(x, fx.Node) or not is_op(factor, root):
            continue
        total = factor.args[0]
        if not is_op(total, "add"):
            continue
        for mean, eps in operands(total):
            square = _mean_of(mean) if isinstance(eps, float) else None
            if square is None or not _is_square_of(square, x) or tensor_of(x) is None:
                continue
            covers = [square, mean, total, factor]
            if len({tensor_of(item).dtype for item in (*covers, node)}) != 1:  # type: ignore[union-attr]
                continue  # a part of it is rounded, as under autocast
            source = cast_source(x)
            if source is not None and not all(user in (square, node) for user in x.users):
                source = None  # it may also be edited
            covers += [] if source is None else [x]
            dtype = tensor_of(node).dtype  # type: ignore[union-attr]
            return _Parts(source if source is not None else x, eps, None, dtype, dtype, tuple(covers))
    return None


def _mean_of(node: Any) -> Optional[fx.Node]:
    """What a mean over the last dimension, which is kept, is taken of."""
    if not is_op(node, "mean"):
        return None
    names = ("input", "dim", "keepdim")
    given = {**dict(zip(names, node.args)), **node.kwargs}
    source = tensor_of(given.get("input"))
    dim = given.get("dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if source is None or set(given) != set(names) or given["keepdim"] is not True:
        return None
    return given["input"] if dim in (-1, source.dim() - 1) else None


def _is_square_of(node: fx.Node, x: fx.Node) -> bool:
    if is_op(node, "mul"):
        return tuple(node.args) == (x, x) and not node.kwargs
    if is_op(node, "pow"):
        return tuple(node.args) in ((x, 2), (x, 2.0)) and not node.kwargs
    return is_op(node, "square") and tuple(node.args) == (x,)


def _ordered(found: _Parts, more: list[fx.Node], last: fx.Node) -> _Parts:
    """With everything before the last operation, in the order of the program."""
    nodes = {*found.covers, *more} - {last}
    ordered, current = [], last
    while len(ordered) < len(nodes):
        current = current.prev
        if current in nodes:
            ordered.append(current)
    return _Parts(found.x, found.eps, found.weight, found.computed, found.product, tuple(reversed(ordered)))
