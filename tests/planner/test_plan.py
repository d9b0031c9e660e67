"""Plans of small models."""

import pytest
import torch
from torch import nn

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.planner.plan import plan


def mean(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return module(batch).mean()


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))


def test_sharded_parameters_gradients_and_states(model: nn.Module) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = plan(model, torch.zeros(8, 512), lts.ThunderFSDPStrategy(executors=["eager"]), devices=4, loss=mean)
    whole = sum(p.numel() * 4 for p in model.parameters())
    assert found.memory.parameters == found.memory.gradients == whole // 4
    assert found.memory.optimizer == 2 * whole // 4 + 4 * 512  # and a step count for each parameter
    assert found.memory.peak > found.memory.parameters + found.memory.optimizer + found.memory.gradients
    assert not torch.distributed.is_initialized()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
