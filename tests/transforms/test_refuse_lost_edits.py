"""A step that edits a sharded parameter is refused, wherever the edit hides; what only reads is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_thunder_strategy.transforms.refuse_lost_edits import LostEditError, RefuseLostEdits
from tests.transforms.programs import compiled

EDITS: dict[str, Callable[[nn.Linear], Any]] = {
    "in place": lambda m: m.weight.mul_(2),
    "operator": lambda m: m.weight.__iadd__(1),
    "element": lambda m: m.weight.__setitem__(0, 0.0),
    "slice of a view": lambda m: m.weight.view(-1)[1:3].zero_(),
    "chunk": lambda m: m.weight.chunk(2)[0].zero_(),
    "data": lambda m: m.weight.data.add_(1),
    "data of a view": lambda m: m.weight.t().data.add_(1),
    "detached": lambda m: m.weight.detach().clamp_(0, 1),
    "out": lambda m: torch.mul(m.weight, 2, out=m.weight),
    "init": lambda m: nn.init.xavier_uniform_(m.weight),
    "copy": lambda m: m.weight.copy_(torch.ones(4, 4)),
    "function": lambda m: F.relu(m.weight, inplace=True),
    "foreach": lambda m: torch._foreach_add_([m.weight, m.bias], 1.0),
    "fill of the bias": lambda m: m.bias.fill_(0.5),
}

READS: dict[str, Callable[[nn.Linear], Any]] = {
    "norm of data": lambda m: m.weight.data.norm(),
    "clone": lambda m: m.weight.clone().mul_(2),
    "detached sum": lambda m: m.weight.detach().sum(),
    "edit of a result": lambda m: (m.weight * 2).add_(1),
    "argument of an edit": lambda m: torch.zeros(4, 4).add_(m.weight),
    "foreach": lambda m: torch._foreach_mul([m.weight], 2.0),
    "requires_grad_": lambda m: m.weight.detach().requires_grad_(False),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits_are_refused(edit: str, mesh: DeviceMesh) -> None:
    layer = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            EDITS[edit](layer)
        return layer(x)

    with pytest.raises(LostEditError, match="in place, or gives it new data.*on_train_batch_end"):
        compiled(step, layer, mesh, [RefuseLostEdits()], torch.ones(2, 4))


@pytest.mark.parametrize("read", READS)
def test_reads_are_not(read: str, mesh: DeviceMesh) -> None:
    layer = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            READS[read](layer)
        return layer(x)

    compiled(step, layer, mesh, [RefuseLostEdits()], torch.ones(2, 4))


def test_the_line_of_the_edit_is_named(mesh: DeviceMesh) -> None:
    layer = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            layer.weight.mul_(0.5)
        return layer(x)

    with pytest.raises(LostEditError, match=r"test_refuse_lost_edits.py.*layer.weight.mul_\(0.5\)"):
        compiled(step, layer, mesh, [RefuseLostEdits()], torch.ones(2, 4))
