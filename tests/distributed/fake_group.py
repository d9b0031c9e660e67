"""A mesh of four ranks in one process: collectives give nothing sensible, programs are real."""

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        yield init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    finally:
        torch.distributed.destroy_process_group()
