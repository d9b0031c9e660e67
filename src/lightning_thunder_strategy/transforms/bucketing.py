"""Gathers and reduces several parameters with one collective."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Optional, Union

import torch
from torch import fx

from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.ordering import call, sort_stably
from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.transforms.parameter_collectives import (
    GATHER,
    REDUCE,
    SCATTER,
    ParameterCollective,
    mark_merged,
    parameter_collectives,
)

_aten = torch.ops.aten


@dataclass(frozen=True)
class Bucket(Transform):
    """Merges collectives of parameters that follow each other in a program.

    Which ones depends on the parameters and the order in which the step uses them, so it is the same on all ranks.

    Attributes:
        size: Mebibytes of whole parameters in one collective at most, or ``"block"``: the parameters of one block of
            the model (an entry of a list of modules), and those between blocks.
    """

    size: Union[float, Literal["block"]]

    def partitioned(self, forward: Trace, backward: Optional[Trace]) -> None:
        for trace in (forward, backward):
            if trace is None:
                continue
            buckets = [bucket for bucket in _buckets(parameter_collectives(trace), self.size) if len(bucket) > 1]
            for bucket in buckets:
                _MERGE[bucket[0].op](trace.graph, bucket)
            if buckets:
                sort_stably(trace.graph)


def _buckets(
    collectives: Sequence[ParameterCollective], size: Union[float, Literal["block"]]
) -> list[list[ParameterCollective]]:
    """Which collectives become one."""
    made: list[list[ParameterCollective]] = []
    open_ones: dict[Any, list[ParameterCollective]] = {}
    block = ""
    for item in collectives:
        key: Any = _kind(item)
        if size == "block":
            if item.block != block:  # what is outside of blocks is merged only where no block lies in between
                open_ones = {k: held for k, held in open_ones.items() if held[-1].block}
            key, block = (key, item.block), item.block
        bucket = open_ones.get(key)
        full = bucket is not None and size != "block" and sum(b.bytes for b in bucket) + item.bytes > size * 2**20
        if bucket is None or full:
            bucket = open_ones[key] = []
            made.append(bucket)
        bucket.append(item)
    return made


def _kind(item: ParameterCollective) -> tuple:
    """Only collectives of one operator, element type, device and group can be merged."""
    value = node_value(item.launch.all_input_nodes[0])
    return (item.op, value.dtype, value.device, *item.launch.args[1:])


# ------------------------------------------------------------------------------------------------------------ merge


def _merge_gathers(graph: fx.Graph, bucket: Sequence[ParameterCollective]) -> None:
    first = bucket[0].launch
    for item in bucket:
        for node in item.before:
            first.prepend(node)
    shards = [item.launch.args[0] for item in bucket]
    world = first.args[1]
    with graph.inserting_before(first):
        flat = _concatenated(graph, shards, first)  # type: ignore[arg-type]
        launch = call(graph, first.target, flat, *first.args[1:], like=first)  # type: ignore[arg-type]
        mark_merged(launch, bucket)
        wait = call(graph, bucket[0].wait.target, launch, like=bucket[0].wait)  # type: ignore[arg-type]
        rows = call(graph, _aten.view.default, wait, [world, -1], like=first)
        sizes = [node_value(shard).numel() for shard in shards]
        parts = call(graph, _aten.split_with_sizes.default, rows, sizes, 1, like=first)
        for index, item in enumerate(bucket):
            part = _getitem(graph, parts, index, item.wait)
            whole = call(graph, _aten.clone.default, part, like=item.wait)
            whole.meta["val"] = _contiguous(whole)
            whole.kwargs = {"memory_format": torch.contiguous_format}
            result = call(graph, _aten.view.default, whole, list(node_value(item.wait).shape), like=item.wait)
            item.wait.replace_all_uses_with(result)
    _erase(graph, bucket)


def _merge_scatters(graph: fx.Graph, bucket: Sequence[ParameterCollective]) -> None:
    last = bucket[-1].launch
    world = last.args[2]
    with graph.inserting_before(last):
        rows = [
            call(graph, _aten.view.default, _dense(graph, item.launch.args[0], last), [world, -1], like=item.launch)
            for item in bucket
        ]
        joined = call(graph, _aten.cat.default, rows, 1, like=last)
        flat = call(graph, _aten.view.default, joined, [-1], like=last)
        launch = call(graph, last.target, flat, *last.args[1:], like=last)  # type: ignore[arg-type]
        mark_merged(launch, bucket)
        _distribute(graph, bucket, call(graph, bucket[-1].wait.target, launch, like=last))  # type: ignore[arg-type]
    _erase(graph, bucket)


def _merge_reductions(graph: fx.Graph, bucket: Sequence[ParameterCollective]) -> None:
    last = bucket[-1].launch
    with graph.inserting_before(last):
        flat = _concatenated(graph, [item.launch.args[0] for item in bucket], last)  # type: ignore[misc]
        launch = call(graph, last.target, flat, *last.args[1:], like=last)  # type: ignore[arg-type]
        mark_merged(launch, bucket)
        _distribute(graph, bucket, call(graph, bucket[-1].wait.target, launch, like=last))  # type: ignore[arg-type]
    _erase(graph, bucket)


_MERGE = {GATHER: _merge_gathers, SCATTER: _merge_scatters, REDUCE: _merge_reductions}


def _concatenated(graph: fx.Graph, tensors: Sequence[fx.Node], like: fx.Node) -> fx.Node:
    flats = [call(graph, _aten.view.default, _dense(graph, tensor, like), [-1], like=like) for tensor in tensors]
    return call(graph, _aten.cat.default, flats, like=like)


def _dense(graph: fx.Graph, tensor: Any, like: fx.Node) -> fx.Node:
    """The tensor with its elements in row order."""
    if node_value(tensor).is_contiguous():
        return tensor
    copy = call(graph, _aten.clone.default, tensor, like=like)
    copy.meta["val"] = _contiguous(copy)
    copy.kwargs = {"memory_format": torch.contiguous_format}
    return copy


def _contiguous(node: fx.Node) -> torch.Tensor:
    value = node_value(node)
    with value.fake_mode:
        return value.contiguous()


def _distribute(graph: fx.Graph, bucket: Sequence[ParameterCollective], flat: fx.Node) -> None:
    """Give each collective of the bucket its part of the merged result."""
    sizes = [node_value(item.wait).numel() for item in bucket]
    parts = call(graph, _aten.split_with_sizes.default, flat, sizes, like=flat)
    for index, item in enumerate(bucket):
        part = _getitem(graph, parts, index, item.wait)
        result = call(graph, _aten.view.default, part, list(node_value(item.wait).shape), like=item.wait)
        item.wait.replace_all_uses_with(result)


def _getitem(graph: fx.Graph, parts: fx.Node, index: int, like: fx.Node) -> fx.Node:
    node = graph.call_function(operator.getitem, (parts, index))
    node.meta["val"] = node_value(parts)[index]
    return node


def _erase(graph: fx.Graph, bucket: Sequence[ParameterCollective]) -> None:
    for item in bucket:
        graph.erase_node(item.wait)
        graph.erase_node(item.launch)
