"""Each parameter is gathered and reduced once, however often it is used."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_thunder_strategy.transforms.deduplicate_unshard import DeduplicateUnshard
from tests.transforms.programs import GATHER, REDUCE, SCATTER, compiled, counts


def twice(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(torch.tanh(module(x))) + module.weight.square().sum()


def test_without_the_pass_a_weight_is_reduced_once_a_use(mesh: DeviceMesh) -> None:
    layer = nn.Linear(4, 4)
    program = compiled(lambda x: twice(layer, x), layer, mesh, [], torch.ones(2, 4))
    assert counts(program)["backward"][SCATTER] == 5


def test_three_uses_of_a_weight_are_one_gather_and_one_reduce_scatter(mesh: DeviceMesh) -> None:
    layer = nn.Linear(4, 4)
    program = compiled(lambda x: twice(layer, x), layer, mesh, [DeduplicateUnshard()], torch.ones(2, 4))
    assert counts(program) == {"forward": {GATHER: 2}, "backward": {SCATTER: 2}}
    acquired = [trace for trace in program.traces if trace.stage == "acquired"][-1]
    assert acquired.provenance.startswith("after DeduplicateUnshard")
    assert acquired.python().count(".redistribute(") == 2


def test_replicated_weights_are_reduced_once(mesh: DeviceMesh) -> None:
    layer = nn.Linear(4, 4)
    program = compiled(lambda x: twice(layer, x), layer, mesh, [DeduplicateUnshard()], torch.ones(2, 4), ddp=True)
    assert counts(program) == {"forward": {}, "backward": {REDUCE: 2}}


def test_equal_weights_of_two_layers_stay_apart(mesh: DeviceMesh) -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    net[2].weight.data.copy_(net[0].weight.data)
    program = compiled(net.forward, net, mesh, [DeduplicateUnshard()], torch.ones(2, 4))
    assert counts(program) == {"forward": {GATHER: 2}, "backward": {SCATTER: 2}}


def test_frozen_weights_are_gathered_and_never_reduced(mesh: DeviceMesh) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[0].requires_grad_(False)
    program = compiled(net.forward, net, mesh, [DeduplicateUnshard()], torch.ones(2, 4))
    assert counts(program) == {"forward": {GATHER: 4}, "backward": {SCATTER: 2}}
