"""The Triton kernels as operators of ``torch.library``. Triton is imported when one of them runs."""

from typing import Any, Optional

import torch

from lightning_thunder_strategy.executors.linear_cross_entropy import arguments, define, refuse_second_derivative


def _rows(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, factor: torch.Tensor, wanted: bool
) -> torch.Tensor:
    from lightning_thunder_strategy.executors.triton_kernels import cross_entropy_rows

    return cross_entropy_rows(logits, target, ignore_index, factor, wanted)


_loss = define("triton_linear_cross_entropy", _rows)


def triton_linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], index: Any, target: torch.Tensor,
    ignore_index: int, reduction: str, logits: torch.dtype, loss: torch.dtype, wanted: bool, chunk_rows: int,
) -> torch.Tensor:  # fmt: skip
    """As :func:`~lightning_thunder_strategy.executors.chunked_loss.chunked_linear_cross_entropy`."""
    x, weight, bias, target = arguments(x, weight, bias, index, target, logits, wanted)
    needs = [wanted and value is not None and value.requires_grad for value in (x, weight, bias)]
    return _loss(x, weight, bias, target, ignore_index, reduction == "mean", chunk_rows, needs)[0].to(loss)


@torch.library.custom_op("lts::triton_rms_norm", mutates_args=())
def _norm(x: torch.Tensor, weight: Optional[torch.Tensor], eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    from lightning_thunder_strategy.executors.triton_kernels import rms_norm

    return rms_norm(x, weight, eps)


@_norm.register_fake
def _(x, weight, eps):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), x.new_empty(x.shape[:1], dtype=torch.float32)


@torch.library.custom_op("lts::triton_rms_norm_backward", mutates_args=())
def _norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: Optional[torch.Tensor], scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    from lightning_thunder_strategy.executors.triton_kernels import rms_norm_backward

    return rms_norm_backward(gradient, x, weight, scales)


@_norm_backward.register_fake
def _(gradient, x, weight, scales):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), x.new_empty(0) if weight is None else torch.empty_like(weight)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])


def _backward(ctx: Any, gradient: torch.Tensor, unused: torch.Tensor) -> tuple:
    refuse_second_derivative("triton_rms_norm")
    x, weight, scales = ctx.saved_tensors
    grad_x, grad_weight = _norm_backward(gradient.contiguous(), x, weight, scales)
    return grad_x, None if weight is None else grad_weight, None


_norm.register_autograd(_backward, setup_context=_setup)


def triton_rms_norm(x: torch.Tensor, weight: Optional[torch.Tensor], eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, computed in float32 and rounded to the type of ``x`` at the end."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return _norm(rows, None if weight is None else weight.contiguous(), eps)[0].view(x.shape)
