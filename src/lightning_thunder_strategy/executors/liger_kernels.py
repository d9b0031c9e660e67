"""Calls of Liger's kernels that never wait for the GPU and overwrite no argument. Imported only where they run."""

import contextlib
from typing import Optional

import torch
import triton
from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel
from liger_kernel.ops.rms_norm import rms_norm_backward as _rms_norm_backward
from liger_kernel.ops.rms_norm import rms_norm_forward as _rms_norm_forward
from liger_kernel.ops.rope import rope_backward as _rope_backward
from liger_kernel.ops.rope import rope_forward as _rope_forward
from liger_kernel.ops.swiglu import swiglu_backward as _swiglu_backward
from liger_kernel.ops.swiglu import swiglu_forward as _swiglu_forward
from liger_kernel.ops.utils import calculate_settings

_MODES = {"end": "gemma", "normalized": "llama"}
_ROWS_OF_A_BLOCK = 16


def cross_entropy_rows(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, factor: torch.Tensor, wanted: bool
) -> torch.Tensor:
    """The sum of the losses of some rows; the gradient of the logits, if wanted, is put in their place.

    Liger divides by a number of rows that it would have to fetch from the GPU, so sums are asked of it and scaled here.
    It reads and writes where a target points: one that is no class becomes an ignored one, and makes the loss nan.
    """
    rows, classes = logits.shape
    losses = torch.zeros(rows, dtype=torch.float32, device=logits.device)
    if not rows:
        return losses.sum()
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    target = torch.where(wrong, ignore_index, target)
    block = min(MAX_FUSED_SIZE, triton.next_power_of_2(classes))
    with _on(logits):
        liger_cross_entropy_kernel[(rows,)](
            X_ptr=logits, X_stride=logits.stride(0), Y_ptr=target, Y_stride=target.stride(0), weight_ptr=None,
            loss_ptr=losses, z_loss_ptr=None, loss_stride=1, token_accuracy_ptr=None, token_accuracy_stride=0,
            predicted_tokens_ptr=None, predicted_tokens_stride=0, n_cols=classes, n_non_ignore=1,
            sum_non_ignore_weight=1, weight_sum=0.0, ignore_index=ignore_index, lse_square_scale=0.0,
            label_smoothing=0.0, reduction="sum", softcap=None, RETURN_Z_LOSS=False, RETURN_TOKEN_ACCURACY=False,
            RETURN_PREDICTED_TOKENS=False, BLOCK_SIZE=block, HAS_WEIGHT=False, HAS_SOFTCAPPING=False,
            HAS_GRADIENTS=wanted, num_warps=32,
        )  # fmt: skip
    if wanted:
        logits.mul_(factor)
    return losses.masked_fill_(wrong, float("nan")).sum()


def rms_norm(
    x: torch.Tensor, weight: Optional[torch.Tensor], eps: float, rounding: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalized rows of contiguous ``x`` of ``[rows, features]``, and the factor of each row in float32."""
    if not x.shape[0]:
        return torch.empty_like(x), x.new_empty(0, dtype=torch.float32)
    y, _, factors, *_ = _rms_norm_forward(x, weight, eps, 0.0, _MODES[rounding], _row_mode(x))
    return y, factors


def rms_norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: Optional[torch.Tensor], factors: torch.Tensor, rounding: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of ``x`` and ``weight`` (empty without one)."""
    if not x.shape[0]:
        return torch.empty_like(x), x.new_empty(0) if weight is None else torch.zeros_like(weight)
    block, warps = calculate_settings(x.shape[1])
    mode = {"llama": 0, "gemma": 1}[_MODES[rounding]]
    grad_x, grad_weight = _rms_norm_backward(gradient, x, weight, factors, 0.0, mode, block, warps, False, _row_mode(x))
    return grad_x, x.new_empty(0) if weight is None else grad_weight


def _row_mode(x: torch.Tensor) -> Optional[bool]:
    """Liger's kernel of several rows at once reads what it has not loaded if the last block is not full."""
    return True if x.shape[0] % _ROWS_OF_A_BLOCK else None


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of contiguous ``[rows, features]``."""
    return _swiglu_forward(gate, up)[2] if gate.shape[0] else torch.empty_like(gate)


def swiglu_backward(gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients. Liger puts them in the place of its arguments, so it gets copies: others may read those again."""
    gate, up = gate.clone(), up.clone()
    return _swiglu_backward(gate, up, gradient) if gate.shape[0] else (gate, up)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool) -> torch.Tensor:
    """The rotation, or its inverse, of a copy: Liger works in place.

    Args:
        x: ``[batch, tokens, heads, features]``, contiguous.
        cos: ``[1 or batch, tokens, features]``.
        sin: As ``cos``.
        backward: Whether to rotate back.
    """
    result = x.clone()
    if result.numel():
        wide = torch.promote_types(x.dtype, cos.dtype)
        unused = torch.zeros_like(x[:, :, :1])  # Liger rotates queries and keys together
        function = _rope_backward if backward else _rope_forward
        with _on(x):
            tables = (value.to(wide).contiguous() for value in (cos, sin))  # its backward takes no others
            function(result.transpose(1, 2), unused.transpose(1, 2), *tables)
    return result


def _on(value: torch.Tensor) -> contextlib.AbstractContextManager:
    return torch.cuda.device(value.device) if value.is_cuda else contextlib.nullcontext()
