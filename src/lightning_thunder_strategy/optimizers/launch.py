"""One launch of a kernel over a list of tensors: the tables that it reads."""

import contextlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

BLOCK = 2048  # elements that one program of the grid updates


def launch(name: str, columns: Sequence[Sequence[Tensor]], factors: Tensor, **constants: Any) -> None:
    """Run the kernel ``name`` once for many tensors.

    Args:
        name: Of a kernel in ``kernels.py``.
        columns: Parameters, gradients and each kind of state, as equally long lists. The tensors at one index have the
            same number of elements, in memory without gaps and in the same order; those of one list one dtype, and
            all states the same.
        factors: ``[tensors, factors]`` of float64, what the kernel calls them; on the CPU or the tensors' device.
        constants: Switches of the kernel.
    """
    from lightning_thunder_strategy.optimizers import kernels

    device = columns[0][0].device
    sizes = tuple(tensor.numel() for tensor in columns[0])
    counts = [-(-size // BLOCK) for size in sizes]
    if not sum(counts):
        return
    rows = zip(sizes, (0, *accumulate(counts)), *([tensor.data_ptr() for tensor in column] for column in columns))
    addresses = _moved(torch.tensor(list(rows), dtype=torch.int64), device)
    kinds = [kernels.TYPES[column[0].dtype] for column in columns]
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        getattr(kernels, name)[(sum(counts),)](
            _tensor_of_block(tuple(counts), device),
            addresses,
            _moved(factors, device),
            ADDRESSES=addresses.shape[1],
            FACTORS=factors.shape[1],
            PARAMETER=kinds[0],
            GRADIENT=kinds[1],
            STATE=kinds[-1],
            COMPUTE=kernels.TYPES[torch.float64 if columns[0][0].dtype == torch.float64 else torch.float32],
            ALIGNED=aligned([column[index] for column in columns for index in range(len(sizes))]),
            BLOCK=BLOCK,
            num_warps=kernels.WARPS,
            **constants,
        )


def aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether all of them can be read 16 bytes at a time."""
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    return addresses % 16 == 0


@lru_cache(maxsize=32)
def _tensor_of_block(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Which tensor each program of the grid updates: 4 bytes for ``BLOCK`` elements, made once."""
    return torch.arange(len(counts), dtype=torch.int32).repeat_interleave(torch.tensor(counts)).to(device)


def _moved(table: Tensor, device: torch.device) -> Tensor:
    """``table`` on ``device``, without waiting for what runs there."""
    if device.type == "cuda" and not table.is_cuda:
        return table.pin_memory().to(device, non_blocking=True)
    return table.to(device)
