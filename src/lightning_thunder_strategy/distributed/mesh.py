"""The mesh of ranks."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def data_mesh(device_type: str) -> DeviceMesh:
    """All ranks as one data-parallel dimension. The process group must exist."""
    return init_device_mesh(device_type, (torch.distributed.get_world_size(),), mesh_dim_names=("data",))
