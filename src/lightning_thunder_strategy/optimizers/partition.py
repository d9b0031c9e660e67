"""Which tensors of a param group one kernel can update together, and why torch must take the others."""

from collections.abc import Sequence
from typing import Any, Literal, Optional

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_thunder_strategy.executors.packages import gpu_problem, import_problem
from lightning_thunder_strategy.executors.triton import interpreted
from lightning_thunder_strategy.optimizers.launch import aligned

Implementation = Literal["triton", "torch fused"]

_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PLAIN = (Tensor, nn.Parameter)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def implementation_for(
    device: torch.device, types: Sequence[torch.dtype], fused_types: Sequence[torch.dtype]
) -> tuple[Optional[Implementation], str]:
    """What updates parameters on ``device``; or ``None``, and why nothing does.

    Args:
        device: Theirs.
        types: Of parameter, gradient and states.
        fused_types: Those of which torch's fused kernel gives right values on a CPU.
    """
    if device.type == "cpu" and not interpreted():
        if len(set(types)) > 1:
            return None, "their gradients or states have another type than they have"
        if types[0] not in fused_types:
            return None, f"they are {types[0]}, for which torch's fused kernel on a CPU is not exact"
        return "torch fused", ""
    if device.type not in ("cpu", "cuda"):
        return None, f"they are on {device}, and kernels run on cuda and cpu"
    problem = import_problem("triton") or (None if interpreted() else gpu_problem((8, 0)))
    if problem is not None:
        return None, f"Triton cannot be used: {problem[0].lower()}{problem[1:].rstrip('.')}"
    if interpreted() and device.type != "cpu":
        return None, f"they are on {device}, and Triton's interpreter runs on cpu"
    return "triton", ""


def rows_of_one_kind(
    columns: Sequence[Sequence[Tensor]], held: Sequence[Sequence[Tensor]], marks: Sequence[Any]
) -> tuple[dict[Any, list[int]], dict[str, list[int]]]:
    """Sort the parameters of a group into those that one launch takes together, and those that torch must take.

    Args:
        columns: Parameters, gradients and each kind of state, as equally long lists.
        held: What this rank holds of them.
        marks: What else those of one launch have in common, as such a list; or nothing.

    Returns:
        Indices by device, types, alignment and mark, and indices by the reason why torch takes them.
    """
    taken: dict[Any, list[int]] = {}
    left: dict[str, list[int]] = {}
    for index, tensors in enumerate(zip(*held)):
        problem = _problem(tensors)
        if problem is None and isinstance(columns[0][index], DTensor):
            problem = _spread_otherwise([column[index] for column in columns])
        if problem is not None:
            left.setdefault(problem, []).append(index)
            continue
        kind = (tensors[0].device, tuple([t.dtype for t in tensors]), aligned(tensors), marks[index] if marks else None)
        taken.setdefault(kind, []).append(index)
    return taken, left


def laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient, in memory in the parameter's order."""
    if _same_order(gradient, parameter):
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def _problem(tensors: Sequence[Tensor]) -> Optional[str]:
    """Why torch must take a parameter with its gradient and states. Runs for each parameter in each step."""
    parameter, gradient, *states = tensors
    device, shape = parameter.device, parameter.shape
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return f"there are tensors of the type {type(tensor).__name__}"
        if tensor.layout is not torch.strided:
            return "their gradients are sparse"
        if tensor.dtype not in _TYPES:
            return f"their type is {parameter.dtype}"
        if tensor.device != device or tensor.shape != shape:
            return "they and their gradients or states differ in shape or device"
    for state in states:
        if state.dtype is not states[0].dtype:
            return "their states differ in type"
        if not _same_order(state, parameter):
            return "their memory is in another order than that of their states"
    return None if parameter.is_contiguous() or _dense(parameter) else "their memory has gaps"


def _spread_otherwise(row: Sequence[Tensor]) -> Optional[str]:
    placements = {tensor.placements if isinstance(tensor, DTensor) else None for tensor in row}
    if len(placements) == 1:
        return None
    return "they and their gradients or states are spread over the ranks in different ways"


def _same_order(tensor: Tensor, other: Tensor) -> bool:
    """Whether the elements of two tensors of one shape are in memory in one order, at equal distances."""
    strides = tensor.stride(), other.stride()
    if strides[0] == strides[1]:
        return True
    return all(one == another or size == 1 for one, another, size in zip(*strides, other.shape))


def _dense(tensor: Tensor) -> bool:
    """Whether each element has a place of its own in memory, without gaps between them."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True
