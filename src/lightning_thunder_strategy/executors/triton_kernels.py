"""Triton kernels: rows of a cross-entropy loss, and RMSNorm. Imported only where they run.

Both compute in float32 whatever their inputs are.
"""

import contextlib
from typing import Optional

import torch
import triton
import triton.language as tl

_CLASSES_AT_ONCE = 4096
_MOST_PROGRAMS = 256  # of the backward of RMSNorm; each holds a row of the weight's gradient


@triton.jit
def _cross_entropy(
    logits, stride, target, losses, factor, classes, ignore_index, WANTED: tl.constexpr, BLOCK: tl.constexpr
):  # one program a row: the running maximum and sum of exponentials, then the gradient in place of the logits
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    wanted_class = tl.load(target + row)
    counts = wanted_class != ignore_index
    wanted_class = tl.where(counts, wanted_class, 0)
    high = float("-inf")
    total = 0.0
    for start in range(0, classes, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(logits + at, mask=at < classes, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(high, tl.max(z, 0))
        total = total * tl.exp(high - higher) + tl.sum(tl.exp(z - higher), 0)
        high = higher
    log_total = high + tl.log(total)
    known = (wanted_class >= 0) & (wanted_class < classes)  # a class that does not exist gives nan
    picked = tl.load(logits + wanted_class, mask=known, other=float("nan")).to(tl.float32)
    tl.store(losses + row, tl.where(counts, log_total - picked, 0.0))
    if WANTED:
        scale = tl.load(factor)
        for start in range(0, classes, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = tl.load(logits + at, mask=at < classes, other=0.0).to(tl.float32)
            gradient = tl.exp(z - log_total) - tl.where(at == wanted_class, 1.0, 0.0)
            gradient = tl.where(counts, gradient * scale, 0.0)
            tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=at < classes)


def cross_entropy_rows(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, factor: torch.Tensor, wanted: bool
) -> torch.Tensor:
    """The sum of the losses of some rows; the gradient of the logits, if wanted, is put in their place."""
    rows, classes = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        block = min(_CLASSES_AT_ONCE, triton.next_power_of_2(classes))
        with _on(logits):
            _cross_entropy[(rows,)](
                logits,
                logits.stride(0),
                target.contiguous(),
                losses,
                factor,
                classes,
                ignore_index,
                wanted,
                BLOCK=block,
            )
    return losses.sum()


@triton.jit
def _rms_norm(x, weight, y, scales, features, eps, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < features
    value = tl.load(x + row * features + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / features + eps)
    result = value * scale
    if HAS_WEIGHT:
        result *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * features + at, result.to(y.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _rms_norm_backward(
    gradient, x, weight, scales, grad_x, grad_weight, rows, features, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):  # n = x * scale, h = gradient * weight: grad_x = scale * (h - n * mean(h * n)), grad_weight = sum(gradient * n)
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < features
    added = tl.zeros((BLOCK,), dtype=tl.float32)
    if HAS_WEIGHT:
        factors = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        place = tl.cast(row, tl.int64) * features
        g = tl.load(gradient + place + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        n = tl.load(x + place + at, mask=inside, other=0.0).to(tl.float32) * scale
        h = g
        if HAS_WEIGHT:
            added += g * n
            h = g * factors
        result = scale * (h - n * (tl.sum(h * n, 0) / features))
        tl.store(grad_x + place + at, result.to(grad_x.dtype.element_ty), mask=inside)
    if HAS_WEIGHT:
        tl.store(grad_weight + program * features + at, added, mask=inside)


def rms_norm(x: torch.Tensor, weight: Optional[torch.Tensor], eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``x * scale * weight`` for contiguous ``x`` of ``[rows, features]``, and ``scale`` of each row in float32."""
    rows, features = x.shape
    y, scales = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(features)
        with _on(x):
            _rms_norm[(rows,)](x, weight, y, scales, features, eps, HAS_WEIGHT=weight is not None, BLOCK=block)
    return y, scales


def rms_norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: Optional[torch.Tensor], scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of ``x`` and ``weight`` (empty without one)."""
    rows, features = x.shape
    programs = min(rows, _MOST_PROGRAMS)
    grad_x = torch.empty_like(x)
    parts = torch.empty((programs if weight is not None else 0, features), dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(features)
        with _on(x):
            _rms_norm_backward[(programs,)](
                gradient, x, weight, scales, grad_x, parts, rows, features, HAS_WEIGHT=weight is not None, BLOCK=block
            )
    return grad_x, x.new_empty(0) if weight is None else parts.sum(0).to(weight.dtype)


def _on(value: torch.Tensor) -> contextlib.AbstractContextManager:
    return torch.cuda.device(value.device) if value.is_cuda else contextlib.nullcontext()
