"""The functions of ``liger_kernels`` written in torch, so that what surrounds the kernels is tested without Triton."""

import torch
import torch.nn.functional as F


def cross_entropy_rows(logits, target, ignore_index, factor, wanted):
    wide = logits.float()
    loss = F.cross_entropy(wide, target, ignore_index=ignore_index, reduction="sum")
    if wanted:
        counts = target != ignore_index
        gradient = wide.softmax(-1) - F.one_hot(target.where(counts, 0), logits.shape[1])
        logits.copy_(gradient * counts[:, None] * factor)
    return loss


def rms_norm(x, weight, eps, rounding):
    factors = (x.float().square().mean(-1) + eps).rsqrt()
    return _normalized(x, weight, factors[:, None], rounding), factors


def _normalized(x, weight, factors, rounding):
    value = x.float() * factors
    if rounding == "normalized":
        value = value.to(x.dtype)
    return (value if weight is None else value * weight).to(x.dtype)


def rms_norm_backward(gradient, x, weight, factors, rounding):
    assert gradient.is_contiguous() and x.is_contiguous()
    h = gradient.float() if weight is None else gradient.float() * weight.float()
    n = x.float() * factors[:, None]
    grad_x = factors[:, None] * (h - n * (h * n).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), x.new_empty(0) if weight is None else (gradient * n).sum(0).to(weight.dtype)


def swiglu(gate, up):
    return F.silu(gate) * up


def swiglu_backward(gradient, gate, up):
    s = gate.float().sigmoid()
    grad_gate = gradient * up * (s + gate * s * (1 - s))
    return grad_gate.to(gate.dtype), (gradient * gate * s).to(up.dtype)


def rope(x, cos, sin, backward):
    """As Liger's kernel: of cos and sin only the left half is read."""
    half = x.shape[-1] // 2
    cos, sin = (value[:, :, None, :half] for value in (cos, sin))
    sin = -sin if backward else sin
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)
