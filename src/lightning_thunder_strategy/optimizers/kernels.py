"""Triton kernels that take one step of Adam or SGD for many tensors in one launch. Imported only where they run.

A program of the grid updates ``BLOCK`` elements of one tensor. Each value is read once and written once; arithmetic is
in float32, or in float64 for float64 parameters, as in torch's fused kernels.
"""

import torch
import triton
import triton.language as tl

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}
WARPS = 4


@triton.jit
def _values(row, column: tl.constexpr, start, TYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    pointers = tl.load(row + column).to(tl.pointer_type(TYPE)) + start + tl.arange(0, BLOCK)
    if ALIGNED:  # an address that was read from memory says nothing of it, and without it loads are not of 16 bytes
        pointers = tl.multiple_of(pointers, (16,))
    return pointers


@triton.jit
def _load(pointers, inside, MASKED: tl.constexpr, COMPUTE: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=inside, other=0.0).to(COMPUTE)
    else:
        return tl.load(pointers).to(COMPUTE)


@triton.jit
def _store(pointers, value, inside, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointers, value.to(pointers.dtype.element_ty), mask=inside)
    else:
        tl.store(pointers, value.to(pointers.dtype.element_ty))


@triton.jit
def _adam_block(
    row, factors, start, inside, MASKED: tl.constexpr, AMSGRAD: tl.constexpr, PARAMETER: tl.constexpr,
    GRADIENT: tl.constexpr, STATE: tl.constexpr, COMPUTE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sign = tl.load(factors).to(COMPUTE)
    l2 = tl.load(factors + 1).to(COMPUTE)
    decay = tl.load(factors + 2).to(COMPUTE)
    first_weight = tl.load(factors + 3).to(COMPUTE)  # 1 - beta1
    beta2 = tl.load(factors + 4).to(COMPUTE)
    second_weight = tl.load(factors + 5).to(COMPUTE)  # 1 - beta2
    eps = tl.load(factors + 6).to(COMPUTE)
    rate = tl.load(factors + 7).to(COMPUTE)  # lr / (1 - beta1 ** step)
    root = tl.load(factors + 8).to(COMPUTE)  # sqrt(1 - beta2 ** step)
    p_at = _values(row, 2, start, PARAMETER, ALIGNED, BLOCK)
    m_at = _values(row, 4, start, STATE, ALIGNED, BLOCK)
    v_at = _values(row, 5, start, STATE, ALIGNED, BLOCK)
    p = _load(p_at, inside, MASKED, COMPUTE)
    g = _load(_values(row, 3, start, GRADIENT, ALIGNED, BLOCK), inside, MASKED, COMPUTE)
    m = _load(m_at, inside, MASKED, COMPUTE)
    v = _load(v_at, inside, MASKED, COMPUTE)
    g = sign * g + l2 * p
    p *= decay
    m += first_weight * (g - m)
    v = beta2 * v + second_weight * g * g
    _store(m_at, m, inside, MASKED)
    _store(v_at, v, inside, MASKED)
    if AMSGRAD:
        highest_at = _values(row, 6, start, STATE, ALIGNED, BLOCK)
        v = tl.maximum(_load(highest_at, inside, MASKED, COMPUTE), v)
        _store(highest_at, v, inside, MASKED)
    _store(p_at, p - rate * (m / (tl.sqrt(v) / root + eps)), inside, MASKED)


@triton.jit
def adam(
    tensor_of_block, addresses, factors, ADDRESSES: tl.constexpr, FACTORS: tl.constexpr, AMSGRAD: tl.constexpr,
    PARAMETER: tl.constexpr, GRADIENT: tl.constexpr, STATE: tl.constexpr, COMPUTE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tensor = tl.load(tensor_of_block + tl.program_id(0))
    row = addresses + tensor * ADDRESSES
    factors += tensor * FACTORS
    start = (tl.program_id(0) - tl.load(row + 1)) * BLOCK
    size = tl.load(row)
    inside = start + tl.arange(0, BLOCK) < size
    if start + BLOCK <= size:  # a mask of unknown size would make loads narrow
        _adam_block(row, factors, start, inside, False, AMSGRAD, PARAMETER, GRADIENT, STATE, COMPUTE, ALIGNED, BLOCK)
    else:
        _adam_block(row, factors, start, inside, True, AMSGRAD, PARAMETER, GRADIENT, STATE, COMPUTE, ALIGNED, BLOCK)


@triton.jit
def _sgd_block(
    row, factors, start, inside, MASKED: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr,
    PARAMETER: tl.constexpr, GRADIENT: tl.constexpr, STATE: tl.constexpr, COMPUTE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sign = tl.load(factors).to(COMPUTE)
    l2 = tl.load(factors + 1).to(COMPUTE)
    rate = tl.load(factors + 2).to(COMPUTE)
    p_at = _values(row, 2, start, PARAMETER, ALIGNED, BLOCK)
    p = _load(p_at, inside, MASKED, COMPUTE)
    g = _load(_values(row, 3, start, GRADIENT, ALIGNED, BLOCK), inside, MASKED, COMPUTE)
    g = sign * g + l2 * p
    if MOMENTUM:
        keep = tl.load(factors + 3).to(COMPUTE)  # 0 at the first step
        add = tl.load(factors + 4).to(COMPUTE)  # 1 - dampening; 1 at the first step
        buffer_at = _values(row, 4, start, STATE, ALIGNED, BLOCK)
        buffer = keep * _load(buffer_at, inside, MASKED, COMPUTE) + add * g
        _store(buffer_at, buffer, inside, MASKED)
        if NESTEROV:
            g += tl.load(factors + 5).to(COMPUTE) * buffer  # momentum
        else:
            g = buffer
    _store(p_at, p - rate * g, inside, MASKED)


@triton.jit
def sgd(
    tensor_of_block, addresses, factors, ADDRESSES: tl.constexpr, FACTORS: tl.constexpr, MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr, PARAMETER: tl.constexpr, GRADIENT: tl.constexpr, STATE: tl.constexpr,
    COMPUTE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tensor = tl.load(tensor_of_block + tl.program_id(0))
    row = addresses + tensor * ADDRESSES
    factors += tensor * FACTORS
    start = (tl.program_id(0) - tl.load(row + 1)) * BLOCK
    size = tl.load(row)
    inside = start + tl.arange(0, BLOCK) < size
    if start + BLOCK <= size:
        _sgd_block(
            row, factors, start, inside, False, MOMENTUM, NESTEROV, PARAMETER, GRADIENT, STATE, COMPUTE, ALIGNED, BLOCK
        )
    else:
        _sgd_block(
            row, factors, start, inside, True, MOMENTUM, NESTEROV, PARAMETER, GRADIENT, STATE, COMPUTE, ALIGNED, BLOCK
        )
