"""Orders a program so that operations of one executor that depend on each other stand together."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import fx

from lightning_thunder_strategy.compiler import _torch_compat
from lightning_thunder_strategy.compiler.emit import node_value


class Unit(Protocol):
    """What is moved as one: an operation with what takes parts of its result."""

    operation: fx.Node
    nodes: list[fx.Node]
    executor: int


AnyUnit = TypeVar("AnyUnit", bound=Unit)


def grouped(
    program: Sequence[AnyUnit], movable: Callable[[AnyUnit], bool], barrier: Callable[[AnyUnit], bool]
) -> list[AnyUnit]:
    """The same operations in an order that can run, with longer runs of one executor.

    Two kinds of moves, both along the flow of data, so that no value is computed much earlier or kept much longer than
    before: an operation joins the run of its own executor that computes the last of what it needs; and one whose
    results are used in one later run only joins that. Everything else stays in its order, collectives and random
    numbers among it.

    Args:
        program: The operations in an order that can run.
        movable: Whether an operation may be moved.
        barrier: Whether nothing may be moved past an operation, because it edits a value.
    """
    return _sunk(_joined(program, movable, barrier), movable, barrier)


def reorder(graph: fx.Graph, program: Sequence[Unit]) -> None:
    """Put a program's operations into this order."""
    output = graph.output_node()
    for unit in program:
        for node in unit.nodes:
            output.prepend(node)


def _joined(
    program: Sequence[AnyUnit], movable: Callable[[AnyUnit], bool], barrier: Callable[[AnyUnit], bool]
) -> list[list[AnyUnit]]:
    """Runs, after operations have joined earlier ones."""
    numbers: list[AnyUnit] = []  # sizes, computed from the program's inputs: before everything
    runs: list[list[AnyUnit]] = [numbers]
    place: dict[fx.Node, int] = {}
    last_barrier = 0
    for unit in program:
        needed = max((place[used] for used in _used(unit) if used in place), default=-1)
        if _is_number(unit) and needed <= 0:
            at = 0
        elif movable(unit) and needed > 0 and needed >= last_barrier and runs[needed][-1].executor == unit.executor:
            at = needed
        else:
            if len(runs) == 1 or runs[-1][-1].executor != unit.executor or barrier(unit) or barrier(runs[-1][-1]):
                runs.append([])
            at = len(runs) - 1
        runs[at].append(unit)
        place.update((node, at) for node in unit.nodes)
        if barrier(unit):
            last_barrier = at
    return runs


def _sunk(
    runs: list[list[AnyUnit]], movable: Callable[[AnyUnit], bool], barrier: Callable[[AnyUnit], bool]
) -> list[AnyUnit]:
    """The order, after operations have joined the only run that uses them."""
    place = {node: at for at, run in enumerate(runs) for unit in run for node in unit.nodes}
    barriers = [at for at, run in enumerate(runs) for unit in run if barrier(unit)]
    executors = [run[0].executor if run else None for run in runs]
    for at in reversed(range(len(runs))):
        for unit in list(reversed(runs[at])):
            outside = {user for node in unit.nodes for user in node.users if user not in unit.nodes}
            target = {place.get(user, -1) for user in outside}
            if not movable(unit) or len(target) != 1:
                continue
            (to,) = target
            if to <= at or executors[to] != unit.executor or any(at <= b <= to for b in barriers) or _shrinks(unit):
                continue
            runs[at].remove(unit)
            runs[to].insert(0, unit)
            place.update((node, to) for node in unit.nodes)
    return [unit for run in runs for unit in run]


def _used(unit: Unit) -> list[fx.Node]:
    return [used for node in unit.nodes for used in node.all_input_nodes if used not in unit.nodes]


def _is_number(unit: Unit) -> bool:
    return isinstance(node_value(unit.operation), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float))


def _shrinks(unit: Unit) -> bool:
    """Whether the result is much smaller than what it is computed from: then that should not be kept longer."""
    needed = sum(_bytes(node_value(used)) for used in _used(unit) if used.op != "placeholder")
    return needed > 2 * sum(_bytes(node_value(node)) for node in unit.nodes)


def _bytes(value: object) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    return _torch_compat.size_hint(value.numel()) * value.element_size()
