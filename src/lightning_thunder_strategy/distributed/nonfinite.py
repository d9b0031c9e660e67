"""Stops all ranks before an optimizer takes gradients that are not finite."""

from collections.abc import Mapping
from typing import Optional

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer


class NonfiniteGradientsError(RuntimeError):
    """Gradients have infinite values or NaN. No rank has taken the optimizer step."""


def check_gradients(optimizer: Optimizer, names: Mapping[nn.Parameter, str], mesh: Optional[DeviceMesh]) -> None:
    """Raise on every rank if a gradient that the optimizer is about to take is not finite on some rank.

    Reads one number from the device.

    Args:
        optimizer: The optimizer.
        names: Of its parameters.
        mesh: The ranks, all of which call this; ``None`` for one process.

    Raises:
        NonfiniteGradientsError: Naming the parameters.
    """
    gradients = {p: _local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    held = [gradient for gradient in gradients.values() if gradient.numel() > 0]
    device = held[0].device if held else torch.device(mesh.device_type if mesh is not None else "cpu")
    bad = torch.zeros((), device=device)
    if held:
        bad = (~get_total_norm(held, norm_type=float("inf")).isfinite()).to(device, torch.float32)
    for group in mesh.get_all_groups() if mesh is not None else ():
        torch.distributed.all_reduce(bad, torch.distributed.ReduceOp.MAX, group=group)
    if not bad.item():
        return
    found = [names.get(p, "?") for p, gradient in gradients.items() if not bool(gradient.isfinite().all())]
    if mesh is not None:
        everywhere: list[list[str]] = [[] for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather_object(everywhere, found)
        found = list(dict.fromkeys(name for one in everywhere for name in one))
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    raise NonfiniteGradientsError(
        f"The gradients of {', '.join(found[:5])}{more} are not finite, and nonfinite_gradients='raise': no rank has "
        "taken this optimizer step. Look for a loss that is not finite, lower the learning rate, or clip gradients."
    )


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
