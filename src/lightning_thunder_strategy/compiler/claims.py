"""Operator executors: what they take of an acquired program, before autograd."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from lightning_thunder_strategy.compiler import _torch_aot, _torch_dynamo
from lightning_thunder_strategy.compiler._torch_fakes import is_plain_fake, run_on_fakes
from lightning_thunder_strategy.compiler.config import CompileConfig
from lightning_thunder_strategy.compiler.emit import node_value, source_line, type_text
from lightning_thunder_strategy.compiler.events import first_line
from lightning_thunder_strategy.compiler.fuel import Fuel
from lightning_thunder_strategy.compiler.report import Fallback, Program, warn
from lightning_thunder_strategy.compiler.surgery import copy_program
from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.executors.base import (
    Claim,
    Executor,
    OperatorExecutor,
    Replacement,
    declined_as_nondeterministic,
)

_MARK = "lts_executor"  # in the node metadata that AOTAutograd hands on


class ClaimError(RuntimeError):
    """A function that an operator executor chose cannot stand for its operation."""


def claim_operators(
    trace: Trace, executors: Sequence[Executor], program: Program, config: CompileConfig, fuel: Optional[Fuel] = None
) -> dict[str, str]:
    """Give each torch-level operation to the first operator executor that takes it.

    Args:
        trace: The acquired program; operations inside activation checkpoints are claimed too.
        executors: By priority.
        program: Receives the claims, and the failures of executors.
        config: Options.
        fuel: How many more claims may be made.

    Returns:
        Module and qualified name to a version, for the functions that were put into the program.
    """
    return _Claiming([e for e in executors if isinstance(e, OperatorExecutor)], program, config, fuel).run(trace)


class _Claiming:
    def __init__(
        self, executors: Sequence[OperatorExecutor], program: Program, config: CompileConfig, fuel: Optional[Fuel]
    ) -> None:
        self._executors = executors
        self._program = program
        self._config = config
        self._fuel = fuel
        self._functions: dict[str, str] = {}
        self._tried: dict[tuple, Optional[Exception]] = {}
        self._failures: dict[tuple[str, str], list[str]] = {}  # operation and executor to errors

    def run(self, trace: Trace) -> dict[str, str]:
        if self._executors:
            assert trace.graph_module is not None
            self._walk(trace.graph_module, [])
            self._warn()
        return self._functions

    def _walk(self, gm: fx.GraphModule, autocasts: list[tuple]) -> None:
        """Claim in one program, and in the bodies of its activation checkpoints.

        Args:
            gm: The program.
            autocasts: Arguments of the autocast regions that are open around it.
        """
        open_regions = list(autocasts)
        for node in list(gm.graph.nodes):
            if node.target is torch.amp.autocast_mode._enter_autocast:
                open_regions.append(node.args)
            elif node.target is torch.amp.autocast_mode._exit_autocast:
                open_regions.pop()
            elif _torch_aot.is_checkpoint(node):
                name = str(node.args[0].target)  # type: ignore[union-attr]
                body = copy_program(getattr(gm, name))  # the graph as it was read shares the one that is there
                self._walk(body, open_regions)
                body.recompile()
                setattr(gm, name, body)
            elif node.op in ("call_function", "call_method"):
                self._offer(node, open_regions)

    def _offer(self, node: fx.Node, autocasts: Sequence[tuple]) -> None:
        name = operation_name(node)
        for executor in self._executors:
            if self._fuel is not None and self._fuel.empty:
                return
            if not executor.considers(node):
                continue
            found = declined_as_nondeterministic(executor, node) or executor.replacement(node)
            if isinstance(found, str):
                self._program.claims.append(Claim(name, executor.name, False, found))
                continue
            chosen = found if isinstance(found, Replacement) else Replacement(found, node.args, node.kwargs)
            error = self._try(executor, node, chosen, autocasts)
            if error is not None:
                if self._config.on_error == "raise":
                    raise error
                self._failures.setdefault((name, executor.name), []).append(first_line(error))
                self._program.claims.append(Claim(name, executor.name, False, f"it failed: {first_line(error)}"))
                continue
            if self._fuel is not None:
                self._fuel.take(executor.name, name, "acquired", source_line(node))
            self._program.claims.append(Claim(name, executor.name, True))
            self._take(node, executor, chosen)
            return

    def _take(self, node: fx.Node, executor: OperatorExecutor, chosen: Replacement) -> None:
        node.op, node.target = "call_function", chosen.function
        node.args, node.kwargs = chosen.args, dict(chosen.kwargs)
        node.meta["custom"] = {**node.meta.get("custom", {}), _MARK: executor.name}
        self._functions[_full_name(chosen.function)] = executor.cache_key() or ""
        for covered in reversed(chosen.covers):
            node.graph.erase_node(covered)

    def _try(
        self, executor: OperatorExecutor, node: fx.Node, chosen: Replacement, autocasts: Sequence[tuple]
    ) -> Optional[Exception]:
        """What is wrong with a claim: the function and its backward are run on the program's fake values."""
        args, kwargs = fx.node.map_arg((chosen.args, dict(chosen.kwargs)), node_value)
        leaves = tree_leaves((args, kwargs))
        tensors = [value for value in leaves if isinstance(value, torch.Tensor)]
        known = all(node_value(used) is not None for used in _nodes((chosen.args, chosen.kwargs)))
        if not known or any(not is_plain_fake(value) for value in tensors):
            return None  # such as distributed tensors: what is wrong shows when the program is differentiated
        described = tuple(_described(value) for value in leaves)
        key = (executor.name, chosen.function, described, str(autocasts), type_text(node_value(node)))
        if key not in self._tried:
            try:
                with _opened(autocasts):
                    result = run_on_fakes(chosen.function, args, kwargs)
                _check(result, node_value(node), executor.name)
            except _torch_dynamo.control_flow_errors():
                raise
            except Exception as error:
                self._tried[key] = error
            else:
                self._tried[key] = None
        return self._tried[key]

    def _warn(self) -> None:
        for (name, executor), errors in self._failures.items():
            times = f" ({len(errors)} times)" if len(errors) > 1 else ""
            fallback = Fallback(f"{name}{times} in the acquired program", executor, errors[0])
            self._program.fallbacks.append(fallback)
            warn(
                f"{executor} could not compile {fallback.region}, which the next executor runs: {errors[0]}",
                every_rank=True,
            )


def _opened(autocasts: Sequence[tuple]) -> contextlib.ExitStack:
    """The autocast regions, entered."""
    stack = contextlib.ExitStack()
    for device, dtype, enabled, cache in autocasts:
        stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
    return stack


def _check(result: Any, expected: Any, executor: str) -> None:
    """Raise :class:`ClaimError` if a result is of another type than the operation's."""
    found, wanted = (tree_leaves(value) for value in (result, expected))
    if len(found) != len(wanted) or not all(map(_same_type, found, wanted)):
        raise ClaimError(f"{executor} gives {type_text(result)} where the operation gives {type_text(expected)}")


def _same_type(found: Any, wanted: Any) -> bool:
    if not isinstance(found, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return type(found) is type(wanted)
    if found.dtype != wanted.dtype or found.device != wanted.device or found.dim() != wanted.dim():
        return False
    sizes = zip(found.shape, wanted.shape)  # symbolic ones are not compared: that could fix them
    return all(a == b for a, b in sizes if isinstance(a, int) and isinstance(b, int))


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), str(value.shape), str(value.stride()), str(value.device), value.requires_grad)
    return str(value)


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(value, lambda node: found.append(node) or node)
    return found


def claimed_by(node: fx.Node) -> str:
    """The operator executor whose function an ATen operation came from, or ``"eager"``."""
    return (node.meta.get("custom") or {}).get(_MARK, "eager")


def runs_in_region(node: fx.Node, executor: str) -> str:
    """Who runs an operation of a region of ``executor``: an opaque one stays that of the executor which chose it."""
    opaque = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "prims")
    owner = claimed_by(node)
    return owner if opaque and owner != "eager" else executor


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
