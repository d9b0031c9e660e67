"""What the forward hands to the backward."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Optional

import torch
from torch import fx

from lightning_thunder_strategy.compiler import _torch_aot, _torch_compat
from lightning_thunder_strategy.compiler.emit import node_value


@dataclass(frozen=True)
class Saved:
    """Memory that the forward keeps for the backward and that is not its caller's: no parameters, no inputs.

    Attributes:
        tensors: How many pieces of memory; views share one.
        bytes: Their size; with symbolic shapes, of those that the program was compiled with.
    """

    tensors: int = 0
    bytes: int = 0


def kept(forward: fx.GraphModule, outputs: int, without: Collection[str] = ()) -> Saved:
    """What a forward keeps.

    Args:
        forward: The forward program.
        outputs: How many of its outputs are not saved values.
        without: Names of saved values that do not count.
    """
    inputs = {_storage(node) for node in forward.graph.find_nodes(op="placeholder")}
    saved = {_storage(node): node for node in forward.graph.output_node().args[0][outputs:] if node.name not in without}
    sizes = [_bytes(node) for storage, node in saved.items() if storage is not None and storage not in inputs]
    return Saved(len(sizes), sum(sizes))


def computed_again(forward: fx.GraphModule, backward: fx.GraphModule) -> int:
    """How many operations are in both programs."""
    names = {node.name for node in forward.graph.nodes if node.op == "call_function"}
    return sum(node.op == "call_function" and node.name in names for node in backward.graph.nodes)


def _storage(node: fx.Node) -> Optional[int]:
    value = node_value(node)
    has_one = isinstance(value, torch.Tensor) and value.layout == torch.strided
    return value.untyped_storage()._cdata if has_one else None


def _bytes(node: fx.Node) -> int:
    return _torch_compat.size_hint(node_value(node).untyped_storage().nbytes())


def copy_saved_edits(forward: fx.GraphModule, outputs: int, edited: set[Optional[int]]) -> None:
    """Save a copy of an input that the backward needs and that gets a new value after the forward.

    Such as BatchNorm's statistics in a checkpointed region, which the backward computes again.

    Args:
        forward: The forward program.
        outputs: How many of its outputs are not saved values.
        edited: Which inputs of the acquired program get a new value.
    """
    placeholders = forward.graph.find_nodes(op="placeholder")
    changed = {node for node in placeholders if _torch_aot.aot_input_index(node) in edited}
    result = next(iter(reversed(forward.graph.nodes)))
    saved = list(result.args[0])
    for place in range(outputs, len(saved)):
        if saved[place] in changed:
            with forward.graph.inserting_before(result):
                copy = forward.graph.call_function(torch.ops.aten.clone.default, (saved[place],))
            copy.meta = {key: value for key, value in saved[place].meta.items() if key != "desc"}
            saved[place] = copy
    if saved != list(result.args[0]):
        result.args = (tuple(saved),)
        forward.recompile()


def sort_saved_values(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> None:
    """Order what is saved for the backward: tensors, then objects such as device meshes, then symbolic integers.

    The partitioner may put a saved RNG state after an object; AOTAutograd then takes the object for a tensor.
    """

    def rank(node: fx.Node) -> int:
        value = node_value(node)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return 2
        return 0 if value is None or isinstance(value, torch.Tensor) else 1

    result = next(iter(reversed(forward.graph.nodes)))
    saved = list(result.args[0])[outputs:]
    order = sorted(range(len(saved)), key=lambda index: rank(saved[index]))
    if order == list(range(len(saved))):
        return
    result.args = ((*result.args[0][:outputs], *[saved[index] for index in order]),)
    described = result.meta.get("desc")
    if described is not None:
        result.meta["desc"] = [*described[:outputs], *[described[outputs + index] for index in order]]
    placeholders = backward.graph.find_nodes(op="placeholder")[: len(saved)]
    _torch_aot.move_to_front(backward.graph, [placeholders[index] for index in order])
    forward.recompile()
    backward.recompile()
