"""Activation checkpointing: what the forward keeps for the backward, and what the backward computes again."""

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Union, get_args

import torch
from torch import fx, nn

from lightning_thunder_strategy.compiler import _torch_aot
from lightning_thunder_strategy.compiler.config import check_patterns
from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.module_path import ModuleCall
from lightning_thunder_strategy.compiler.refusals import told_by_the_parser_too
from lightning_thunder_strategy.compiler.report import warn
from lightning_thunder_strategy.compiler.trace import Decision, Trace
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.transforms.blocks import (
    block_operations,
    blocks_of,
    forward_operations,
    has_symbolic_sizes,
    is_view,
)
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
        policy: A number: at most so many GiB are kept for the backward (parameters, inputs and gradients do not count).
            Ranks need batches of the same shape. In a program for batches of any size all blocks are computed again.
            Of as many blocks as that takes, from the first, less is kept: as ``"selective"`` says, or if that is not
            enough for all blocks, as ``"block"`` says. It takes a few more partitions while compiling.
            ``"block"``: of each block only what goes into it is kept. ``"selective"``: also results of products of
            matrices, convolutions, attention, collectives and operators that torch does not know; norms and pointwise
            operations are computed again. A model without blocks is one block then. ``"none"``: as without this pass:
            torch's partitioner keeps what costs more to compute again than to read.
        blocks: Patterns of names of modules (as in ``fnmatch``) that are blocks, such as ``["*.layers.*"]``; a module
            inside another block is none. By default the modules in lists (``ModuleList``, ``Sequential``) that hold
            modules themselves, where several of the list have the same class.

    Raises:
        ValueError: If an option has a value that is not allowed, or the model has no such block.
    """

    policy: Union[Policy, float]
    blocks: Sequence[str] = ()

    def __post_init__(self) -> None:
        number = isinstance(self.policy, (int, float)) and not isinstance(self.policy, bool)
        if not (0 < self.policy < math.inf if number else self.policy in get_args(Policy)):  # type: ignore[operator]
            allowed = f"choose one of {', '.join(map(repr, get_args(Policy)))}, or a positive number of GiB"
            raise ValueError(f"policy={self.policy!r} is not allowed: {allowed}.")
        check_patterns("blocks", self.blocks)
        object.__setattr__(self, "blocks", tuple(self.blocks))
        if self.blocks and self.policy == "none":
            raise ValueError(
                f"blocks={self.blocks!r} is not allowed with policy='none': choose 'selective', 'block' or a number."
            )

    def module(self, module: nn.Module) -> None:
        needed = self.policy not in ("none", "selective") or self.blocks
        if needed and not blocks_of(module, self.blocks):
            raise ValueError(f"ActivationCheckpointing(policy={self.policy!r}): {self._missing(type(module).__name__)}")

    def joint(self, trace: Trace) -> None:
        if self.policy == "none":
            return
        blocks = block_operations(trace, self.blocks)
        if not blocks and (self.policy != "selective" or self.blocks):
            warn(f"ActivationCheckpointing(policy={self.policy!r}) changes nothing: {self._missing('one program')}")
            return
        if not blocks:
            blocks = dict.fromkeys(forward_operations(trace.graph), _WHOLE)
        gathers = _parameter_forms(trace.graph)
        blocks = {node: block for node, block in blocks.items() if node not in gathers and _may_run_twice(node)}
        calls = list(dict.fromkeys(blocks.values()))
        if isinstance(self.policy, str):
            _mark(blocks, dict.fromkeys(calls, self.policy))
            reasons = dict.fromkeys(calls, f"policy={self.policy!r}")
        else:
            reasons = _keep_within(trace, blocks, calls, self.policy, gathers)
        for call, reason in reasons.items():
            marked = sum(_torch_aot.is_marked_recompute(node) for node, block in blocks.items() if block == call)
            what = "computed again where the backward needs them"
            trace.decisions.append(Decision(call.name, f"{marked} operations", what, reason))

    def _missing(self, where: str) -> str:
        if self.blocks:
            return f"no module of {where} has a name that matches blocks={list(self.blocks)!r}: correct the patterns."
        return (
            f"{where} has no list of modules of one class that hold modules themselves: name the blocks with "
            "blocks=['pattern'], or choose policy='selective'."
        )


def _mark(blocks: Mapping[fx.Node, ModuleCall], policies: Mapping[ModuleCall, Policy]) -> None:
    """Tell the partitioner what to keep and what to compute again, in place of what it was told before.

    Args:
        blocks: Which call of which block an operation belongs to.
        policies: What to do with each.
    """
    kept = _ends(blocks)
    kept |= {node for node, call in blocks.items() if policies[call] == "selective" and is_expensive(node)}
    regions = {call: _FIRST_REGION + index for index, call in enumerate(policies)}
    for node in blocks:
        _torch_aot.unmark(node)
    if set(policies.values()) == {"none"}:
        return
    for node in kept:
        _torch_aot.mark_save(node)
    for node in _computed_again(blocks, kept):
        if policies[blocks[node]] != "none":
            _torch_aot.mark_recompute(node, regions[blocks[node]])


def _keep_within(
    trace: Trace,
    blocks: Mapping[fx.Node, ModuleCall],
    calls: Sequence[ModuleCall],
    budget: float,
    parameters: Collection[fx.Node],
) -> dict[ModuleCall, str]:
    """Mark as few blocks as a budget in GiB takes. Returns those that are marked, and why.

    The first blocks: when the backward computes them again, what it has kept of the later ones is free.
    """
    if has_symbolic_sizes(trace.graph):
        _mark(blocks, dict.fromkeys(calls, "block"))
        warn(
            f"ActivationCheckpointing(policy={budget!r}): all blocks are computed again in a program for batches of "
            "any size. Keep sizes equal (drop_last=True), or choose a program for each: CompileConfig(dynamic=False)."
        )
        return dict.fromkeys(calls, f"policy={budget!r}: as 'block', because batches may have any size")

    def mark(policy: Policy, count: int, rest: Policy) -> None:
        _mark(blocks, {call: policy if index < count else rest for index, call in enumerate(calls)})

    def kept(policy: Policy, count: int, rest: Policy) -> float:
        mark(policy, count, rest)
        return trace.would_keep(parameters).bytes / 2**30

    everything = kept("none", 0, "none")
    if everything <= budget:
        return {}
    products = kept("selective", len(calls), "none")
    policy, rest = ("selective", "none") if products <= budget else ("block", "selective")
    if products >= everything:
        rest = "none"
    few, over = 0, products if rest == "selective" else everything
    enough = len(calls)
    reached = products if policy == "selective" else kept("block", enough, rest)
    while enough - few > 1 and reached <= budget:  # equal blocks keep equally much, so that the first guess is near
        guess = few + math.ceil((enough - few) * (over - budget) / (over - reached))
        middle = min(max(guess, few + 1), enough - 1)
        found = kept(policy, middle, rest)
        if found <= budget:
            enough, reached = middle, found
        else:
            few, over = middle, found
    mark(policy, enough, rest)
    if reached > budget:
        warn(
            f"ActivationCheckpointing(policy={budget!r}): {reached:.3g} GiB are kept for the backward even if all "
            "blocks are computed again: choose smaller batches or a larger number."
        )
    return {
        call: f"policy={budget!r}: as {policy if index < enough else rest!r}, {reached:.3g} GiB are kept"
        for index, call in enumerate(calls)
        if index < enough or rest != "none"
    }


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


def _ends(blocks: Mapping[fx.Node, ModuleCall]) -> set[fx.Node]:
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


def _computed_again(blocks: Mapping[fx.Node, ModuleCall], kept: set[fx.Node]) -> set[fx.Node]:
    """All of a block but what is kept; parts of a tuple go with it."""
    found: set[fx.Node] = set()
    for node in blocks:
        if node.target is operator.getitem:
            if node.args[0] in found:
                found.add(node)
        elif node not in kept:
            found.add(node)
    return found
