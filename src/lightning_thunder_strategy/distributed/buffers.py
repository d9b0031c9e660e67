"""Keeps buffers equal on all ranks."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


def broadcast_buffers(module: nn.Module, mesh: DeviceMesh, again: bool = False) -> None:
    """Give every rank of the mesh the buffers of the first one, with one collective for each element type.

    Args:
        module: The module.
        mesh: The ranks.
        again: They were equal before: leave out modules whose class says ``lts_constant_buffers``.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    constant = {
        buffer
        for child in module.modules()
        if again and getattr(child, "lts_constant_buffers", False)
        for buffer in child.buffers(recurse=False)
    }
    for buffer in module.buffers():
        if buffer in constant:
            continue
        if type(buffer) is Tensor and buffer.numel() > 0 and not buffer.is_meta:
            groups.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    with torch.no_grad():
        for buffers in groups.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            for group in mesh.get_all_groups():
                torch.distributed.broadcast(flat, group=group, group_src=0)
            for buffer, values in zip(buffers, flat.split([buffer.numel() for buffer in buffers])):
                buffer.copy_(values.view_as(buffer))
