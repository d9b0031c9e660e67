"""Gradients go before the next forward where nobody can tell, and stay where somebody looks at them."""

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tests.strategies.modules import Linear
from tests.strategies.training import fit, thunder

SEEN: list[bool] = []
MODULE: list[Any] = []


@torch.library.custom_op("lts_tests::sees_gradients", mutates_args=())
def sees_gradients(x: Tensor) -> Tensor:
    """Notes whether there are gradients while the forward runs."""
    SEEN.append(MODULE[0].net.weight.grad is not None)
    return x.clone()


sees_gradients.register_fake(lambda x: torch.empty_like(x))


class Watched(Linear):
    def __init__(self) -> None:
        super().__init__()
        MODULE[:] = [self]
        SEEN.clear()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(sees_gradients(batch[0])).square().mean()


class Overrides(Watched):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()


class LooksAtGradients(Watched):
    """Its loss depends on the gradients of the step before, from the third step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_step > 1 and self.net.weight.grad is not None:
            loss = loss * (1 + self.net.weight.grad.detach().norm())
        return loss


class BeforeZero(Callback):
    found: list[bool]

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.found.append(pl_module.net.weight.grad is not None)


def test_gradients_are_gone_when_the_forward_runs() -> None:
    fit(Watched, thunder())
    assert SEEN == [False] * 6
    fit(Watched, thunder(compile="off"))
    assert SEEN == [False] + [True] * 5  # as under Lightning's own strategies


def test_gradients_of_earlier_micro_batches_stay() -> None:
    fit(Watched, thunder(), accumulate_grad_batches=2)
    assert SEEN == [False, True, False] * 2


def test_code_around_zero_grad_finds_the_gradients() -> None:
    fit(Overrides, thunder())
    assert SEEN == [False] + [True] * 5
    callback = BeforeZero()
    callback.found = []
    fit(Watched, thunder(), callbacks=lambda: [callback])
    assert callback.found == [False] + [True] * 5


def test_a_step_that_looks_at_gradients_finds_them() -> None:
    """Also at its first step that does: the program that looks at them is new then."""
    ours = fit(LooksAtGradients, thunder())
    assert SEEN[2:] == [True] * 4 and ours.step()["mode"] == "step"
    eager = fit(LooksAtGradients, "auto")
    torch.testing.assert_close(ours.module.net.weight, eager.module.net.weight, rtol=0, atol=0)


def test_nothing_is_released_outside_of_the_training_loop() -> None:
    strategy = thunder()
    module = fit(Watched, strategy).module
    module.net.weight.grad = torch.ones_like(module.net.weight)
    strategy._early_release()
    assert module.net.weight.grad is not None
