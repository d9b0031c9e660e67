"""Orders collectives so that they run beside computation: gathers start early, waits come late."""

from dataclasses import dataclass
from typing import Optional

from torch import fx

from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.transforms.parameter_collectives import (
    GATHER,
    REDUCE,
    SCATTER,
    ParameterCollective,
    collective_name,
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
                for op in (SCATTER, REDUCE):
                    _sink(trace.graph, [item for item in found if item.op == op], _bytes(self.limit))


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
    for index, item in enumerate(reductions):
        order = {node: place for place, node in enumerate(graph.nodes)}
        forms = _forms(item.wait, order)
        total, place = item.bytes, graph.output_node()
        if any(collective_name(node) is not None for node in forms[1:]):  # its result is reduced further
            place = reductions[index + 1].wait if index + 1 < len(reductions) else item.wait
        for later in reductions[index + 1 :]:
            total += later.bytes
            if total > limit:
                place = min(place, later.launch, key=order.__getitem__)
                break
        for node in forms:
            if order[node] < order[place]:
                place.prepend(node)


def _forms(wait: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """The wait and all that is computed from its result, in order."""
    found, pending = {wait}, [wait]
    while pending:
        new = [user for user in pending.pop().users if user.op != "output" and user not in found]
        found.update(new)
        pending += new
    return sorted(found, key=order.__getitem__)
