"""Activation checkpointing: what the forward keeps for the backward, and what the backward computes again."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import fx, nn

from lightning_thunder_strategy.compiler import _torch_aot
from lightning_thunder_strategy.compiler.config import check_choice, check_patterns
from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.module_path import ModuleCall
from lightning_thunder_strategy.compiler.refusals import told_by_the_parser_too
from lightning_thunder_strategy.compiler.report import warn
from lightning_thunder_strategy.compiler.trace import Decision, Trace
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.transforms.blocks import block_operations, blocks_of, forward_operations, is_view
from lightning_thunder_strategy.transforms.unshard_policy import is_form_of, parameter_gather

Policy = Literal["none", "selective", "block"]

_WHOLE = ModuleCall("the whole program", "", "")
_FIRST_REGION = 10**5  # after the numbers that torch gives to a user's own checkpoints, before those of gathers


@told_by_the_parser_too
@dataclass(frozen=True)
class ActivationCheckpointing(Transform):
    """Keeps less for the backward and computes the rest again: ``transforms=[ActivationCheckpointing("block")]``.

    Losses and gradients stay the same: random numbers (dropout) are drawn again from the state that the forward had,
    and statistics (BatchNorm) are updated by the forward only. Parts under ``torch.utils.checkpoint`` stay as they are,
    and whether gathered parameters are kept is the sharding's choice (``"zero2"`` or ``"zero3"``).

    Args:
        policy: ``"block"``: of each block only what goes into it is kept. ``"selective"``: also results of products of
            matrices, convolutions, attention, collectives and operators that torch does not know; norms and pointwise
            operations are computed again. A model without blocks is one block then. ``"none"``: as without this pass:
            torch's partitioner keeps what costs more to compute again than to read.
        blocks: Patterns of names of modules (as in ``fnmatch``) that are blocks, such as ``["*.layers.*"]``; a module
            inside another block is none. By default the modules in lists (``ModuleList``, ``Sequential``) that hold
            modules themselves, where several of the list have the same class.

    Raises:
        ValueError: If an option has a value that is not allowed, or the model has no such block.
    """

    policy: Policy
    blocks: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_choice("policy", self.policy, get_args(Policy))
        check_patterns("blocks", self.blocks)
        object.__setattr__(self, "blocks", tuple(self.blocks))
        if self.blocks and self.policy == "none":
            raise ValueError(
                f"blocks={self.blocks!r} is not allowed with policy='none': choose 'block' or 'selective'."
            )

    def module(self, module: nn.Module) -> None:
        if (self.policy == "block" or self.blocks) and not blocks_of(module, self.blocks):
            raise ValueError(f"ActivationCheckpointing(policy={self.policy!r}): {self._missing(type(module).__name__)}")

    def joint(self, trace: Trace) -> None:
        if self.policy == "none":
            return
        blocks = block_operations(trace, self.blocks)
        if not blocks and (self.policy == "block" or self.blocks):
            warn(f"ActivationCheckpointing(policy={self.policy!r}) changes nothing: {self._missing('one program')}")
        elif not blocks:
            blocks = dict.fromkeys(forward_operations(trace.graph), _WHOLE)
        gathers = _parameter_forms(trace.graph)
        blocks = {node: block for node, block in blocks.items() if node not in gathers and _may_run_twice(node)}
        kept = _ends(blocks)
        if self.policy == "selective":
            kept |= {node for node in blocks if is_expensive(node)}
        again = _computed_again(blocks, kept)
        for node in kept:
            _torch_aot.mark_save(node)
        for index, block in enumerate(dict.fromkeys(blocks.values())):
            marked = [node for node in again if blocks[node] == block]
            for node in marked:
                _torch_aot.mark_recompute(node, _FIRST_REGION + index)
            what = "computed again where the backward needs them"
            trace.decisions.append(Decision(block.name, f"{len(marked)} operations", what, f"policy={self.policy!r}"))

    def _missing(self, where: str) -> str:
        if self.blocks:
            return f"no module of {where} has a name that matches blocks={list(self.blocks)!r}: correct the patterns."
        return (
            f"{where} has no list of modules of one class that hold modules themselves: name the blocks with "
            "blocks=['pattern'], or choose policy='selective'."
        )


def is_expensive(node: fx.Node) -> bool:
    """Whether ``"selective"`` keeps an operation's result."""
    target = node.target
    if target is operator.getitem:
        return False  # goes with what it is a part of
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return True
    name = target._schema.name.split("::")[1]
    return name in _EXPENSIVE or "attention" in name or "convolution" in name


_EXPENSIVE = {
    "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "matmul", "_scaled_mm", "_int_mm",
    "_grouped_mm", "_scaled_grouped_mm", "sort", "topk", "_cudnn_rnn", "_fft_r2c", "_fft_c2c", "_fft_c2r",
    "_cdist_forward", "_embedding_bag", "grid_sampler_2d", "upsample_bilinear2d",
}  # fmt: skip


def _may_run_twice(node: fx.Node) -> bool:
    """Whether nobody can tell that an operation ran a second time, and no pass before has decided about it."""
    target = node.target
    if _torch_aot.has_policy(node) or isinstance(node_value(node), (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    if isinstance(target, torch._ops.OpOverload):
        return not target._schema.is_mutable
    return not isinstance(target, torch._ops.HigherOrderOperator) or target.name() != "with_effects"


def _parameter_forms(graph: fx.Graph) -> set[fx.Node]:
    """Gathers of parameters and casts and views of what they give."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        chain = parameter_gather(node)
        if chain is not None:
            found.update(chain)
        elif is_form_of(node, found):
            found.add(node)
    return found


def _ends(blocks: dict[fx.Node, ModuleCall]) -> set[fx.Node]:
    """What leaves a block: kept, or a long way back would be computed again at once.

    Torch may compute views again whatever they are marked with, so what they are views of is kept.
    """
    found = set()
    for node, block in blocks.items():
        if any(blocks.get(user) != block and _reads(user) for user in node.users):
            while blocks.get(node) == block and (is_view(node) or node.target is operator.getitem):
                node = node.all_input_nodes[0]
            if blocks.get(node) == block:
                found.add(node)
    return found


def _reads(user: fx.Node) -> bool:
    """Whether a value is computed from its input in the forward, rather than returned or written to an input."""
    if user.op == "output" or _torch_aot.is_backward(user):
        return False
    return not (isinstance(user.target, torch._ops.OpOverload) and user.target._schema.is_mutable)


def _computed_again(blocks: dict[fx.Node, ModuleCall], kept: set[fx.Node]) -> set[fx.Node]:
    """All of a block but what is kept; parts of a tuple go with it."""
    found: set[fx.Node] = set()
    for node in blocks:
        if node.target is operator.getitem:
            if node.args[0] in found:
                found.add(node)
        elif node not in kept:
            found.add(node)
    return found
