"""Counters of the Trainer and of the module cost no program a step."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_thunder_strategy as lts
from tests.strategies.modules import Linear
from tests.strategies.training import (
    assert_same_training,
    classification_data,
    compile_warnings,
    fit,
    fit_both,
    thunder,
)


def test_arithmetic_on_counters_is_one_program_over_several_epochs() -> None:
    class Counts(Linear):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            step = self.global_step
            scale = 1 + 0.01 * step + 0.1 * self.current_epoch + 0.001 * batch_idx + 0.001 * self.trainer.global_step
            warm = min(1.0, (step + 1) / 7) * 0.99**step * math.sqrt(step + 1) * math.cos(math.pi * step / 100)
            self.log("scale", float(scale))
            self.log("step", step)
            self.log("tensor", torch.tensor(step) * 2.0)
            return self.loss(batch) * scale * warm

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch) * (batch_idx + 1) * (self.current_epoch + 1))

    with compile_warnings() as messages:
        ours, eager = fit_both(Counts, max_epochs=4, val=classification_data(seed=9))
    assert messages == []
    assert_same_training(ours, eager)
    for name in ("training_step", "validation_step"):
        assert (ours.step(name)["graphs"], ours.step(name)["graph_breaks"]) == (1, []), name


def test_branches_on_counters_are_one_program_a_combination() -> None:
    class Branches(Linear):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            if batch_idx < 1:
                loss = loss * 2
            if self.current_epoch >= 2:
                loss = loss + self.net.weight.square().sum()
            if self.global_step % 100 == 50:
                loss = loss * 7
            return loss

    with compile_warnings() as messages:
        ours, eager = fit_both(Branches, max_epochs=5)
    assert messages == []
    assert_same_training(ours, eager)
    assert ours.step()["graphs"] == 4  # two branches taken or not; the third never is
    assert len(ours.step()["recompiles"]) == 3 and ours.step()["graph_breaks"] == []


def test_a_counter_on_the_module_costs_at_most_one_more_program() -> None:
    class Counter(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.calls += 1
            return self.loss(batch) * (1 + 0.1 * self.calls)

    ours, eager = fit_both(Counter, max_epochs=4)
    assert_same_training(ours, eager)
    assert ours.module.calls == eager.module.calls == 12
    assert ours.step()["graphs"] <= 2


def test_a_float_that_a_hook_changes_costs_at_most_one_more_program() -> None:
    class Annealed(Linear):
        beta = 0.5

        def on_train_batch_start(self, *args: Any) -> None:
            self.beta = 0.5 + 0.037 * self.global_step

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) * self.beta

    with compile_warnings() as messages:
        ours, eager = fit_both(Annealed, max_epochs=4)
    assert messages == []
    assert_same_training(ours, eager)
    assert ours.step()["graphs"] <= 2


class Exponential(Linear):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * math.exp(-self.global_step / 50)


class MutatedFloat(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.temperature *= 0.9
        return self.loss(batch) * self.temperature


@pytest.mark.parametrize("make", [Exponential, MutatedFloat])
def test_what_must_be_specialised_gives_one_message_with_the_fix_and_trains_as_eager(make) -> None:
    with compile_warnings() as messages:
        ours, eager = fit_both(make, max_epochs=5)
    assert_same_training(ours, eager)
    assert len(messages) == 1, messages
    for part in ("training_step", "tensor", "torch.exp", "buffer", "submodules"):
        assert part in messages[0]
    step = ours.step()
    assert step["mode"] == "submodules" and "net" not in step["note"] and step["graphs"] <= 10


def test_what_must_be_specialised_is_an_error_under_fullgraph() -> None:
    config = lts.CompileConfig(fullgraph=True)
    with pytest.raises(lts.CompileError, match="training_step.*torch.exp") as caught:
        fit(Exponential, thunder(compile=config), max_epochs=5)
    assert caught.value.recompile_limit
