"""Weights of sharded linears are cast before they are gathered: fewer bytes between ranks.

One scale for a whole weight needs the largest magnitude over all its shards: those of all weights of a program are
reduced by one collective. The weight's gradient is reduced as before, in its own precision.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lightning_thunder_strategy.compiler import _torch_aot
from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.precision.delayed import KINDS
from lightning_thunder_strategy.precision.formats import FORMATS, FormatName, cast
from lightning_thunder_strategy.precision.scaling import largest_magnitude, largest_to_scale
from lightning_thunder_strategy.transforms.unshard_policy import GATHER_REGION, is_form_of, parameter_gather

_MARK = "lts_low_precision_gather"  # in the node metadata that AOTAutograd hands on


def shard_scales(shards: Sequence[DTensor], format_name: FormatName, power_of_two_scales: bool = False) -> Tensor:
    """One scale for each sharded weight, from the largest magnitudes over all ranks; an empty shard adds nothing.

    Args:
        shards: The weights, all on one mesh.
        format_name: The format that the scales are for.
        power_of_two_scales: Round them up to powers of two.

    Returns:
        float32 ``[weights]``, the same on every rank.
    """
    with torch.no_grad():
        largest = torch.stack([largest_magnitude(shard.detach().to_local()) for shard in shards])
        mesh = shards[0].device_mesh
        kinds = [Partial("max") if isinstance(kind, Shard) else Replicate() for kind in shards[0].placements]
        reduced = DTensor.from_local(largest, mesh, kinds, run_check=False).redistribute(
            placements=[Replicate()] * mesh.ndim
        )
        return largest_to_scale(reduced.to_local(), FORMATS[format_name].largest, power_of_two_scales)


def gathered_values(shard: DTensor, scales: Tensor, index: int, format_name: FormatName) -> Tensor:
    """A sharded weight in low precision, whole: cast, then gathered as bytes.

    Args:
        shard: The weight, ``[out, in]``.
        scales: What :func:`shard_scales` returned.
        index: Its place there.
        format_name: The format.
    """
    form = FORMATS[format_name]
    with torch.no_grad():
        values = cast(shard.detach().to_local().to(torch.float32) * (1.0 / scales[index]), form)
        whole = DTensor.from_local(
            values.view(torch.uint8), shard.device_mesh, shard.placements, run_check=False, shape=shard.shape,
            stride=shard.stride(),
        ).redistribute(placements=[Replicate()] * shard.device_mesh.ndim)  # fmt: skip
        return whole.to_local().view(values.dtype)


# ------------------------------------------------------------------------------------------------------------ the pass


def stored_shard(weight: fx.Node) -> Optional[fx.Node]:
    """The distributed parameter that ``weight`` is the gathered whole of, or ``None`` if it is not one.

    Only parameters whose rows are spread, and that are gathered in one go.
    """
    if weight.op != "call_method" or weight.target != "to_local":
        return None
    gather = weight.args[0]
    if not isinstance(gather, fx.Node) or gather.op != "call_method" or gather.target != "redistribute":
        return None
    shard, whole = gather.args[0], node_value(gather)
    if not isinstance(shard, fx.Node) or shard.op != "placeholder" or not isinstance(whole, DTensor):
        return None
    stored = node_value(shard)
    placements = getattr(stored, "placements", ())
    if not all(type(kind) in (Shard, Replicate) for kind in placements):
        return None
    rows = [kind for kind in placements if isinstance(kind, Shard)]
    whole_everywhere = all(isinstance(kind, Replicate) for kind in whole.placements)
    return shard if whole_everywhere and len(rows) == 1 and rows[0].dim == 0 else None


def insert_gathers(
    program: fx.GraphModule,
    weights: Sequence[fx.Node],
    format_name: FormatName,
    power_of_two_scales: bool,
    known: Optional[Mapping[fx.Node, fx.Node]] = None,
) -> dict[fx.Node, dict[str, Any]]:
    """Gather weights in low precision besides.

    Args:
        program: An acquired program.
        weights: Gathered whole weights, each with a :func:`stored_shard`.
        format_name: Their format.
        power_of_two_scales: Round scales up to powers of two.
        known: For each weight the scales of a linear that it belongs to, if they need not be found (delayed scaling).

    Returns:
        For each weight the arguments that ``scaled_linear`` takes for it.
    """
    graph, result = program.graph, {}
    groups: dict[Any, list[tuple[fx.Node, fx.Node]]] = {}
    for weight in dict.fromkeys(weights):
        shard = stored_shard(weight)
        assert shard is not None
        stored = node_value(shard)
        if known is not None:
            result[weight] = _gather(graph, weight, shard, known[weight], KINDS.index("weight"), format_name)
            continue
        groups.setdefault((stored.device_mesh, stored.placements), []).append((weight, shard))
    last_input = graph.find_nodes(op="placeholder")[-1]
    for group in groups.values():
        with graph.inserting_after(last_input):
            shards = [shard for _, shard in group]
            scales = graph.call_function(shard_scales, (shards, format_name, power_of_two_scales))
        for index, (weight, shard) in enumerate(group):
            result[weight] = _gather(graph, weight, shard, scales, index, format_name)
    return result


def _gather(
    graph: fx.Graph, weight: fx.Node, shard: fx.Node, scales: fx.Node, index: int, format_name: FormatName
) -> dict[str, Any]:
    with graph.inserting_after(weight):
        values = graph.call_function(gathered_values, (shard, scales, index, format_name))
    values.meta["custom"] = {_MARK: format_name}
    return {"weight_values": values, "weight_scales": scales, "weight_index": index}


def settle_gathers(graph: fx.Graph) -> None:
    """In a differentiated program: drop the gathers in the base precision that nothing uses any more, and compute those
    in low precision again in the backward where that was asked for the others (ZeRO-3)."""
    chains = {node: chain for node in graph.nodes if (chain := parameter_gather(node)) is not None}
    gathered: set[fx.Node] = set(chains)
    for node in graph.nodes:
        if is_form_of(node, gathered):
            gathered.add(node)
    again = False
    for node in reversed(graph.nodes):
        if node not in gathered or node.users:
            continue
        again = again or ("recompute" in node.meta and node in chains)
        for member in chains.get(node, [node]):
            if not member.users:
                graph.erase_node(member)
    if again:
        for node in graph.nodes:
            if _MARK in (node.meta.get("custom") or {}) and node.op == "call_function":
                _torch_aot.mark_recompute(node, GATHER_REGION)
