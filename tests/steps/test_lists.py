"""Steps that append to lists of their module are one program, whatever the length of the list."""

from typing import Any

import torch
from torch import Tensor

from tests.strategies.modules import Linear
from tests.strategies.training import assert_same, assert_same_training, classification_data, compile_warnings, fit_both


class Collects(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.by_stage: dict[str, list] = {"train": [], "val": []}
        self.scales = [1.0, 2.0]
        self.penalties: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch) * self.scales[0]
        for penalty in self.penalties:
            loss = loss + penalty
        self.outputs.append(loss)
        self.by_stage["train"] += [loss.detach(), batch_idx]
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.by_stage["val"].append({"loss": self.loss(batch), "y": batch[1]})

    def on_validation_epoch_end(self) -> None:
        self.log("val", torch.stack([item["loss"] for item in self.by_stage["val"]]).mean())
        self.by_stage["val"].clear()

    def on_train_epoch_end(self) -> None:
        self.log("sum", torch.stack(self.outputs).sum())


def test_appending_to_lists_is_part_of_one_program() -> None:
    with compile_warnings() as messages:
        ours, eager = fit_both(Collects, val=classification_data(seed=9), max_epochs=3)
    assert messages == []
    assert_same_training(ours, eager)
    assert type(ours.module.outputs) is list and len(ours.module.outputs) == 9
    assert_same(ours.module.outputs, eager.module.outputs, "outputs")
    assert_same(ours.module.by_stage, eager.module.by_stage, "by_stage")
    for step in ours.steps().values():
        assert (step["graphs"], step["graph_breaks"]) == (1, [])


def test_a_list_that_grows_in_a_cut_step_is_announced_with_the_fix() -> None:
    class Cut(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.outputs: list[Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            print("cut")
            self.outputs.append(loss.detach())
            return loss

    with compile_warnings() as messages:
        ours, eager = fit_both(Cut, max_epochs=4)
    assert_same_training(ours, eager)
    assert_same(ours.module.outputs, eager.module.outputs, "outputs")
    assert len(messages) == 2 and "on_train_batch_end" in messages[1] and "len(self.outputs)" in messages[1]
    assert ours.step()["mode"] == "submodules"


def test_lists_that_the_step_reads_or_replaces_are_its_own() -> None:
    class Reads(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.history: list[Tensor] = []
            self.window: list[Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            if len(self.history) >= 2:
                self.history = []
            self.history.append(loss.detach())
            self.window = [*self.window[-1:], loss.detach()]
            self.log("mean", sum(self.window) / len(self.window))
            return loss

    ours, eager = fit_both(Reads, max_epochs=3)
    assert_same_training(ours, eager)
    assert_same(ours.module.history, eager.module.history, "history")
    assert_same(ours.module.window, eager.module.window, "window")
