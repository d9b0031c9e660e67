"""Refuses a step that edits a gathered parameter."""

from dataclasses import dataclass

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from lightning_thunder_strategy.compiler import _torch_dynamo
from lightning_thunder_strategy.compiler._torch_dtensor import dtensor_call
from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.compiler.transform import ProgramRefusedError, Transform


class LostEditError(ProgramRefusedError):
    """A step edits a sharded parameter in place.

    Args:
        where: Which parameter, or the line of code.
    """

    def __init__(self, where: str) -> None:
        place = f": {where}" if where else ""
        super().__init__(
            "A step edits a parameter that is spread over ranks in place, or gives it new data, and the edit would be "
            f"lost with what the step computes with{place}. Edit parameters outside the step, for example in "
            "`on_train_batch_end`, where the attribute is the parameter itself."
        )


@dataclass(frozen=True)
class RefuseLostEdits(Transform):
    """Refuses a step that edits a gathered parameter in place: the edit would be lost with the gathered copy.

    Args:
        copies: Whether a step computes with copies of parameters. If it computes with the parameters' own memory
            (whole ones), only ``parameter.data = ...`` is lost.
    """

    copies: bool = True

    def acquired(self, trace: Trace) -> None:
        copies: set[fx.Node] = set()  # gathered tensors and what shares their memory
        for node in trace.graph.nodes:
            used = [argument for argument in node.all_input_nodes if argument in copies]
            if self.copies and used and _name(node).startswith("_foreach_") and _name(node).endswith("_"):
                raise LostEditError(_source(node))
            gathers = dtensor_call(node) == "to_local" or _name(node) == "gather_unreduced"
            if gathers or (used and _name(node) in _ALIASES):
                copies.add(node)
        broken_at = _torch_dynamo.breaks_at_new_data(trace.graph_module)
        if broken_at is not None and copies.intersection(trace.graph.output_node().all_input_nodes):
            raise LostEditError(broken_at)
        for node in copies if self.copies else ():
            value = node_value(node)
            # Dynamo has run the program on tensors without values: one that was edited counts a version.
            if type(value) is not DTensor and isinstance(value, torch.Tensor) and value._version > 0:
                raise LostEditError(_source(next((user for user in node.users if _name(user).endswith("_")), node)))


_ALIASES = (
    "data", "_get_data_attr", "detach", "view", "reshape", "t", "transpose", "permute", "flatten", "squeeze",
    "unsqueeze", "getitem", "__getitem__", "narrow", "select", "expand", "chunk", "split", "unbind", "T", "mT",
    "adding_gradient",
)  # fmt: skip


def _name(node: fx.Node) -> str:
    """What a program calls: ``mul_``, ``data`` of ``getattr(x, "data")``."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return str(node.args[1]) if name == "getattr" and len(node.args) > 1 else name


def _source(node: fx.Node) -> str:
    lines = (node.stack_trace or "").strip().splitlines()
    return " ".join(line.strip() for line in lines[-2:])
