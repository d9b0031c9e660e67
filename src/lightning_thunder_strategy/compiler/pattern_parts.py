"""Parts of patterns in acquired programs: operations under all their names, casts, and what may be removed."""

import operator
from collections.abc import Iterable
from typing import Any, Optional

import torch
from torch import fx

from lightning_thunder_strategy.compiler.emit import node_value

_STATE = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode")
_CASTS = ("to", "float", "double", "type_as", "bfloat16", "half", "type")
_NAMES = {"div": ("div", "truediv")}


def is_op(node: Any, name: str) -> bool:
    """Whether ``node`` is torch's ``name``: as a method, a function of torch, or an operator of Python."""
    if not isinstance(node, fx.Node):
        return False
    names = _NAMES.get(name, (name,))
    if node.op == "call_method":
        return node.target in names
    if node.op != "call_function":
        return False
    spaces = (torch, torch.nn.functional, operator)
    return any(getattr(space, item, None) is node.target for space in spaces for item in names)


def tensor_of(node: Any) -> Optional[torch.Tensor]:
    """The fake tensor of a node, or ``None`` if it is no tensor."""
    value = node_value(node) if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def cast_source(node: Any) -> Optional[fx.Node]:
    """What a cast to another type on the same device casts, or ``None`` if ``node`` is no such cast."""
    if not isinstance(node, fx.Node) or node.op != "call_method" or node.target not in _CASTS:
        return None
    source = node.args[0]
    before, after = tensor_of(source), tensor_of(node)
    if before is None or after is None or before.device != after.device:
        return None
    if not before.is_floating_point() or not after.is_floating_point() or node.kwargs.get("memory_format") is not None:
        return None
    return source  # type: ignore[return-value]


def operands(node: fx.Node) -> Iterable[tuple[Any, Any]]:
    """The two operands of an operation whose order does not matter, in both orders."""
    if len(node.args) == 2 and not node.kwargs:
        yield node.args[0], node.args[1]
        yield node.args[1], node.args[0]


def obstacle(node: fx.Node, covers: Iterable[fx.Node]) -> Optional[str]:
    """Why operations cannot be computed where the last of them is, in a sentence, or ``None``.

    Args:
        node: The last one.
        covers: The ones before it.
    """
    own = {node, *covers}
    for item in own - {node}:
        others = sorted({str(user.target) for user in item.users if user not in own})
        if others:
            return f"a value inside it is used elsewhere too ({', '.join(others)})"
    return change_between(node, own - {node})


def change_between(node: fx.Node, covers: Iterable[fx.Node], modes: bool = True) -> Optional[str]:
    """Which operation of others, among those of a pattern, may change what it reads, in a sentence, or ``None``.

    Args:
        node: The last operation of the pattern.
        covers: The ones before it.
        modes: Whether switches of autograd and autocast count.
    """
    left, own = set(covers), {node, *covers}
    current = node
    while left:
        current = current.prev
        left.discard(current)
        if left and current not in own:
            name = current.target if isinstance(current.target, str) else getattr(current.target, "__name__", "")
            if name in _STATE:
                if modes:
                    return f"the mode of autograd or autocast changes inside it ({name})"
            elif _may_edit(current, name):
                return f"values may be changed in place inside it ({name})"
    return None


def _may_edit(node: fx.Node, name: str) -> bool:
    if node.op not in ("call_method", "call_function"):
        return False
    target: Any = node.target
    overloads = [target] if isinstance(target, torch._ops.OpOverload) else []
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, item) for item in target.overloads()]
    overloads += [target._opoverload] if hasattr(target, "_opoverload") else []  # of torch.library.custom_op
    if any(overload._schema.is_mutable for overload in overloads):
        return True
    if node.op == "call_function" and getattr(torch.nn.functional, name, None) and True in node.args[1:]:
        return True  # some of them take `inplace` by position
    plain = name.rstrip("_") != name and not name.endswith("__")
    in_place_operator = name in ("setitem", "__setitem__") or (
        getattr(node.target, "__module__", "") == "_operator" and name.startswith("i") and name[1:] in _IN_PLACE
    )
    return plain or in_place_operator or node.kwargs.get("out") is not None or node.kwargs.get("inplace") is True


_IN_PLACE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul")
