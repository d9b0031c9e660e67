"""ZeRO-3 gathers again in the backward what the backward needs, and nothing else."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from lightning_thunder_strategy.transforms.deduplicate_unshard import DeduplicateUnshard
from lightning_thunder_strategy.transforms.unshard_policy import GatherAgain
from tests.transforms.programs import GATHER, SCATTER, compiled, counts

ZERO2, ZERO3 = [DeduplicateUnshard()], [DeduplicateUnshard(), GatherAgain()]


def deep() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def saved_sizes(program) -> list[int]:
    backward = [trace for trace in program.traces if trace.stage == "backward"][-1]
    return sorted(torch.Size(item.shape).numel() for item in backward.inputs if item.shape is not None)


def test_without_the_pass_gathered_weights_are_saved(mesh: DeviceMesh) -> None:
    net = deep()
    program = compiled(net.forward, net, mesh, ZERO2, torch.ones(2, 4))
    assert counts(program) == {"forward": {GATHER: 8}, "backward": {SCATTER: 8}}
    assert 64 in saved_sizes(program)


def test_weights_are_gathered_again_and_only_shards_are_saved(mesh: DeviceMesh) -> None:
    net = deep()
    program = compiled(net.forward, net, mesh, ZERO3, torch.ones(2, 4))
    counted = counts(program)
    assert counted["forward"] == {GATHER: 8} and counted["backward"][SCATTER] == 8
    assert 3 <= counted["backward"][GATHER] <= 4  # two matrices and the norm, whose bias may be needed to compute again
    assert 64 not in saved_sizes(program) and 16 in saved_sizes(program)


def test_a_cast_before_the_gather_is_not_saved_beside_the_shard(mesh: DeviceMesh) -> None:
    net = deep().bfloat16()
    program = compiled(net.forward, net, mesh, ZERO3, torch.ones(2, 4, dtype=torch.bfloat16))
    assert 64 not in saved_sizes(program)


def test_under_autocast_neither_gathered_weights_nor_their_casts_are_saved(mesh: DeviceMesh) -> None:
    net = deep()

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net(x)

    program = compiled(step, net, mesh, ZERO3, torch.ones(2, 4))
    assert 64 not in saved_sizes(program)


def test_checkpointed_blocks_stay_recomputed_beside_gathered_ones(mesh: DeviceMesh) -> None:
    net = deep()

    def step(x: torch.Tensor) -> torch.Tensor:
        return net[5](checkpoint(net[:5], x, use_reentrant=False))

    program = compiled(step, net, mesh, ZERO3, torch.ones(2, 4))
    assert counts(program)["backward"][SCATTER] == 8
    assert 64 not in saved_sizes(program)


def test_programs_without_a_backward_are_left_as_they_are(mesh: DeviceMesh) -> None:
    net = deep()
    with torch.no_grad():
        program = compiled(net.forward, net, mesh, ZERO3, torch.ones(2, 4))
    assert counts(program) == {"forward": {GATHER: 8}, "backward": {}}
