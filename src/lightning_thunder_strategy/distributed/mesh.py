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


def tensor_mesh(device_type: str, ranks: int) -> DeviceMesh:
    """Groups of consecutive ranks that compute layers together (tensor parallelism).

    Dimension ``tensor`` of the mesh is within such a group, ``data`` among the groups. ``tensor`` comes first, so that
    a tensor that is split by both is split by it first, and data parallelism splits the parts.

    Args:
        device_type: Of the devices.
        ranks: Of one group.

    Raises:
        ValueError: If the number of processes is not a multiple of ``ranks``.
    """
    size = torch.distributed.get_world_size()
    if size % ranks:
        fitting = [number for number in range(1, size + 1) if size % number == 0]
        raise ValueError(f"tensor_parallel_size={ranks} does not divide the {size} processes: choose one of {fitting}.")
    return _mesh(device_type, (ranks, size // ranks), ("tensor", "data"), by_columns=True)


def _mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...], by_columns: bool = False) -> DeviceMesh:
    """The mesh of this shape: made once for a process group, because torch keeps what it knows of equal meshes."""
    key, world = (device_type, shape, names), torch.distributed.group.WORLD
    if key not in _made or _made[key][0] is not world:
        if by_columns:
            ranks = torch.arange(shape[0] * shape[1]).view(shape[1], shape[0]).T
            _made[key] = (world, DeviceMesh(device_type, ranks.contiguous(), mesh_dim_names=names))
        else:
            _made[key] = (world, init_device_mesh(device_type, shape, mesh_dim_names=names))
    return _made[key][1]
