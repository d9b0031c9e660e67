"""Gathers each parameter once, however often it is used."""

import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from lightning_thunder_strategy.compiler._torch_dtensor import dtensor_call
from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.compiler.transform import Transform

_PARAMETERS = ("gather_unreduced", "adding_gradient")
_ACTIVATIONS = ("copy_to_ranks", "join_to_ranks")
_IN_PLACE = (operator.setitem, operator.delitem, operator.iadd, operator.isub, operator.imul, operator.itruediv,
             operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior,
             operator.ixor, operator.ilshift, operator.irshift)  # fmt: skip


@dataclass(frozen=True)
class DeduplicateUnshard(Transform):
    """Merges equal chains that gather a parameter (``redistribute`` then ``to_local``).

    Without it a tied weight would be reduced once for each use. A parameter is never edited inside a step (that is an
    error, see ``RefuseLostEdits``), so all its gathers are equal. So are the inputs of tensor-parallel layers that read
    the same activation, such as the projections to queries, keys and values: one collective sums their gradients.
    """

    def acquired(self, trace: Trace) -> None:
        seen: dict[Any, fx.Node] = {}
        gradients = True  # whether autograd records here, as far as the program itself says
        for node in list(trace.graph.nodes):
            name = getattr(node.target, "__name__", "")
            if name == "_set_grad_enabled":
                gradients = bool(node.args[0])
            elif name.endswith("inference_mode"):
                seen.clear()
            elif _edits(node):
                seen = {key: found for key, found in seen.items() if key[0] not in _ACTIVATIONS}
            elif dtensor_call(node) is not None or name in _PARAMETERS or name in _ACTIVATIONS:
                arguments = tuple(sorted((key, repr(value)) for key, value in node.kwargs.items()))
                key = (name if name in _ACTIVATIONS else "", node.target, node.args, arguments)
                recorded, unrecorded = (*key, True), (*key, False)
                found = seen.get(recorded, None if gradients else seen.get(unrecorded))
                if found is None:  # also if the equal one has no gradient, and this one has
                    seen[recorded if gradients else unrecorded] = node
                else:
                    node.replace_all_uses_with(found)
                    trace.graph.erase_node(node)


def _edits(node: fx.Node) -> bool:
    """Whether an operation may edit a tensor in place."""
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__") or node.target == "__setitem__"
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    return node.target in _IN_PLACE or "out" in node.kwargs or (name.endswith("_") and not name.endswith("__"))
