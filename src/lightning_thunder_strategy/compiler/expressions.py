"""Prints values as Python expressions: arguments of operations, functions by their import path, constants."""

import builtins
import enum
import importlib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Optional

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from lightning_thunder_strategy.compiler import _torch_compat

_SMALL_CONSTANT = 16  # tensor elements that are printed inline


def identifier(text: str) -> str:
    """``text`` as a Python name."""
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    return f"_{name}" if name[0].isdigit() else name


def mesh_expression(mesh: DeviceMesh) -> str:
    """The call that makes an equal mesh."""
    names = f", mesh_dim_names={mesh.mesh_dim_names!r}" if mesh.mesh_dim_names else ""
    return f"torch.distributed.device_mesh.init_device_mesh({mesh.device_type!r}, {tuple(mesh.shape)}{names})"


def literal(value: Any) -> Optional[str]:
    """A plain value as an expression, or ``None`` if it is not one."""
    if value is None or value is Ellipsis or isinstance(value, (bool, str, bytes)):
        return "..." if value is Ellipsis else repr(value)
    if type(value) in (int, range):
        return repr(value)
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if type(value) is complex:
        return repr(value) if math.isfinite(value.real) and math.isfinite(value.imag) else f"complex({str(value)!r})"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    return None


class Expressions:
    """Expressions of one printed module, and what they need at its top.

    Attributes:
        imports: Modules to import.
        definitions: Constants that have an expression, by name.
        constants: Constants that have none, by name.
        taken: Names at the module's top level.
    """

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self.imports: set[str] = {"torch"}
        self.definitions: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        self.taken: set[str] = {"program", "torch", *reserved}
        self._constant_names: dict[int, str] = {}
        self._kept: list[Any] = []  # so that no other object gets the id of a constant

    def unique(self, name: str) -> str:
        """``name``, or with a number where it is taken."""
        candidate, number = name, 0
        while candidate in self.taken:
            number += 1
            candidate = f"{name}_{number}"
        self.taken.add(candidate)
        return candidate

    def argument(self, value: Any, names: Mapping[fx.Node, str]) -> str:
        """An argument of an operation, with the names of other values in it."""
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{self.callable(type(value))}({', '.join(self.argument(item, names) for item in value)})"
        if isinstance(value, torch.Size):
            return f"torch.Size({self.argument(list(value), names)})"
        if isinstance(value, (tuple, list)):
            inner = ", ".join(self.argument(item, names) for item in value)
            if isinstance(value, list):
                return f"[{inner}]"
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        if isinstance(value, dict):
            items = (f"{self.argument(key, names)}: {self.argument(item, names)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        if isinstance(value, slice):
            return f"slice({', '.join(self.argument(part, names) for part in (value.start, value.stop, value.step))})"
        text = literal(value)
        if text is not None:
            return text
        if isinstance(value, Placement) and type(value).__module__.startswith("torch."):
            self.imports.add("torch.distributed.tensor")
            return f"torch.distributed.tensor.{_placement(value)}"
        if callable(value) or isinstance(value, enum.Enum):
            return self.callable(value)
        return self.constant(value, type(value).__name__)

    def callable(self, target: Any) -> str:
        """The importable path of a function, class or enum member, or a constant."""
        if isinstance(target, torch._ops.OpOverload):
            module = _torch_compat.defining_module(target)
            if module is not None:
                self.imports.add(module)
            return f"torch.ops.{target}"
        if isinstance(target, torch._ops.HigherOrderOperator):
            self.imports.add(type(target).__module__)
            return f"torch.ops.higher_order.{target.name()}"
        if isinstance(target, enum.Enum):
            return f"{self.callable(type(target))}.{target.name}"
        for module, name in _candidate_paths(target):
            if _resolves(module, name, target):
                self.imports.add(module)
                return f"{module}.{name}"
        return self.constant(target, getattr(target, "__name__", type(target).__name__))

    def constant(self, value: Any, hint: str) -> str:
        """The name of a constant, printed at the top where it has an expression."""
        if id(value) in self._constant_names:
            return self._constant_names[id(value)]
        self._kept.append(value)
        name = self._constant_names[id(value)] = self.unique(f"{identifier(hint.lower())}_constant".lstrip("_"))
        expression = self._constant_expression(value)
        if expression is not None:
            self.definitions[name] = expression
        else:
            self.constants[name] = value
        return name

    def _constant_expression(self, value: Any) -> Optional[str]:
        if isinstance(value, DeviceMesh):
            self.imports.add("torch.distributed.device_mesh")
            return mesh_expression(value)
        plain = type(value) is torch.Tensor and value.device.type == "cpu" and not value.requires_grad
        if plain and value.numel() <= _SMALL_CONSTANT and value.layout == torch.strided:
            with _torch_compat.outside_fake_mode():
                numbers = _numbers(value.tolist())
            shape = "" if value.numel() else f".reshape({tuple(value.shape)})"
            return f"torch.tensor({numbers}, dtype={value.dtype}){shape}"
        return None


def _numbers(value: Any) -> str:
    """A nested list of numbers, infinite ones included."""
    return f"[{', '.join(map(_numbers, value))}]" if isinstance(value, list) else str(literal(value))


def _placement(value: Any) -> str:
    if value.is_shard():
        return f"Shard({value.dim})"
    return f"Partial({value.reduce_op!r})" if value.is_partial() else "Replicate()"


def _candidate_paths(target: Any) -> Iterable[tuple[str, str]]:
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is None:
        return
    module = getattr(target, "__module__", None)
    short = name.split(".")[-1]
    if module == "_operator":
        module = "operator"
    if module == "builtins" or (module is None and hasattr(builtins, name)):
        yield "builtins", name
    if module and module != "__main__":  # a saved file is another main module
        yield module, name
    for parent in ("torch", "torch._C._nn", "torch.nn.functional", "torch._C", "torch.Tensor", "torch._VF"):
        yield parent, short


def _resolves(module: str, name: str, target: Any) -> bool:
    if "<" in name:
        return False
    try:
        value: Any = importlib.import_module(module)
    except ImportError:
        head, _, tail = module.rpartition(".")
        try:
            value = getattr(importlib.import_module(head), tail, None) if head else None
        except ImportError:
            return False
    for part in name.split("."):
        value = getattr(value, part, None)
        if value is None:
            return False
    return value is target or (not isinstance(target, type) and value == target)
