"""What the tests of the Fabric strategies share."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_thunder_strategy import fabric as thunder


class Net(nn.Module):
    """Two layers, with a method besides ``forward`` that uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 3)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def loss(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return self(x).square().mean() * factor

    def fails(self, x: Tensor) -> Tensor:
        raise RuntimeError("the user's own error")


def fabric(strategy: Any = None, **options: Any) -> L.Fabric:
    """A Fabric on the CPU, by default with our strategy for one device and the eager executor."""
    if strategy is None:
        strategy = thunder.ThunderStrategy(executors=["eager"])
    return L.Fabric(**{"accelerator": "cpu", "devices": 1, "strategy": strategy, **options})


def seeded(make: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def batches(count: int = 4, size: int = 8, width: int = 6, seed: int = 11) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, width, generator=generator) for _ in range(count)]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
