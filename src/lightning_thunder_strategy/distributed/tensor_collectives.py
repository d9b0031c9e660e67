"""What tensor-parallel layers do with activations before and after they compute.

Each is a function of one tensor whose derivative is another of them, so that programs see plain collectives. Dynamo
puts them into a program as they are, AOTAutograd reads what they do. See the operators f and g of
https://arxiv.org/abs/1909.08053, and https://arxiv.org/abs/2205.05198 for those that split the sequence.
"""

from typing import Any

import torch
from torch import Tensor

_ops = torch.ops._c10d_functional


def _all_reduce(x: Tensor, group: str) -> Tensor:
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group))


def _all_gather(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    joined = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), size, group))
    return joined if dim == 0 else torch.cat(joined.chunk(size, 0), dim)


def _reduce_scatter(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    rows = x.contiguous() if dim == 0 else torch.cat(x.chunk(size, dim), 0)
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(rows, "sum", size, group))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Sum.apply(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Copy.apply(gradient, ctx.group), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, rank: int, group: str) -> Tensor:
        ctx.rest = dim, size, rank, group
        return _all_gather(x, dim, size, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        return _Part.apply(gradient, *ctx.rest), None, None, None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, rank: int, group: str) -> Tensor:
        ctx.rest = dim, size, rank, group
        return x.chunk(size, dim)[rank].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        return _Join.apply(gradient, *ctx.rest), None, None, None, None


class _JoinParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, group: str) -> Tensor:
        ctx.rest = dim, size, group
        return _all_gather(x, dim, size, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        return _SumParts.apply(gradient, *ctx.rest), None, None, None


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, group: str) -> Tensor:
        ctx.rest = dim, size, group
        return _reduce_scatter(x, dim, size, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        return _JoinParts.apply(gradient, *ctx.rest), None, None, None


@torch.compiler.allow_in_graph
def copy_to_ranks(x: Tensor, group: str) -> Tensor:
    """``x``, equal on all ranks, from which each computes something else: its gradient is the sum over the ranks."""
    return _Copy.apply(x, group)


@torch.compiler.allow_in_graph
def sum_over_ranks(x: Tensor, group: str) -> Tensor:
    """The sum of the ranks' ``x``, from which all ranks compute the same."""
    return _Sum.apply(x, group)


def largest_of_ranks(x: Tensor, group: str) -> Tensor:
    """The largest of the ranks' ``x``, element by element, as a constant."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "max", group))


@torch.compiler.allow_in_graph
def join_parts(x: Tensor, dim: int, size: int, rank: int, group: str) -> Tensor:
    """The ranks' ``x`` one after the other along ``dim``, from which all ranks compute the same."""
    return _Join.apply(x, dim % x.ndim, size, rank, group)


@torch.compiler.allow_in_graph
def join_logits(x: Tensor, dim: int, size: int, rank: int, group: str) -> Tensor:
    """:func:`join_parts`, under a name that the pass for losses knows."""
    return _Join.apply(x, dim % x.ndim, size, rank, group)


@torch.compiler.allow_in_graph
def own_part(x: Tensor, dim: int, size: int, rank: int, group: str) -> Tensor:
    """This rank's part of ``x``, which is equal on all ranks."""
    return _Part.apply(x, dim % x.ndim, size, rank, group)


@torch.compiler.allow_in_graph
def join_to_ranks(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    """The ranks' ``x`` one after the other along ``dim``, from which each computes something else."""
    return _JoinParts.apply(x, dim % x.ndim, size, group)


@torch.compiler.allow_in_graph
def own_part_of_sum(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    """This rank's part of the sum of the ranks' ``x``."""
    return _SumParts.apply(x, dim % x.ndim, size, group)
