"""Compiling before the first batch changes nothing but the time at which it happens."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

import lightning_thunder_strategy as lts
from tests.strategies.modules import Classifier, Linear
from tests.strategies.training import (
    FEATURES,
    Run,
    assert_same_training,
    classification_data,
    compile_warnings,
    fit,
    thunder,
)


class WithState(Classifier):
    """Changes buffers, attributes and lists in its step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(3))
        self.calls = 0
        self.outputs: list[Tensor] = []
        self.sizes = {"last": 0}
        self.net[3].eval()  # stays as the user has set it

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.add_(1)
        self.replaced = self.replaced + 1
        self.calls += 1
        self.outputs.append(batch[0].sum())
        self.sizes["last"] = batch[0].shape[0]
        return super().training_step(batch, batch_idx)


class AtStart(Callback):
    """What was compiled when training starts."""

    def __init__(self) -> None:
        self.steps: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if isinstance(trainer.strategy, lts.ThunderStrategy):
            self.steps = lts.explain(trainer).to_dict()["steps"]


def run(make: Any, batch: Any, strategy: Any, **options: Any) -> tuple[Run, AtStart]:
    if batch is not None:
        strategy.precompile(batch)
    watch = AtStart()
    return fit(make, strategy, callbacks=lambda: [watch], **options), watch


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_precompiled_run_is_the_run_without_it(precision: str) -> None:
    batch = next(iter(classification_data(seed=3)))
    with compile_warnings() as messages:
        early, watch = run(WithState, batch, thunder(), precision=precision)
        eager, _ = run(WithState, None, "auto", precision=precision)
    assert messages == []
    assert_same_training(early, eager)
    assert early.module.calls == eager.module.calls == 6
    assert len(early.module.outputs) == 6 and early.module.sizes == eager.module.sizes
    assert not early.module.net[3].training and early.module.net[0].training
    assert watch.steps["training_step"]["graphs"] == 1
    late, _ = run(WithState, None, thunder(), precision=precision)
    assert early.step()["graphs"] == late.step()["graphs"] == 2  # one more for the counter, either way


def test_a_step_that_reads_an_empty_list_is_one_program_nonetheless() -> None:
    class Reads(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.penalties: list[Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) + sum(self.penalties)

    early, watch = run(Reads, next(iter(classification_data())), thunder())
    assert watch.steps["training_step"]["graphs"] == early.step()["graphs"] == 1
    assert early.step()["mode"] == "step"


def test_a_step_that_cannot_be_one_program_is_announced_once_and_trains() -> None:
    class Prints(Linear):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            print("x")
            return self.loss(batch)

    batch = next(iter(classification_data()))
    with compile_warnings() as messages:
        early, _ = run(Prints, batch, thunder())
        eager, _ = run(Prints, None, "auto")
    assert_same_training(early, eager)
    assert len(messages) == 1


def test_mode_forward_compiles_during_setup_on_the_example_input() -> None:
    class WithExample(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = torch.randn(8, FEATURES)

    ours, watch = run(WithExample, None, thunder(compile="forward"))
    eager, _ = run(WithExample, None, "auto")
    assert_same_training(ours, eager)
    assert watch.steps["training_step"]["graphs"] == ours.step()["graphs"] == 1
