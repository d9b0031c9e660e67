"""Checks that gradients which are not finite stop all ranks before the optimizer step."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_thunder_strategy.distributed.nonfinite import NonfiniteGradientsError
from tests.distributed import fabric_scenarios as scenarios
from tests.distributed.models import Smooth, vectors
from tests.distributed.training import Result, Watch, fit, loader, thunder, trainer

KINDS = ("ddp", "zero1", "zero3")


class Poisoned(Smooth):
    """The third batch of rank one makes the gradient of the last bias NaN, and the loss stays finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        factor = torch.where(batch[0].new_tensor(batch_idx) == 2, self.poison, 1.0)
        return self.loss(batch) + (self.net[2].bias * factor).sum() * 0

    def __init__(self) -> None:
        super().__init__()
        self.poison = float("inf") if torch.distributed.get_rank() == 1 else 1.0


def check_one_rank_s_gradient_stops_all_before_the_step() -> None:
    for kind in KINDS:
        torch.manual_seed(2)
        module = Poisoned()
        result = Result(module, None)
        made = trainer(
            thunder(kind, nonfinite_gradients="raise", broadcast_buffers=False),
            callbacks=[Watch(result)], limit_val_batches=0, gradient_clip_val=1.0,
        )  # fmt: skip
        with pytest.raises(NonfiniteGradientsError, match=r"gradients of net\.2\.bias are not finite"):
            made.fit(module, loader(vectors(), 2))
        assert made.global_step == 2, kind
        local = [p.to_local() if hasattr(p, "to_local") else p for p in module.parameters()]
        assert all(bool(value.isfinite().all()) for value in local), kind


def check_by_default_training_goes_on() -> None:
    result = fit(thunder("ddp", broadcast_buffers=False), Poisoned(), vectors(), limit_val_batches=0, max_epochs=1)
    assert result.trainer.global_step == 3
    assert bool(result.weights["net.2.bias"].isnan().all())


def check_finite_training_is_as_without() -> None:
    results = []
    for options in ({}, {"nonfinite_gradients": "raise"}):
        torch.manual_seed(2)
        results.append(fit(thunder("zero3", **options), Smooth(), vectors(), limit_val_batches=0))
    torch.testing.assert_close(results[1].weights, results[0].weights, rtol=0, atol=0)


def check_fabric_stops_all_ranks() -> None:
    for kind in ("ddp", "zero3"):
        runner = scenarios.fabric(kind, nonfinite_gradients="raise")
        module = scenarios.seeded(scenarios.Net)
        model, optimizer = runner.setup(module, torch.optim.SGD(module.parameters(), lr=0.05))
        before = scenarios.weights(module)
        x = scenarios.batch(0, runner.global_rank) * (float("inf") if runner.global_rank == 1 else 1.0)
        runner.backward(model(x).mean())
        with pytest.raises(NonfiniteGradientsError, match="first.weight"):
            optimizer.step()
        torch.testing.assert_close(scenarios.weights(module), before, rtol=0, atol=0)
