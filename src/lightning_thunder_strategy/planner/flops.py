"""Floating-point operations of a program, by the formulas of ``torch.utils.flop_counter``."""

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import fx
from torch.utils import flop_counter
from torch.utils._pytree import tree_map_only

from lightning_thunder_strategy.compiler import _torch_compat
from lightning_thunder_strategy.compiler.emit import node_value


def node_flops(node: fx.Node) -> int:
    """Operations of one call: a multiplication and an addition are two. Pointwise work counts as none."""
    formula = _formula(node.target)
    if formula is None:
        return 0
    args, kwargs = tree_map_only(fx.Node, _with_sizes, (node.args, dict(node.kwargs)))
    return int(formula(*args, **kwargs, out_val=_with_sizes(node)))


def graph_flops(graph: fx.Graph) -> int:
    """Operations of a whole program."""
    return sum(node_flops(node) for node in graph.nodes if node.op == "call_function")


def product_dtype(node: fx.Node) -> torch.dtype:
    """The type of the elements that a product multiplies."""
    value = next(
        (v for v in map(node_value, node.all_input_nodes) if isinstance(v, torch.Tensor) and v.is_floating_point()),
        None,
    )
    return torch.float32 if value is None else value.dtype


def _formula(target: Any) -> Optional[Callable]:
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name.split("::")[1]
    if name == "_scaled_dot_product_flash_attention_for_cpu":  # what attention is traced as on a CPU
        return flop_counter.flop_registry[torch.ops.aten._scaled_dot_product_flash_attention]
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return flop_counter.flop_registry[torch.ops.aten._scaled_dot_product_flash_attention_backward]
    return flop_counter.flop_registry.get(target._overloadpacket)


def _with_sizes(node: fx.Node) -> Any:
    """A node's value; symbolic sizes have the value they had when compiled."""
    value = node_value(node)
    if isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape):
        return torch.empty([_torch_compat.size_hint(size) for size in value.shape], dtype=value.dtype, device="meta")
    return value
