"""Each parameter is gathered and reduced once, however often it is used."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.distributed.tensor_collectives import copy_to_ranks
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


def test_a_use_without_gradients_takes_none_from_a_later_one(mesh: DeviceMesh) -> None:
    layer = nn.Linear(4, 4, bias=False)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            metric = layer(x).sum()
        return layer(x).square().sum() + 0 * metric

    program = compiled(step, layer, mesh, [DeduplicateUnshard()], torch.ones(2, 4))
    assert counts(program)["backward"] == {SCATTER: 1}
    assert layer.weight.grad is not None


def test_a_use_without_gradients_shares_the_gather_of_an_earlier_one(mesh: DeviceMesh) -> None:
    layer = nn.Linear(4, 4, bias=False)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = layer(x).square().sum()
        with torch.no_grad():
            metric = layer(x).sum()
        return loss + 0 * metric

    program = compiled(step, layer, mesh, [DeduplicateUnshard()], torch.ones(2, 4))
    assert counts(program) == {"forward": {GATHER: 1}, "backward": {SCATTER: 1}}


def _calls(function: Callable, merged: bool) -> list[str]:
    """Names of the calls of an acquired program, before or after the pass."""
    found: list[str] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable:
        if merged:
            DeduplicateUnshard().acquired(Trace("acquired", gm))
        found.extend(getattr(node.target, "__name__", str(node.target)) for node in gm.graph.nodes)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(torch.ones(2, 4, requires_grad=True))
    return found


def test_inputs_of_layers_that_read_one_activation_are_merged_until_it_is_edited(mesh: DeviceMesh) -> None:
    group = mesh.get_group().group_name

    def both(x: torch.Tensor) -> torch.Tensor:
        h = x.sin()
        return copy_to_ranks(h, group) + copy_to_ranks(h, group)

    def edited(x: torch.Tensor) -> torch.Tensor:
        h = x.sin()
        first = copy_to_ranks(h, group) * 1
        h.add_(1.0)
        return first + copy_to_ranks(h, group)

    def unrecorded(x: torch.Tensor) -> torch.Tensor:
        h = x.sin()
        with torch.no_grad():
            metric = copy_to_ranks(h, group) * 0
        return metric + copy_to_ranks(h, group)

    counted = {
        (function.__name__, merged): _calls(function, merged).count("copy_to_ranks")
        for function in (both, edited, unrecorded)
        for merged in (False, True)
    }
    assert counted == {
        ("both", False): 2, ("both", True): 1, ("edited", False): 2, ("edited", True): 2,
        ("unrecorded", False): 2, ("unrecorded", True): 2,
    }  # fmt: skip
