"""Keeps buffers equal on all ranks."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


def broadcast_buffers(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give every rank of the mesh the buffers of the first one, with one collective for each element type."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in module.buffers():
        if type(buffer) is Tensor and buffer.numel() > 0 and not buffer.is_meta:
            groups.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    with torch.no_grad():
        for buffers in groups.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            for group in mesh.get_all_groups():
                torch.distributed.broadcast(flat, group=group, group_src=0)
            for buffer, values in zip(buffers, flat.split([buffer.numel() for buffer in buffers])):
                buffer.copy_(values.view_as(buffer))
