"""Where parameters are at rest."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_thunder_strategy.distributed.schemes import Sharded, local_bytes, place_like, whole


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 8, 9, 13])
def test_a_plain_tensor_is_cut_as_torch_cuts_it(rows: int, mesh: DeviceMesh) -> None:
    value = torch.arange(rows * 3.0).view(rows, 3)
    like = distribute_tensor(torch.zeros(rows, 3), mesh, [Shard(0)], src_data_rank=None)
    theirs = distribute_tensor(value.clone(), mesh, [Shard(0)], src_data_rank=None)
    ours = place_like(value, like)
    assert isinstance(ours, DTensor) and ours.shape == value.shape and ours.stride() == value.stride()
    assert torch.equal(ours.to_local(), theirs.to_local())
    value.fill_(-1)
    assert torch.equal(ours.to_local(), theirs.to_local()), "it is a copy"


def test_other_placements_and_values_without_a_counterpart(mesh: DeviceMesh) -> None:
    value = torch.ones(4, 6)
    columns = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(1)], src_data_rank=None)
    assert place_like(value, columns).to_local().shape == (4, 2)
    everywhere = distribute_tensor(torch.zeros(4, 6), mesh, [Replicate()], src_data_rank=None)
    assert place_like(value, everywhere).to_local().shape == (4, 6)
    assert place_like(torch.ones(5, 6), columns).shape == (5, 6), "another shape is left for load_state_dict to refuse"
    assert place_like("text", columns) == "text" and place_like(value, None) is value


def test_hooks_and_attributes_stay_with_a_parameter(mesh: DeviceMesh) -> None:
    parameter = nn.Parameter(torch.ones(8))
    calls: list[str] = []
    parameter.register_hook(lambda gradient: calls.append("hook"))
    parameter.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    parameter.tag = "mine"
    placed = Sharded(mesh).place(parameter)
    assert placed.tag == "mine" and placed.requires_grad and isinstance(placed, nn.Parameter)
    placed.sum().backward()
    assert calls == ["hook", "accumulated"]
    assert Sharded(mesh).place(placed) is placed


def test_a_parameter_without_dimensions_is_whole_on_every_rank(mesh: DeviceMesh) -> None:
    placed = Sharded(mesh).place(nn.Parameter(torch.tensor(2.0), requires_grad=False))
    assert placed.placements == (Replicate(),) and not placed.requires_grad
    assert torch.equal(whole(placed), torch.tensor(2.0))


def test_local_bytes(mesh: DeviceMesh) -> None:
    plain: Tensor = torch.zeros(9, 2)
    assert local_bytes(plain) == 72
    assert local_bytes(distribute_tensor(plain, mesh, [Shard(0)], src_data_rank=None)) == 24  # rank 1 of 4: 3 rows
