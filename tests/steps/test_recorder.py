"""Metrics inside compiled steps: calls are made after the step, so their state and values are eager's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from tests.strategies.modules import Linear
from tests.strategies.training import (
    CLASSES,
    Run,
    assert_same,
    assert_same_training,
    classification_data,
    compile_warnings,
    fit_both,
)


class WithMetrics(Linear):
    """Subclasses say what the step does with the metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.acc = MulticlassAccuracy(CLASSES)
        self.mean = MeanMetric()
        self.auroc = MulticlassAUROC(CLASSES, thresholds=None)  # keeps lists of all predictions
        self.collection = MetricCollection(
            {"acc": MulticlassAccuracy(CLASSES), "f1": MulticlassF1Score(CLASSES)}, prefix="c/"
        )

    def parts(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, y = batch
        logits = self.net(x)
        return nn.functional.cross_entropy(logits, y), logits, y


def assert_same_metrics(ours: Run, eager: Run) -> None:
    """Each metric has the state that eager training left."""
    for (name, one), other in zip(ours.module.named_modules(), eager.module.modules()):
        for state in getattr(other, "_defaults", ()):
            assert_same(getattr(one, state), getattr(other, state), f"{name}.{state}")
        assert getattr(one, "_update_count", 0) == getattr(other, "_update_count", 0), name


def assert_nothing_patched(run: Run) -> None:
    for module in run.module.modules():
        assert "log" not in vars(module) and "log_dict" not in vars(module) and "reset" not in vars(module)
        assert not type(module).__module__.startswith("lightning_thunder_strategy")
        assert type(module).__init__ is not object.__init__ and type(module) is type(module).__mro__[0]
    assert type(run.module.acc) is MulticlassAccuracy


def check(make: Callable[[], Any], **options: Any) -> Run:
    """Trains as eager, as one program without breaks and without a message."""
    with compile_warnings() as messages:
        ours, eager = fit_both(make, **options)
    assert messages == []
    assert_same_training(ours, eager)
    assert_same_metrics(ours, eager)
    assert_nothing_patched(ours)
    for step in ours.steps().values():
        assert (step["graphs"], step["graph_breaks"], step["mode"]) == (1, [], "step")
    return ours


def test_metric_objects_logged_after_forward_update_and_in_validation() -> None:
    class Module(WithMetrics):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss, logits, y = self.parts(batch)
            self.acc(logits, y)
            self.log("acc", self.acc, on_step=True, on_epoch=True, prog_bar=True)
            self.mean.update(loss)
            self.log("mean", self.mean)
            self.auroc.update(logits, target=y)
            self.log("auroc", self.auroc, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            _, logits, y = self.parts(batch)
            self.collection.update(logits, y)
            self.log_dict(self.collection)

    run = check(Module, val=classification_data(seed=9))
    assert {"acc_step", "acc_epoch", "auroc", "c/acc", "c/f1"} <= run.trainer.callback_metrics.keys()


def test_metric_values_logged_returned_and_kept() -> None:
    class Module(WithMetrics):
        def __init__(self) -> None:
            super().__init__()
            self.history: list[Tensor] = []
            self.latest: dict[str, Any] = {"acc": None}

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            loss, logits, y = self.parts(batch)
            value = self.acc(logits, y)
            self.log("acc", value, on_epoch=True)
            self.log_dict(self.collection(logits, y), on_epoch=True)
            self.history.append(value)
            self.latest["acc"] = (value, batch_idx)
            self.mean.update(value)  # the value of one metric goes into another
            return {"loss": loss, "acc": value, "nested": [value, {"again": value}]}

        def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
            self.log("returned", outputs["acc"] + outputs["nested"][0] + outputs["nested"][1]["again"])

        def on_train_epoch_end(self) -> None:
            self.log("kept", torch.stack(self.history).mean() + self.latest["acc"][0])
            self.log("mean", self.mean.compute())

    check(Module)


def test_a_metric_called_twice_with_compute_and_reset_in_between() -> None:
    class Module(WithMetrics):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss, logits, y = self.parts(batch)
            self.acc.update(logits, y)
            self.acc.update(logits.flip(0), y)
            self.log("both", self.acc.compute())
            self.acc.reset()
            self.acc.update(logits, y)
            self.log("second", self.acc.compute())
            self.acc.reset()
            return loss

    check(Module)


def test_arguments_have_their_values_at_the_time_of_the_call() -> None:
    class Module(WithMetrics):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss, logits, y = self.parts(batch)
            guess = logits.detach() * 1
            values = [loss.detach() * 1]
            self.acc.update(guess, y)
            guess.zero_()
            self.mean.update(value=values[0])
            values[0] += 100
            self.log("acc", self.acc.compute())
            self.log("mean", self.mean.compute())
            return loss

    check(Module)


def test_metrics_made_anew_each_epoch() -> None:
    class Module(WithMetrics):
        def on_train_epoch_start(self) -> None:
            self.acc = MulticlassAccuracy(CLASSES)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss, logits, y = self.parts(batch)
            self.acc.update(logits, y)
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("acc", self.acc.compute())

    check(Module, max_epochs=3)


class ComputesWithValue(WithMetrics):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, logits, y = self.parts(batch)
        value = self.acc(logits, y)
        self.log("error", 1 - value)
        return loss * (2 - value)


class BranchesOnValue(WithMetrics):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, logits, y = self.parts(batch)
        return loss * 2 if self.acc(logits, y) else loss


class ReadsState(WithMetrics):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, logits, y = self.parts(batch)
        self.mean.update(loss)
        self.log("weight", self.mean.weight)
        return loss


class ReadsCollected(WithMetrics):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, logits, y = self.parts(batch)
        self.log("metric", loss)
        return loss * (1 + self.trainer.callback_metrics["metric"].detach())


@pytest.mark.parametrize("make", [ComputesWithValue, BranchesOnValue, ReadsState, ReadsCollected])
def test_a_step_that_computes_with_a_metric_is_cut_with_one_message_and_trains_as_eager(make) -> None:
    with compile_warnings() as messages:
        ours, eager = fit_both(make)
    assert len(messages) == 1 and "metric" in messages[0] and "test_recorder.py" in messages[0], messages
    assert_same_training(ours, eager)
    assert_same_metrics(ours, eager)
    assert_nothing_patched(ours)
    assert ours.step()["mode"] == "step" and ours.step()["graphs"] > 0


def test_a_value_kept_where_it_cannot_be_filled_in_is_an_error_that_names_the_metric() -> None:
    from collections import deque

    class Module(WithMetrics):
        def __init__(self) -> None:
            super().__init__()
            self.history: deque = deque()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss, logits, y = self.parts(batch)
            self.history.append(self.acc(logits, y))
            return loss

    with pytest.raises(RuntimeError, match=r"MulticlassAccuracy\.forward.*compile='forward'"):
        fit_both(Module)
