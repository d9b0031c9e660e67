"""Gathers each parameter once, however often it is used."""

from dataclasses import dataclass
from typing import Any

from torch import fx

from lightning_thunder_strategy.compiler._torch_dtensor import dtensor_call
from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.compiler.transform import Transform

_MERGED = ("gather_unreduced", "adding_gradient", "copy_to_ranks", "join_to_ranks")


@dataclass(frozen=True)
class DeduplicateUnshard(Transform):
    """Merges equal chains that gather a parameter (``redistribute`` then ``to_local``).

    Without it a tied weight would be reduced once for each use. A parameter is never edited inside a step (that is an
    error, see ``RefuseLostEdits``), so all its gathers are equal. So are the inputs of tensor-parallel layers that read
    the same activation, such as the projections to queries, keys and values: one collective sums their gradients.
    """

    def acquired(self, trace: Trace) -> None:
        seen: dict[Any, fx.Node] = {}
        for node in list(trace.graph.nodes):
            if dtensor_call(node) is None and getattr(node.target, "__name__", "") not in _MERGED:
                continue
            key = (node.target, node.args, tuple(sorted((name, repr(value)) for name, value in node.kwargs.items())))
            if key in seen:
                node.replace_all_uses_with(seen[key])
                trace.graph.erase_node(node)
            else:
                seen[key] = node
