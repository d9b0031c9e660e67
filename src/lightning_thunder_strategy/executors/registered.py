"""An operator executor made of functions: what ``lts.executors.register`` makes."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import fx

from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.keys import function_key
from lightning_thunder_strategy.executors.base import OperatorExecutor, Replacement

_TORCH_NAMESPACES = (torch, torch.nn.functional, torch._C._nn, torch.Tensor)


@dataclass(frozen=True)
class Implementation:
    """A function that stands for an operation.

    Attributes:
        operation: The operation.
        function: Takes its arguments and is differentiable.
        when: Says why the function cannot take these arguments, or ``None`` if it can.
        source: The user's function, for the compile cache's key.
    """

    operation: Callable
    function: Callable
    when: Optional[Callable[..., Optional[str]]]
    source: Callable


class RegisteredExecutor(OperatorExecutor):
    """Runs operations with functions that were registered."""

    def __init__(self, name: str, implementations: tuple[Implementation, ...], description: str) -> None:
        self.name = name
        self.implementations = implementations
        self.__doc__ = description

    def considers(self, node: fx.Node) -> bool:
        return self._of(node) is not None

    def replacement(self, node: fx.Node) -> "Replacement | str":
        chosen = self._of(node)
        assert chosen is not None
        kwargs = _without_defaults(chosen, dict(node.kwargs))
        try:
            inspect.signature(chosen.source).bind(*node.args, **kwargs)
        except TypeError as error:
            return f"{chosen.source.__name__!r} cannot take these arguments: {error}"
        if chosen.when is not None:
            values = fx.node.map_arg((node.args, kwargs), node_value)
            reason = chosen.when(*values[0], **values[1])
            if reason is not None:
                return reason
        return Replacement(chosen.function, node.args, kwargs)

    def cache_key(self) -> Optional[str]:
        functions = [f for item in self.implementations for f in (item.source, item.when) if f is not None]
        keys = [function_key(function) for function in functions]
        names = [str(item.operation) for item in self.implementations]
        return None if None in keys else f"{self.name}:{names}:{keys}"

    def _of(self, node: fx.Node) -> Optional[Implementation]:
        return next((item for item in self.implementations if is_call_of(node, item.operation)), None)


def is_call_of(node: fx.Node, operation: Callable) -> bool:
    """Whether a node of an acquired program calls ``operation``.

    Torch has many operations under several names (``F.rms_norm`` is read as ``torch.rms_norm``, ``x.sin()`` as a method
    and ``torch.sin(x)`` as a function): they count as one.
    """
    if node.op == "call_method":
        return _torch_name(operation) == node.target
    if node.op != "call_function":
        return False
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return operation in (target, target.overloadpacket) or getattr(operation, "_opoverload", None) is target
    return target is operation or (_torch_name(target) is not None and _torch_name(target) == _torch_name(operation))


def check_operation(operation: Any) -> None:
    """Refuse what never shows in a program as one operation.

    Raises:
        ValueError: With what to give instead.
    """
    if isinstance(operation, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)) or hasattr(operation, "_opoverload"):
        return
    if not callable(operation) or _torch_name(operation) is None:
        raise ValueError(
            f"replaces={operation!r} is not allowed: give an operation of torch, such as torch.nn.functional.silu, or "
            "a torch.library operator. Programs show what a plain Python function calls, not the function."
        )


def _torch_name(operation: Any) -> Optional[str]:
    """The name of one of torch's own operations, or ``None``."""
    name = getattr(operation, "__name__", None)
    if name is None or isinstance(operation, type):
        return None
    name = re.sub(r"_method$", "", name)
    return name if any(getattr(space, name, None) is operation for space in _TORCH_NAMESPACES) else None


def _without_defaults(chosen: Implementation, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Without what the function does not take and has its default value anyway, such as ``inplace=False``."""
    try:
        known = inspect.signature(chosen.operation).parameters
    except (TypeError, ValueError):  # a function that is not written in Python
        return kwargs
    taken = inspect.signature(chosen.source).parameters
    return {
        key: value
        for key, value in kwargs.items()
        if key in taken or key not in known or not _equal(value, known[key].default)
    }


def _equal(value: Any, default: Any) -> bool:
    return type(value) is type(default) and not isinstance(value, fx.Node) and value == default
