"""Finds the repeated blocks of a model, such as the layers of a transformer, in the module and in a program."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Optional

import torch
from torch import fx, nn

from lightning_thunder_strategy.compiler import _torch_aot
from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.module_path import ModuleCall, module_calls
from lightning_thunder_strategy.compiler.trace import Trace


def matching(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """The outermost of the modules that are named by a pattern (as in ``fnmatch``)."""
    return _outermost({name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)})


def repeated(kinds: Iterable[tuple[str, str]]) -> set[str]:
    """The outermost modules that are entries of a list with others of their class, and that hold modules themselves.

    Args:
        kinds: Names and classes of all modules.
    """
    known = dict(kinds)
    holders = {name.rpartition(".")[0] for name in known}
    entries: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name, kind in known.items():
        parent, _, last = name.rpartition(".")
        if last.isdigit() and name in holders:
            entries[parent, kind].append(name)
    return _outermost({name for names in entries.values() if len(names) > 1 for name in names})


def blocks_of(module: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Names of the blocks of ``module``: those that ``patterns`` name, or without patterns the repeated ones."""
    modules = [(name, type(child).__qualname__) for name, child in module.named_modules() if name]
    return matching((name for name, _ in modules), patterns) if patterns else repeated(modules)


def block_operations(trace: Trace, patterns: Sequence[str]) -> dict[fx.Node, ModuleCall]:
    """The operations of the forward that belong to a block, and which call of which block it is.

    Args:
        trace: The forward and backward as one program.
        patterns: See :func:`blocks_of`.
    """
    forward = forward_operations(trace.graph)
    calls = {node: module_calls(node) for node in forward}
    kinds = {(call.name, call.kind) for found in calls.values() for call in found if call.name}
    blocks = matching((name for name, _ in kinds), patterns) if patterns else repeated(kinds)
    result = {node: call for node, found in calls.items() for call in found if call.name in blocks}
    _add_nameless(result, {node: bool(found) for node, found in calls.items()})
    return result


def forward_operations(graph: fx.Graph) -> list[fx.Node]:
    """The operations of a joint program that do not depend on a gradient, and that its forward called, in order."""
    behind: set[fx.Node] = set()
    found = []
    for node in graph.nodes:
        if _torch_aot.is_tangent(node) or any(used in behind for used in node.all_input_nodes):
            behind.add(node)
        elif node.op == "call_function" and not _torch_aot.is_backward(node):
            found.append(node)
    return found


def has_symbolic_sizes(graph: fx.Graph) -> bool:
    """Whether the program is for inputs of several sizes."""
    values = [node_value(node) for node in graph.find_nodes(op="placeholder")]
    sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    return any(isinstance(item, torch.SymInt) for item in [*values, *sizes])


def is_view(node: fx.Node) -> bool:
    """Whether the result lives in the memory of an input."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return any(item.alias_info is not None and not item.alias_info.is_write for item in target._schema.returns)


def _add_nameless(blocks: dict[fx.Node, ModuleCall], named: dict[fx.Node, bool]) -> None:
    """Add operations that torch has put between those of one block without saying where they come from."""
    inside: dict[fx.Node, ModuleCall] = {}
    for node, has_name in named.items():
        if not has_name:
            before = [blocks.get(used) or inside.get(used) for used in node.all_input_nodes]
            found = next((block for block in before if block is not None), None)
            if found is not None:
                inside[node] = found
    for node in reversed(inside):
        if node.users and all(blocks.get(user) == inside[node] for user in node.users):
            blocks[node] = inside[node]


def _outermost(names: Collection[str]) -> set[str]:
    return {name for name in names if _holder(name, names) is None}


def _holder(name: str, names: Collection[str]) -> Optional[str]:
    parts = name.split(".")
    outer = (".".join(parts[:length]) for length in range(1, len(parts)))
    return next((holder for holder in outer if holder in names), None)
