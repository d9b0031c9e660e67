"""Finds the collectives by which parameters are gathered and their gradients reduced."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import torch
from torch import fx

from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.transforms.unshard_policy import parameter_gather

_MERGED = "lts_merged"  # key in a node's metadata

GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"


@dataclass(frozen=True)
class ParameterCollective:
    """One collective and what belongs to it.

    Attributes:
        op: Torch's functional name.
        launch: The collective.
        wait: Where its result is taken.
        before: What leads from a stored parameter to it, in order; empty for reductions.
        parameter: The qualified name of the parameter, or ``""`` if it is not known.
        bytes: Size of the whole tensor; of a reduction of shards, of a padded shard: the same on all ranks.
    """

    op: str
    launch: fx.Node
    wait: fx.Node
    before: tuple[fx.Node, ...]
    parameter: str
    bytes: int

    @property
    def block(self) -> str:
        """The block of the model that the parameter belongs to, or ``""``."""
        return block_of(self.parameter)


def block_of(name: str) -> str:
    """An entry of a list of modules: ``model.layers.3`` for ``model.layers.3.attention.weight``."""
    parts = name.split(".")
    place = next((index for index, part in enumerate(parts[:-1]) if part.isdigit()), None)
    return "" if place is None else ".".join(parts[: place + 1])


def parameter_collectives(trace: Trace) -> list[ParameterCollective]:
    """Gathers of parameters and reductions of gradients, in the order in which they are issued."""
    gradients = _gradient_outputs(trace)
    found = []
    for node in trace.graph.nodes:
        op = collective_name(node)
        wait = next(iter(node.users), None) if op is not None else None
        if op is None or wait is None or len(node.users) != 1 or collective_name(wait) != "wait_tensor":
            continue
        if _MERGED in node.meta:
            before = _upstream(node) if op == GATHER else ()
            found.append(ParameterCollective(op, node, wait, before, *node.meta[_MERGED]))
        elif op == GATHER:
            chain = parameter_gather(wait)
            if chain is not None and not any(collective_name(member) is not None for member in chain[2:]):
                before = tuple(reversed(chain[2:]))
                origin = trace.origin((before[0] if before else node).all_input_nodes[0])
                known = origin is not None and origin.kind == "parameter"
                name = origin.origin or "" if origin is not None and known else ""
                found.append(ParameterCollective(op, node, wait, before, name, _bytes(wait)))
        elif op in (SCATTER, REDUCE):
            parameter = _leads_to(wait, gradients)
            if parameter is not None:
                found.append(ParameterCollective(op, node, wait, (), parameter, _bytes(_before_unpadding(node))))
    return found


def mark_merged(launch: fx.Node, bucket: Sequence[ParameterCollective]) -> None:
    """Say that a collective is that of several parameters."""
    launch.meta[_MERGED] = (bucket[0].parameter, sum(item.bytes for item in bucket))


def _bytes(node: fx.Node) -> int:
    value = node_value(node)
    return value.numel() * value.element_size()


def _before_unpadding(launch: fx.Node) -> fx.Node:
    """What is reduced; if it is a part of what another reduction gave, that."""
    node = source = launch.all_input_nodes[0]
    while len(node.all_input_nodes) == 1:
        if collective_name(node) == "wait_tensor":
            return node
        node = node.all_input_nodes[0]
    return source


def _upstream(launch: fx.Node) -> tuple[fx.Node, ...]:
    """All that leads from stored parameters to a merged gather, in order."""
    order = {node: index for index, node in enumerate(launch.graph.nodes)}
    found: set[fx.Node] = set()
    pending = [launch]
    while pending:
        new = [node for node in pending.pop().all_input_nodes if node.op != "placeholder" and node not in found]
        found.update(new)
        pending += new
    return tuple(sorted(found, key=order.__getitem__))


def collective_name(node: fx.Node) -> Optional[str]:
    """Torch's functional name of a collective or wait, or ``None``."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return None
    return target._schema.name.split("::")[1] if target.namespace == "_c10d_functional" else None


def _gradient_outputs(trace: Trace) -> dict[fx.Node, str]:
    returned = trace.graph.output_node().args[0]
    outputs = zip(returned, trace.outputs) if isinstance(returned, (tuple, list)) else ()
    return {
        node: output.origin or "" for node, output in outputs if isinstance(node, fx.Node) and output.kind == "gradient"
    }


def _leads_to(node: fx.Node, gradients: dict[fx.Node, str]) -> Optional[str]:
    """The parameter whose gradient ``node`` becomes, through nothing but other forms of it."""
    while node not in gradients:
        users = [user for user in node.users if user.op != "output"]
        if len(users) != 1 or len(node.users) != 1 or len(users[0].all_input_nodes) != 1:
            return None
        node = users[0]
    return gradients[node]
