"""Which memory the values of a program live in: views, parts of tuples and edited inputs share that of others."""

import operator
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import fx

from lightning_thunder_strategy.compiler import _torch_compat
from lightning_thunder_strategy.compiler.emit import node_value

_SAME = ("wait_tensor", "_unsafe_view", "alias", "lift_fresh")
_MAY_COPY = ("reshape", "contiguous", "to")


@dataclass(frozen=True)
class Storage:
    """Memory of one tensor.

    Attributes:
        name: Of the operation that makes it, with its place if it makes several.
        bytes: Its size.
    """

    name: str
    bytes: int


@dataclass(frozen=True)
class Value:
    """Where an operation's result lives.

    Attributes:
        parts: Storages of each element of a tuple; of a tensor only one.
        is_tuple: Whether it is a tuple.
    """

    parts: tuple[tuple[Storage, ...], ...]
    is_tuple: bool = False

    @property
    def storages(self) -> tuple[Storage, ...]:
        return tuple(dict.fromkeys(storage for part in self.parts for storage in part))


NOTHING = Value(())


def tensor_bytes(value: Any) -> int:
    """Bytes of the memory that a new tensor with these sizes and strides takes."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return 0
    sizes = [_torch_compat.size_hint(size) for size in value.shape]
    if 0 in sizes:
        return 0
    strides = [_torch_compat.size_hint(step) for step in value.stride()]
    return (1 + sum((size - 1) * step for size, step in zip(sizes, strides))) * value.element_size()


def new_value(node: fx.Node) -> Value:
    """The result of an operation that makes new tensors."""
    value = node_value(node)
    if isinstance(value, (tuple, list)):
        sizes = [tensor_bytes(item) for item in value]
        return Value(tuple((Storage(f"{node.name}[{i}]", size),) for i, size in enumerate(sizes)), is_tuple=True)
    return Value(((Storage(node.name, tensor_bytes(value)),),))


def shared_value(node: fx.Node, values: dict[fx.Node, Value]) -> Optional[Value]:
    """The result of an operation that makes no new tensor, or ``None`` if it does.

    Args:
        node: The operation.
        values: Results of the operations before it.
    """
    if node.target is operator.getitem:
        whole = values.get(node.args[0], NOTHING)  # type: ignore[arg-type]
        if whole.is_tuple and isinstance(node.args[1], int) and node.args[1] < len(whole.parts):
            return Value((whole.parts[node.args[1]],))
        return Value((whole.storages,))
    if not shares(node):
        return None
    first = node.args[0]
    base = values.get(first, NOTHING) if isinstance(first, fx.Node) else NOTHING
    made = node_value(node)
    if isinstance(made, (tuple, list)):
        return Value(tuple(base.storages for _ in made), is_tuple=True)
    return Value((base.storages,))


def shares(node: fx.Node) -> bool:
    """Whether an operation's result is a view of its first argument, or the argument itself."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not node.args:
        return False
    name = target._schema.name.split("::")[1]
    if name in _SAME:
        return True
    aliased = any(result.alias_info is not None for result in target._schema.returns)
    if not aliased or name not in _MAY_COPY:
        return aliased
    return _can_view(node)


def _can_view(node: fx.Node) -> bool:
    source, made = node_value(node.args[0]), node_value(node)  # type: ignore[arg-type]
    if not isinstance(source, torch.Tensor) or not isinstance(made, torch.Tensor) or source.dtype != made.dtype:
        return False
    try:
        with torch.no_grad():
            source.view(made.shape)
    except RuntimeError:
        return False
    return True
