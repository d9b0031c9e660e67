"""ZeRO-3: what the backward needs of a gathered parameter is gathered again."""

import operator
from dataclasses import dataclass
from typing import Optional

import torch
from torch import fx

from lightning_thunder_strategy.compiler import _torch_aot
from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.compiler.transform import Transform

GATHER_REGION = (
    10**6
)  # one number for all gathers, so that neighbouring checkpoint regions do not force them to be saved


@dataclass(frozen=True)
class GatherAgain(Transform):
    """Tags each parameter's all-gather to be computed again in the backward (ZeRO-3).

    Without it the partitioner saves the gathered parameter for the backward (ZeRO-2). Casts and views of it are
    computed again with it. A gather of an activation, which does not start at an input of the program, is left alone.
    """

    def joint(self, trace: Trace) -> None:
        gathered: set[fx.Node] = set()  # and what is only a cast or view of it
        for node in trace.graph.nodes:
            chain = parameter_gather(node)
            if chain is not None:
                gathered.add(node)
            elif is_form_of(node, gathered):
                gathered.add(node)
                chain = [node]
            for member in chain or ():
                _torch_aot.mark_recompute(member, GATHER_REGION)


def parameter_gather(node: fx.Node) -> Optional[list[fx.Node]]:
    """The chain from a stored shard to its gathered tensor, if ``node`` is the wait at the end of one."""
    if node.op != "call_function" or not _is(node, "wait_tensor"):
        return None
    gather = node.args[0]
    if not isinstance(gather, fx.Node) or not _is(gather, "all_gather_into_tensor"):
        return None
    chain = [node, gather]
    source = gather.args[0]
    while isinstance(source, fx.Node) and source.op == "call_function" and len(source.all_input_nodes) == 1:
        chain.append(source)
        source = source.all_input_nodes[0]
    return chain if isinstance(source, fx.Node) and source.op == "placeholder" else None


_FORMS = (
    "_to_copy", "convert_element_type", "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "slice",
    "expand", "alias", "detach", "clone", "unsqueeze", "squeeze", "select", "split", "split_with_sizes", "unbind",
    "as_strided",
)  # fmt: skip


def is_form_of(node: fx.Node, gathered: set[fx.Node]) -> bool:
    """Whether ``node`` is another form of one gathered parameter: a cast, a view, a part, parts one after the other."""
    if node.op != "call_function" or not any(used in gathered for used in node.all_input_nodes[:1]):
        return False
    if node.target is operator.getitem:
        return True
    name = node.target._schema.name.split("::")[1] if isinstance(node.target, torch._ops.OpOverload) else ""
    return name in _FORMS or (name == "cat" and all(used in gathered for used in node.all_input_nodes))


def _is(node: fx.Node, name: str) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.name == f"_c10d_functional::{name}"
