"""Counts the collectives in a program, and gives the fingerprint by which ranks compare their programs."""

import hashlib
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed import ProcessGroup

from lightning_thunder_strategy.compiler import _torch_compat
from lightning_thunder_strategy.compiler.emit import node_value

_VARYING: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()  # groups in which activations are communicated

_GATHERING = ("all_gather_into_tensor", "all_gather_into_tensor_coalesced")


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind in one program.

    Attributes:
        op: Torch's functional name, such as ``all_gather_into_tensor``.
        count: How many.
        bytes: Sum of the sizes of the full tensors: of the result of a gather, of the input of any other.
    """

    op: str
    count: int
    bytes: int


def sizes_vary_in(group: ProcessGroup) -> None:
    """Say that a group communicates activations, whose sizes may differ from those that other groups communicate."""
    _VARYING.add(group)


def collective_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The collectives of a program in the order in which they are issued."""
    return [node for node in graph.nodes if _collective_name(node) is not None]


def count_collectives(graph: fx.Graph) -> list[Collective]:
    """Collectives by name, in order of first appearance."""
    totals: dict[str, list[int]] = {}
    for node in collective_nodes(graph):
        total = totals.setdefault(_collective_name(node) or "", [0, 0])
        total[0] += 1
        total[1] += _bytes(_full_value(node))
    return [Collective(name, count, size) for name, (count, size) in totals.items()]


def full_tensors(node: fx.Node) -> list[torch.Tensor]:
    """The whole tensors that a collective is about: the results of a gather, the inputs of any other."""
    value = _full_value(node)
    values = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in values if isinstance(item, torch.Tensor)]


def collective_of(node: fx.Node) -> Collective | None:
    """What a single collective is, or ``None`` for any other operation."""
    name = _collective_name(node)
    return None if name is None else Collective(name, 1, _bytes(_full_value(node)))


def sequence(graphs: Iterable[fx.Graph]) -> list[str]:
    """One line a collective: name, element type, sizes and group, in the order in which they are issued."""
    lines = []
    for graph in graphs:
        for node in collective_nodes(graph):
            value = _full_value(node)
            values = value if isinstance(value, (list, tuple)) else [value]
            group = _torch_compat.group_text(str(node.args[-1]))
            # Shards of which several groups reduce one each may differ in size between the groups.
            shards = _collective_name(node) == "all_reduce" and not group.endswith("x1")
            varying = _torch_compat.group_named(str(node.args[-1])) in _VARYING
            size = " activations" if varying else " shards" if shards else ""
            shapes = " ".join(f"{v.dtype}{size or list(v.shape)}" for v in values if isinstance(v, torch.Tensor))
            rest = [str(arg) for arg in node.args[1:-1] if isinstance(arg, (int, str))]
            rest.append(group)
            lines.append(f"{_collective_name(node)} {shapes} {' '.join(rest)}")
        lines.append("--")
    return lines


def fingerprint(lines: Sequence[str]) -> str:
    """A short hash of a sequence of collectives."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _collective_name(node: fx.Node) -> str | None:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target.namespace not in ("_c10d_functional", "_c10d_functional_autograd"):
        return None
    name = node.target._schema.name.split("::")[1]
    return None if name == "wait_tensor" else name


def _full_value(node: fx.Node) -> Any:
    if _collective_name(node) in _GATHERING:
        return node_value(node)
    first = node.args[0]
    if isinstance(first, fx.Node):
        return node_value(first)
    return [node_value(item) for item in first if isinstance(item, fx.Node)]  # type: ignore[union-attr]


def _bytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(_bytes(item) for item in value)
    if not isinstance(value, torch.Tensor):
        return 0
    numel = value.numel()
    numel = numel if isinstance(numel, int) else int(getattr(numel.node, "hint", 0) or 0)
    return numel * value.element_size()
