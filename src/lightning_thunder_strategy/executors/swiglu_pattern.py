"""Finds ``F.silu(gate) * up``, in either order."""

from typing import Union

import torch.nn.functional as F
from torch import fx

from lightning_thunder_strategy.compiler.pattern_parts import is_op, obstacle, operands, tensor_of
from lightning_thunder_strategy.executors.registered import is_call_of


def is_swiglu(node: fx.Node) -> bool:
    """Whether ``node`` multiplies a tensor with the SiLU of one."""
    return is_op(node, "mul") and any(
        isinstance(silu, fx.Node) and is_call_of(silu, F.silu) and tensor_of(up) is not None
        for silu, up in operands(node)
    )


def find_swiglu(node: fx.Node) -> Union[tuple[fx.Node, fx.Node, tuple[fx.Node, ...]], str]:
    """Gate, the other factor, and the operation to remove, or why a kernel cannot take it.

    Args:
        node: One that :func:`is_swiglu` takes.
    """
    reason = ""
    for silu, up in operands(node):
        if not isinstance(silu, fx.Node) or not is_call_of(silu, F.silu) or tensor_of(up) is None:
            continue
        reason = _problem(silu, up) or obstacle(node, [silu]) or ""
        if not reason:
            return silu.args[0], up, (silu,)  # type: ignore[return-value]
    return reason


def _problem(silu: fx.Node, up: fx.Node) -> Union[str, None]:
    if len(silu.args) != 1 or silu.kwargs.get("inplace", False):
        return "its SiLU works in place"
    if up is silu:
        return "it multiplies a SiLU with itself"
    a, b = tensor_of(silu.args[0]), tensor_of(up)
    if a is None or b is None:
        return "the types of its arguments are not known"
    if a.dtype != b.dtype:
        return f"it mixes types: {a.dtype}, {b.dtype}"
    if a.dim() == 0 or list(map(str, a.shape)) != list(map(str, b.shape)):
        return f"its factors are {list(a.shape)} and {list(b.shape)}"
    if not isinstance(a.shape[-1], int) or a.shape[-1] == 0:
        return f"its rows have {a.shape[-1]} features, and the kernel takes 1 or more, known in advance"
    return None
