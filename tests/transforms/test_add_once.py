"""A gradient that waits for a parameter is added once, wherever the parameter is gathered."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.distributed.schemes import Sharded
from lightning_thunder_strategy.distributed.sharding import accumulation_of, gathering, parallelize
from lightning_thunder_strategy.transforms.add_once import AddOnce
from lightning_thunder_strategy.transforms.deduplicate_unshard import DeduplicateUnshard
from tests.transforms.programs import SCATTER


def _programs(function: Callable, module: nn.Module, mesh: DeviceMesh, passes: list) -> list:
    """The programs of a micro-batch that holds its gradients, and of the next one, which reduces them."""
    parallelize(module, Sharded(mesh, whole_gradients=True))
    accumulation = accumulation_of(module)
    run = lts.compile(function, ["eager"], passes, lts.CompileConfig(fullgraph=True))
    for held in (True, False):
        with accumulation.hold() if held else gathering():
            accumulation.begin(module, add=True)
            with gathering():
                loss = run(torch.ones(2, 4)).sum()
            loss.backward()
            accumulation.after_backward(module, mesh)
    return run.record.programs


def _adds(program) -> int:
    (acquired,) = [t.python() for t in program.traces if t.stage == "acquired" and "after AddOnce" in t.provenance]
    return acquired.count("adding_gradient(")


def test_tied_weights_inside_and_outside_of_a_checkpointed_region(mesh: DeviceMesh) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    net = nn.ModuleList([first, second])

    def step(x: Tensor) -> Tensor:
        return second(checkpoint(lambda y: second(first(y)).tanh(), first(x), use_reentrant=False))

    holding, adding = _programs(step, net, mesh, [DeduplicateUnshard(), AddOnce()])
    assert not any(c.op == SCATTER for c in holding.collectives["backward"])
    assert _adds(holding) == 0
    assert _adds(adding) == 3  # one weight and two biases
    assert sum(c.count for c in adding.collectives["backward"] if c.op == SCATTER) >= 3
