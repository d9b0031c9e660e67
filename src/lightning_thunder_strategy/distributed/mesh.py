"""The mesh of ranks."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_made: dict[tuple, tuple[object, DeviceMesh]] = {}  # by shape: the process group that a mesh is of, and the mesh


def data_mesh(device_type: str, replicas: int = 1) -> DeviceMesh:
    """All ranks as data-parallel ones. The process group must exist.

    Args:
        device_type: Of the devices.
        replicas: Into how many groups of consecutive ranks they are divided; more than one gives a mesh with the
            dimensions ``replicate`` and ``shard``.

    Raises:
        ValueError: If the number of processes is not a multiple of ``replicas``.
    """
    size = torch.distributed.get_world_size()
    if replicas == 1:
        return init_device_mesh(device_type, (size,), mesh_dim_names=("data",))
    if size % replicas:
        fitting = [number for number in range(1, size + 1) if size % number == 0]
        raise ValueError(f"replicas={replicas} does not divide the {size} processes: choose one of {fitting}.")
    return _mesh(device_type, (replicas, size // replicas), ("replicate", "shard"))


def _mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The mesh of this shape: made once for a process group, because torch keeps what it knows of equal meshes."""
    key, world = (device_type, shape, names), torch.distributed.group.WORLD
    if key not in _made or _made[key][0] is not world:
        _made[key] = (world, init_device_mesh(device_type, shape, mesh_dim_names=names))
    return _made[key][1]
