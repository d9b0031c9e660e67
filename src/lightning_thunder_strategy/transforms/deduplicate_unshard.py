"""Gathers each parameter once, however often it is used."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.compiler.transform import Transform

_CHAIN_METHODS = ("redistribute", "to_local")


@dataclass(frozen=True)
class DeduplicateUnshard(Transform):
    """Merges equal chains that gather a parameter (``redistribute`` then ``to_local``).

    Without it a tied weight would be reduced once for each use. A parameter is never edited inside a step (that is an
    error, see :class:`RefuseLostEdits`), so all its gathers are equal.
    """

    def acquired(self, trace: Trace) -> None:
        seen: dict[Any, fx.Node] = {}
        for node in list(trace.graph.nodes):
            if not _is_chain(node):
                continue
            key = (node.target, node.args, tuple(sorted((name, repr(value)) for name, value in node.kwargs.items())))
            if key in seen:
                node.replace_all_uses_with(seen[key])
                trace.graph.erase_node(node)
            else:
                seen[key] = node


def _is_chain(node: fx.Node) -> bool:
    if node.op == "call_method" and node.target in _CHAIN_METHODS:
        return True
    return node.op == "call_function" and getattr(node.target, "__name__", "") in (
        "from_local", "prim_from_local", "prim_redistribute", "prim_to_local",
    )  # fmt: skip


@dataclass(frozen=True)
class RefuseLostEdits(Transform):
    """Refuses a step that edits a gathered parameter in place: the edit would be lost with the gathered copy."""

    def acquired(self, trace: Trace) -> None:
        gathered: set[fx.Node] = set()
        for node in trace.graph.nodes:
            value = node.meta.get("example_value")
            if node.op == "call_method" and node.target == "to_local":
                gathered.add(node)
            elif any(argument in gathered for argument in node.all_input_nodes):
                if _mutates_first(node) and node.args and node.args[0] in gathered:
                    raise LostEditError(node)
                if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and _is_alias(node):
                    gathered.add(node)


class LostEditError(RuntimeError):
    """A step edits a parameter in place."""

    def __init__(self, node: fx.Node) -> None:
        where = (node.stack_trace or "").strip().splitlines()
        super().__init__(
            "A step edits a sharded parameter in place, and the edit would be lost with the gathered copy"
            f"{': ' + ' '.join(line.strip() for line in where[-2:]) if where else ''}. Edit parameters outside the "
            "step, for example in `on_train_batch_end`, where the attribute is the parameter itself."
        )


def _mutates_first(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return (name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "retain_grad_")) or name in (
        "__setitem__", "setitem",
    )  # fmt: skip


_ALIASES = (
    "data", "detach", "view", "reshape", "t", "transpose", "permute", "flatten", "squeeze", "unsqueeze", "getitem",
    "__getitem__", "narrow", "select", "expand", "chunk", "split", "unbind", "T", "mT",
)  # fmt: skip


def _is_alias(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "getattr" and len(node.args) > 1:
        name = str(node.args[1])
    return name in _ALIASES
