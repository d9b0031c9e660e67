"""A random Hadamard transform: it spreads outliers over 16 numbers and leaves products as they are."""

import torch
from torch import Tensor

SIZE = 16
_SIGNS = 0b0110_1001_1100_0101  # drawn once: https://arxiv.org/abs/2509.25149 finds one vector for all to be enough


def hadamard(device: torch.device) -> Tensor:
    """``[16, 16]`` float32, orthogonal: random signs times Sylvester's matrix, over four."""
    index = torch.arange(SIZE, device=device)
    parity = index[:, None] & index[None, :]
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    signs = 1 - 2 * ((_SIGNS >> index) & 1)
    return (signs[:, None] * (1 - 2 * parity)).to(torch.float32) / 4


def transform(x: Tensor) -> Tensor:
    """Each 16 numbers along the last dimension times the matrix, in float32.

    ``transform(a) @ transform(b).T`` is ``a @ b.T``.

    Args:
        x: ``[rows, k]``; ``k`` a multiple of 16.
    """
    return (x.to(torch.float32).unflatten(1, (-1, SIZE)) @ hadamard(x.device)).flatten(1, 2)
