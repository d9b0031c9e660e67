"""A process group of one process that stands for many, and names of torch for tensors without memory.

Checked on torch 2.11 and 2.13.
"""

import contextlib
import math
import mmap

import torch
import torch.distributed


def join_fake_group(size: int) -> None:
    """Become rank 0 of ``size``: collectives return at once, with arbitrary values."""
    import torch.testing._internal.distributed.fake_pg  # registers the backend

    torch.distributed.init_process_group("fake", store=torch.distributed.HashStore(), rank=0, world_size=size)


def without_values() -> contextlib.AbstractContextManager:
    """While open, new tensors have no values, and operations on them compute only shapes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def hollow_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU with the shape, strides and type of ``tensor``, in pages that take no memory until they are
    written to. Any size can be made, also on a machine with less memory."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if tensor.numel() == 0:
        return torch.empty_strided(shape, stride, dtype=tensor.dtype)
    elements = 1 + sum((size - 1) * step for size, step in zip(shape, stride))
    size = math.ceil(elements * tensor.element_size() / mmap.PAGESIZE) * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    pages = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
    return torch.empty(0, dtype=tensor.dtype).set_(pages.untyped_storage(), 0, shape, stride)  # type: ignore[call-overload]
