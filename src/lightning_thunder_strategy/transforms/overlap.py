"""Orders collectives so that they run beside computation: gathers start early, waits come late."""

from dataclasses import dataclass
from typing import Optional

from torch import fx

from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.transforms.parameter_collectives import (
    GATHER,
    ParameterCollective,
    parameter_collectives,
)


@dataclass(frozen=True)
class Overlap(Transform):
    """Starts gathers before the program needs them, and takes the results of reductions late.

    Gathers keep their order, and so do reductions, on all ranks alike.

    Attributes:
        prefetch: How many gathers are under way while the result of one is used.
        limit: Mebibytes of whole tensors under way at most, of gathers and of reductions each; ``None`` for no bound.
            A single collective may be larger.
    """

    prefetch: int
    limit: Optional[float]

    def partitioned(self, forward: Trace, backward: Optional[Trace]) -> None:
        for trace in (forward, backward):
            if trace is not None:
                found = parameter_collectives(trace)
                gathers = [item for item in found if item.op == GATHER]
                _prefetch(gathers, self.prefetch, _bytes(self.limit))
                _sink(trace.graph, [item for item in found if item.op != GATHER], _bytes(self.limit))


def _bytes(mebibytes: Optional[float]) -> float:
    return float("inf") if mebibytes is None else mebibytes * 2**20


def _prefetch(gathers: list[ParameterCollective], ahead: int, limit: float) -> None:
    """Launch each gather right before the wait of the one that is ``ahead`` before it, if the bound allows."""
    earliest = 0  # gathers do not overtake each other
    for index in range(1, len(gathers)):
        item = gathers[index]
        distance = min(ahead, index)  # how many gathers before it may still be under way
        while distance > 0 and sum(other.bytes for other in gathers[index - distance : index + 1]) > limit:
            distance -= 1
        earliest = max(earliest, index - distance)
        if earliest == index:
            continue
        place = gathers[earliest].wait
        for node in (*item.before, item.launch):
            place.prepend(node)


def _sink(graph: fx.Graph, reductions: list[ParameterCollective], limit: float) -> None:
    """Move the wait of each reduction, and what is made of its result, behind later ones, as the bound allows."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    for index, item in enumerate(reductions):
        total, place = item.bytes, graph.output_node()
        for later in reductions[index + 1 :]:
            total += later.bytes
            if total > limit:
                place = later.launch
                break
        first_use = min((order[node] for node in _needs(item.wait)), default=len(order))
        if order[place] > first_use:
            continue  # something is computed from it: it stays where it is needed
        for node in _forms(item.wait):
            place.prepend(node)


def _forms(wait: fx.Node) -> list[fx.Node]:
    """The wait and all that is computed from its result, in order."""
    order = {node: index for index, node in enumerate(wait.graph.nodes)}
    found, pending = {wait}, [wait]
    while pending:
        for user in pending.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                pending.append(user)
    return sorted(found, key=order.__getitem__)


def _needs(wait: fx.Node) -> list[fx.Node]:
    """What is computed from a result together with other values."""
    return [node for node in _forms(wait) if len(node.all_input_nodes) > 1]
