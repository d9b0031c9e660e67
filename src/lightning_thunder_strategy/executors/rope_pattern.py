"""Finds rotary position embeddings: ``x * cos + rotate_half(x) * sin``, as in LitGPT and in Hugging Face's Llama.

``rotate_half`` of ``[x1, x2]``, the halves of the last dimension, is ``[-x2, x1]``. The kernel reads one half of
``cos`` and ``sin`` and takes the other half as equal to it. That is seen in the program where it computes them; for a
program's inputs, such as LitGPT's buffers, it is checked when they are first used.
"""

from dataclasses import dataclass
from typing import Any, Optional, Union

import torch
from torch import fx

from lightning_thunder_strategy.compiler.pattern_parts import (
    cast_source,
    change_between,
    is_op,
    obstacle,
    operands,
    tensor_of,
)

_VIEWS = ("unsqueeze", "view", "expand", "squeeze")
_ELEMENTWISE = ("cos", "sin", "contiguous", "float", "to", "mul", "clone")


@dataclass(frozen=True)
class Rope:
    """Attributes:
    x: ``[batch, heads, tokens, features]``.
    cos: ``[1 or batch, 1, tokens, features]``.
    sin: As ``cos``.
    known: Whether the program shows that the halves of ``cos`` and of ``sin`` are equal.
    covers: The operations before the last one.
    """

    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    known: bool
    covers: tuple[fx.Node, ...]


def is_rope(node: fx.Node) -> bool:
    """Whether ``node`` is the last operation of a rotation."""
    if _parse(node) is None:
        return False
    users = list(node.users)
    return len(users) != 1 or _parse(users[0]) is None


def find_rope(node: fx.Node) -> Union[Rope, str]:
    """The rotation whose last operation ``node`` is, or why a kernel cannot take it.

    Args:
        node: One that :func:`is_rope` takes.
    """
    found = _parse(node)
    assert found is not None
    x, cos, sin = (tensor_of(item) for item in (found.x, found.cos, found.sin))
    assert x is not None and cos is not None and sin is not None
    if cos.dtype != sin.dtype:
        return f"it mixes types: {cos.dtype}, {sin.dtype}"
    if cos.requires_grad or sin.requires_grad:
        return "it needs the gradients of cos or sin"
    wanted = [("1", str(x.shape[0])), ("1",), (str(x.shape[2]),), (str(x.shape[3]),)] if x.dim() == 4 else []
    if not wanted or any(value.dim() != 4 or not _fits(value.shape, wanted) for value in (cos, sin)):
        shapes = f"x {list(x.shape)}, cos {list(cos.shape)} and sin {list(sin.shape)}"
        return f"it takes [batch, heads, tokens, features] with cos and sin for all heads, and this has {shapes}"
    if str(cos.shape[0]) != str(sin.shape[0]):
        return f"cos is for {cos.shape[0]} rows and sin for {sin.shape[0]}"
    if any(not isinstance(size, int) or size == 0 for size in (x.shape[1], x.shape[3])):
        return (
            f"it has {x.shape[1]} heads of {x.shape[3]} features, and the kernel takes such that are known in advance"
        )
    kinds = {_halves(found.cos), _halves(found.sin)}
    if None in kinds:
        return "how cos or sin is computed does not show that its two halves are equal"
    problem = obstacle(node, found.covers)
    known = kinds == {"equal"} and change_between(node, {_cat(found.cos), _cat(found.sin)}, modes=False) is None
    return problem or Rope(found.x, found.cos, found.sin, known, found.covers)


def _cat(node: Any) -> fx.Node:
    """Where the halves are put together."""
    while not is_op(node, "cat"):
        node = node.args[0]
    return node


def _fits(shape: Any, wanted: list[tuple[str, ...]]) -> bool:
    return all(str(size) in allowed for size, allowed in zip(shape, wanted))


def _parse(node: fx.Node) -> Optional[Rope]:
    source = cast_source(node)
    found = _sum(node if source is None else source)
    if found is None or source is None:
        return found
    if tensor_of(node).dtype != tensor_of(found.x).dtype:  # type: ignore[union-attr]
        return None
    return Rope(found.x, found.cos, found.sin, False, (*found.covers, source))


def _sum(node: Any) -> Optional[Rope]:
    if not is_op(node, "add"):
        return None
    for plain, turned in operands(node):
        if not is_op(plain, "mul") or not is_op(turned, "mul"):
            continue
        for rotated, sin in operands(turned):
            halves = _rotated(rotated)
            if halves is None or tensor_of(sin) is None:
                continue
            x, parts = halves
            for same, cos in operands(plain):
                if same is x and tensor_of(cos) is not None and cos is not x:
                    covers = {*parts, rotated, turned, plain}
                    return Rope(x, cos, sin, False, tuple(sorted(covers, key=_place(node))))
    return None


def _place(last: fx.Node) -> Any:
    order = {item: place for place, item in enumerate(last.graph.nodes)}
    return order.__getitem__


def _rotated(node: Any) -> Optional[tuple[fx.Node, list[fx.Node]]]:
    """``x`` and the operations before ``node``, if that is ``cat((-x2, x1), -1)`` of its halves."""
    if not is_op(node, "cat"):
        return None
    given = {**dict(zip(("tensors", "dim"), node.args)), **node.kwargs}
    tensors, value = given.get("tensors"), tensor_of(node)
    if set(given) != {"tensors", "dim"} or value is None or given["dim"] not in (-1, value.dim() - 1):
        return None
    if not isinstance(tensors, (tuple, list)) or len(tensors) != 2 or not is_op(tensors[0], "neg"):
        return None
    negative, first = tensors
    second = negative.args[0]
    if not all(isinstance(item, fx.Node) and is_op(item, "getitem") for item in (first, second)):
        return None
    x = first.args[0]
    size = tensor_of(x).shape[-1] if tensor_of(x) is not None else None  # type: ignore[union-attr]
    if x is not second.args[0] or not isinstance(size, int) or size % 2:
        return None
    half = size // 2
    if _last_slice(first, size) != (0, half) or _last_slice(second, size) != (half, size):
        return None
    return x, [first, second, negative]


def _last_slice(node: fx.Node, size: int) -> Optional[tuple[int, int]]:
    """First and end of what is taken of the last dimension, if the others are taken whole."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    *others, last = index
    dims = tensor_of(node.args[0]).dim()  # type: ignore[union-attr]
    if not isinstance(last, slice) or not all(item is Ellipsis or item == slice(None) for item in others):
        return None
    if Ellipsis not in others and len(index) != dims:
        return None
    ends = (last.start, last.stop, last.step)
    if not all(item is None or isinstance(item, int) for item in ends):
        return None
    start, stop, step = last.indices(size)
    return (start, stop) if step == 1 else None


def _halves(node: Any) -> Optional[str]:
    """``"equal"`` if the program shows that the halves of a row are, ``"input"`` for a view of an input."""
    size = tensor_of(node).shape[-1]  # type: ignore[union-attr]
    views_only = True
    while isinstance(node, fx.Node) and tensor_of(node) is not None and tensor_of(node).shape[-1] == size:
        if node.op in ("placeholder", "get_attr"):
            return "input" if views_only else None
        if is_op(node, "cat"):
            given = {**dict(zip(("tensors", "dim"), node.args)), **node.kwargs}
            tensors = given.get("tensors", ())
            last = given.get("dim", 0) in (-1, tensor_of(node).dim() - 1)
            return "equal" if last and len(tensors) == 2 and tensors[0] is tensors[1] else None
        view = any(is_op(node, name) for name in _VIEWS)
        if is_op(node, "getitem"):
            index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
            view = len(index) < tensor_of(node.args[0]).dim() and all(isinstance(item, slice) for item in index)
        elif is_op(node, "mul"):
            if len(node.args) != 2 or not isinstance(node.args[1], (int, float)):
                return None
            views_only = False
        elif not view:
            if not any(is_op(node, name) for name in _ELEMENTWISE):
                return None
            views_only = False
        if not view and not torch.is_floating_point(tensor_of(node)):
            return None
        node = node.args[0]
    return None
