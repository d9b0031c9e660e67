"""Operator executors: what they take of an acquired program, before autograd."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.executors.base import Claim, Executor, OperatorExecutor, declined_as_nondeterministic

_MARK = "lts_executor"  # in the node metadata that AOTAutograd hands on


def claim_operators(trace: Trace, executors: Sequence[Executor], claims: list[Claim]) -> dict[str, str]:
    """Give each torch-level operation to the first operator executor that takes it.

    Returns:
        Module and qualified name to a version, for the functions that were put into the program.
    """
    functions: dict[str, str] = {}
    candidates = [executor for executor in executors if isinstance(executor, OperatorExecutor)]
    for node in list(trace.graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        for executor in candidates:
            if not executor.considers(node):
                continue
            function = declined_as_nondeterministic(executor, node) or executor.replacement(node)
            name = operation_name(node)
            if isinstance(function, str):
                claims.append(Claim(name, executor.name, False, function))
                continue
            claims.append(Claim(name, executor.name, True))
            node.op, node.target = "call_function", function
            node.meta["custom"] = {**node.meta.get("custom", {}), _MARK: executor.name}
            functions[_full_name(function)] = executor.cache_key() or ""
            break
    return functions


def claimed_by(node: fx.Node) -> str:
    """The operator executor whose function an ATen operation came from, or ``"eager"``."""
    return (node.meta.get("custom") or {}).get(_MARK, "eager")


def operation_name(node: fx.Node) -> str:
    """An operation as the trace prints it."""
    target: Any = node.target
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    return getattr(target, "__name__", str(target))


def _full_name(function: Callable) -> str:
    """How the compile cache finds a function; with ``<`` in it if it cannot."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    return f"{module}.{name}" if module and name and module != "__main__" else f"<{type(function).__name__}>"
