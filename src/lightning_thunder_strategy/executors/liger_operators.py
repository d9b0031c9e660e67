"""Liger's kernels as operators of ``torch.library``, with backwards. Liger is imported when one of them runs."""

from typing import Any, Optional

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_thunder_strategy.executors.linear_cross_entropy import (
    arguments,
    count_and_factor,
    define,
    refuse_second_derivative,
)

_equal_halves: dict[tuple, tuple[StorageWeakRef, bool]] = {}
_MOST_REMEMBERED = 256


def _rows(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, factor: torch.Tensor, wanted: bool
) -> torch.Tensor:
    from lightning_thunder_strategy.executors.liger_kernels import cross_entropy_rows

    return cross_entropy_rows(logits, target, ignore_index, factor, wanted)


_linear_loss = define("liger_linear_cross_entropy", _rows)


def liger_linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], index: Any, target: torch.Tensor,
    ignore_index: int, reduction: str, logits: torch.dtype, loss: torch.dtype, wanted: bool, chunk_rows: int,
) -> torch.Tensor:  # fmt: skip
    """As :func:`~lightning_thunder_strategy.executors.chunked_loss.chunked_linear_cross_entropy`."""
    x, weight, bias, target = arguments(x, weight, bias, index, target, logits, wanted)
    needs = [wanted and value is not None and value.requires_grad for value in (x, weight, bias)]
    return _linear_loss(x, weight, bias, target, ignore_index, reduction == "mean", chunk_rows, needs)[0].to(loss)


@torch.library.custom_op("lts::liger_cross_entropy", mutates_args=())
def _loss(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, mean: bool, wanted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    gradient = logits.clone(memory_format=torch.contiguous_format)  # what is given must stay as it is
    count, factor = count_and_factor(target, ignore_index, mean, torch.float32)
    loss = _rows(gradient, target, ignore_index, factor, wanted)
    return loss / count if mean else loss, gradient if wanted else logits.new_empty(0)


@_loss.register_fake
def _(logits, target, ignore_index, mean, wanted):  # type: ignore[no-untyped-def]
    torch._check(logits.shape[0] == target.shape[0], lambda: f"{logits.shape[0]} rows and {target.shape[0]} targets")
    return logits.new_empty((), dtype=torch.float32), logits.new_empty(logits.shape if wanted else (0,))


def _setup_loss(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(output[1])


def _loss_backward(ctx: Any, gradient: torch.Tensor, unused: torch.Tensor) -> tuple:
    refuse_second_derivative("liger_cross_entropy")
    (saved,) = ctx.saved_tensors
    return (saved * gradient).to(saved.dtype), None, None, None, None


_loss.register_autograd(_loss_backward, setup_context=_setup_loss)


def liger_cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, reduction: str, loss: torch.dtype, wanted: bool
) -> torch.Tensor:
    """``F.cross_entropy`` of ``[rows, classes]``, with the sum in float32; ``loss`` is the type of the result."""
    logits = logits if wanted else logits.detach()
    wanted = wanted and logits.requires_grad
    return _loss(logits, target, ignore_index, reduction == "mean", wanted)[0].to(loss)


@torch.library.custom_op("lts::liger_rms_norm", mutates_args=())
def _norm(
    x: torch.Tensor, weight: Optional[torch.Tensor], eps: float, rounding: str
) -> tuple[torch.Tensor, torch.Tensor]:
    from lightning_thunder_strategy.executors.liger_kernels import rms_norm

    return rms_norm(x, weight, eps, rounding)


@_norm.register_fake
def _(x, weight, eps, rounding):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), x.new_empty(x.shape[:1], dtype=torch.float32)


@torch.library.custom_op("lts::liger_rms_norm_backward", mutates_args=())
def _norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: Optional[torch.Tensor], factors: torch.Tensor, rounding: str
) -> tuple[torch.Tensor, torch.Tensor]:
    from lightning_thunder_strategy.executors.liger_kernels import rms_norm_backward

    return rms_norm_backward(gradient, x, weight, factors, rounding)


@_norm_backward.register_fake
def _(gradient, x, weight, factors, rounding):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), x.new_empty(0) if weight is None else torch.empty_like(weight)


def _setup_norm(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.rounding = inputs[3]
    ctx.save_for_backward(*inputs[:2], output[1])


def _backward_of_norm(ctx: Any, gradient: torch.Tensor, unused: torch.Tensor) -> tuple:
    refuse_second_derivative("liger_rms_norm")
    x, weight, factors = ctx.saved_tensors
    grad_x, grad_weight = _norm_backward(gradient.contiguous(), x, weight, factors, ctx.rounding)
    return grad_x, None if weight is None else grad_weight, None, None


_norm.register_autograd(_backward_of_norm, setup_context=_setup_norm)


def liger_rms_norm(x: torch.Tensor, weight: Optional[torch.Tensor], eps: float, rounding: str) -> torch.Tensor:
    """RMSNorm over the last dimension; see :mod:`~lightning_thunder_strategy.executors.rms_norm_pattern`."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return _norm(rows, None if weight is None else weight.contiguous(), eps, rounding)[0].view(x.shape)


@torch.library.custom_op("lts::liger_swiglu", mutates_args=())
def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    from lightning_thunder_strategy.executors.liger_kernels import swiglu

    return swiglu(gate, up)


@_swiglu.register_fake
def _(gate, up):  # type: ignore[no-untyped-def]
    return torch.empty_like(gate)


@torch.library.custom_op("lts::liger_swiglu_backward", mutates_args=())
def _swiglu_backward(gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from lightning_thunder_strategy.executors.liger_kernels import swiglu_backward

    return swiglu_backward(gradient, gate, up)


@_swiglu_backward.register_fake
def _(gradient, gate, up):  # type: ignore[no-untyped-def]
    return torch.empty_like(gate), torch.empty_like(up)


def _setup_swiglu(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_of_swiglu(ctx: Any, gradient: torch.Tensor) -> tuple:
    refuse_second_derivative("liger_swiglu")
    return _swiglu_backward(gradient.contiguous(), *ctx.saved_tensors)


_swiglu.register_autograd(_backward_of_swiglu, setup_context=_setup_swiglu)


def liger_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``F.silu(gate) * up``."""
    rows = [value.reshape(-1, value.shape[-1]).contiguous() for value in (gate, up)]
    return _swiglu(*rows).view(gate.shape)


@torch.library.custom_op("lts::liger_rope", mutates_args=())
def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, known: bool, backward: bool) -> torch.Tensor:
    if not known and not all(_halves_are_equal(value) for value in (cos, sin)):
        return _rotated(x, cos, sin, backward)
    from lightning_thunder_strategy.executors.liger_kernels import rope

    return rope(x, cos, sin, backward)


@_rope.register_fake
def _(x, cos, sin, known, backward):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)


def _setup_rope(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    ctx.known, ctx.backward = inputs[3:]
    ctx.save_for_backward(*inputs[1:3])


def _backward_of_rope(ctx: Any, gradient: torch.Tensor) -> tuple:
    refuse_second_derivative("liger_rope")
    return _rope(gradient.contiguous(), *ctx.saved_tensors, ctx.known, not ctx.backward), None, None, None, None


_rope.register_autograd(_backward_of_rope, setup_context=_setup_rope)


def liger_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, known: bool, result: torch.dtype) -> torch.Tensor:
    """``x * cos + rotate_half(x) * sin``; see :mod:`~lightning_thunder_strategy.executors.rope_pattern`."""
    rows = x.to(result).transpose(1, 2).contiguous()
    turned = _rope(rows, cos.squeeze(1), sin.squeeze(1), known, False).transpose(1, 2)
    return turned.contiguous() if x.is_contiguous() else turned  # as the sum that it stands for


def _halves_are_equal(value: torch.Tensor) -> bool:
    """Looked up after the first time, so that steps do not wait for the GPU; unknown while CUDA graphs are captured."""
    storage = StorageWeakRef(value.untyped_storage())  # no other storage gets its address while the entry is there
    place = (storage.cdata, value.storage_offset(), None if value.is_inference() else value._version)
    key = (*place, tuple(value.shape), value.stride(), value.dtype)
    if key not in _equal_halves:
        if value.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        if len(_equal_halves) >= _MOST_REMEMBERED:
            _equal_halves.clear()
        left, right = value.chunk(2, -1)
        _equal_halves[key] = (storage, torch.equal(left, right))
    return _equal_halves[key][1]


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool) -> torch.Tensor:
    """The rotation, or the gradient of ``x``, for any ``cos`` and ``sin``."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    left, right = (x * sin).chunk(2, -1) if backward else x.chunk(2, -1)
    if backward:
        result = x * cos + torch.cat((right, -left), -1)
    else:
        result = x * cos + torch.cat((-right, left), -1) * sin
    return result.to(x.dtype).contiguous()
