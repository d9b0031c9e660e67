"""The fingerprint of a program's collectives."""

import torch
from torch import fx
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_thunder_strategy.compiler.collectives import sequence, sizes_vary_in


def line_of_a_gather(varying: bool) -> tuple[str, str]:
    """The name of a group, and what the fingerprint says of a gather in it, in a world of its own."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")).get_group("tensor")
        if varying:
            sizes_vary_in(group)
        graph = fx.Graph()
        shard = graph.placeholder("shard")
        gather = graph.call_function(
            torch.ops._c10d_functional.all_gather_into_tensor.default, (shard, 2, group.group_name)
        )
        shard.meta["val"], gather.meta["val"] = torch.empty(3, 5), torch.empty(6, 5)
        graph.output(gather)
        return group.group_name, sequence([graph])[0]
    finally:
        torch.distributed.destroy_process_group()


def test_a_later_group_of_the_same_name_is_another_one() -> None:
    (first, varying), (second, fixed) = line_of_a_gather(True), line_of_a_gather(False)
    assert first == second
    assert "activations" in varying and "[6, 5]" in fixed
