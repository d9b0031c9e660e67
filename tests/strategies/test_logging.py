"""Logging inside compiled steps: no graph breaks, and the values of eager training."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from tests.strategies.modules import Classifier, Linear
from tests.strategies.training import (
    CLASSES,
    Run,
    assert_same_training,
    classification_data,
    compile_warnings,
    fit,
    fit_both,
    thunder,
)


def assert_one_program_each(run: Run, *names: str, graphs: int = 1) -> None:
    for name in names:
        step = run.step(name)
        assert (step["graphs"], step["graph_breaks"], step["mode"], step["note"]) == (graphs, [], "step", ""), name


class LogsInManyWays(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)

        def nested(name: str, value: Any) -> None:
            self.log(name, value, on_step=True, on_epoch=False)

        nested("nested", loss * 2)
        self.log("bar", loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=True)
        self.log("maximum", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("total", loss, on_step=False, on_epoch=True, reduce_fx=torch.sum)
        self.log("weighted", loss, on_step=False, on_epoch=True, batch_size=3)
        self.log("number", 3)
        self.log("fraction", 0.5, on_epoch=True)
        self.log("index", batch_idx, reduce_fx="sum", on_epoch=True)
        self.log("global_step", float(self.global_step))
        self.log_dict({"a": loss + 1, "b": loss.detach() - 1}, on_epoch=True, prog_bar=True)
        self.log("not_logged", loss, logger=False)
        return {"loss": loss, "extra": loss.detach() * 5}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.loss(batch)
        self.log("val", loss)
        self.log(f"val_{dataloader_idx}", loss, add_dataloader_idx=False, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("in_hook", outputs["extra"], on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("at_end", float(self.current_epoch))


def test_every_way_to_log_gives_the_values_of_eager(tmp_path) -> None:
    loaders = [classification_data(seed=8), classification_data(seed=9, samples=16)]
    tables = []

    def logger() -> CSVLogger:
        tables.append(CSVLogger(tmp_path / str(len(tables))))
        return tables[-1]

    with compile_warnings() as messages:
        runs = [fit_logged(strategy, logger(), loaders) for strategy in ("thunder", "auto")]
    assert messages == []
    assert_same_training(*runs)
    assert_one_program_each(runs[0], "training_step")
    assert_one_program_each(runs[0], "validation_step", graphs=2)  # one a dataloader: the index is in the name
    ours, eager = (Path(table.log_dir, "metrics.csv").read_text() for table in tables)
    assert ours == eager and "nested" in ours


def fit_logged(kind: str, logger: Any, loaders: list) -> Run:
    strategy = thunder() if kind == "thunder" else kind
    return fit(LogsInManyWays, strategy, val=loaders, logger=logger, log_every_n_steps=1)


def test_progress_bar_gets_the_values_at_every_step() -> None:
    class Watch(Callback):
        def __init__(self) -> None:
            self.seen: list[dict] = []

        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            self.seen.append(dict(trainer.progress_bar_metrics))

    ours, eager = fit_both(Classifier, callbacks=lambda: [Watch()])
    seen = [next(c for c in run.trainer.callbacks if isinstance(c, Watch)).seen for run in (ours, eager)]
    assert seen[0] == seen[1]
    assert {"train_loss_step"} <= seen[0][0].keys()


def test_a_logged_value_is_the_one_at_the_time_of_the_call() -> None:
    class ChangesInPlace(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            logits = self.net(x)
            loss = torch.nn.functional.cross_entropy(logits, y)
            scale = loss.detach() * 2
            self.log("scale", scale)
            view = scale.view(1)
            view.mul_(3)
            self.log("seen", self.seen)
            self.seen.add_(1)
            self.log("later", scale)
            return loss

    with compile_warnings() as messages:
        ours, eager = fit_both(ChangesInPlace)
    assert messages == []
    assert_same_training(ours, eager)
    assert ours.trainer.callback_metrics["later"] == 3 * ours.trainer.callback_metrics["scale"]
    assert_one_program_each(ours, "training_step")


@pytest.mark.parametrize("schedule", ["scheduler", "param_groups"])
def test_logging_a_changing_learning_rate_costs_at_most_one_more_program(schedule: str) -> None:
    class LogsLearningRate(Linear):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if schedule == "scheduler":
                self.log("lr", self.lr_schedulers().get_last_lr()[0], prog_bar=True)
            else:
                self.log("lr", self.optimizers().param_groups[0]["lr"], prog_bar=True)
            return self.loss(batch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    with compile_warnings() as messages:
        ours, eager = fit_both(LogsLearningRate, max_epochs=5)
    assert messages == []
    assert_same_training(ours, eager)
    assert ours.step()["graphs"] <= 2 and ours.step()["graph_breaks"] == []
    assert "get_last_lr" not in vars(
        ours.trainer.lr_scheduler_configs[0].scheduler if schedule == "scheduler" else ours
    )


def test_a_step_that_sets_the_learning_rate_leaves_the_optimizer_as_eager() -> None:
    class Warmup(Linear):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            for group in self.optimizers().param_groups:
                group["lr"] = 0.1 * min(1.0, (self.global_step + 1) / 5)
            return self.loss(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    with compile_warnings() as messages:
        ours, eager = fit_both(Warmup, max_epochs=3)
    assert messages == []
    assert_same_training(ours, eager)  # the optimizer's groups too: Dynamo would set `capturable`
    assert_one_program_each(ours, "training_step")


def test_an_overridden_log_method_is_called_with_the_real_values() -> None:
    class Prefixed(Linear):
        def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            super().log(f"train/{name}", value, *args, **kwargs)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss

    ours, eager = fit_both(Prefixed)
    assert_same_training(ours, eager)
    assert "train/loss" in ours.trainer.callback_metrics
    assert_one_program_each(ours, "training_step")


def test_an_error_of_lightning_about_a_log_call_is_lightnings() -> None:
    class LogsTwice(Linear):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True)
            self.log("loss", loss, on_epoch=True)
            return loss

    with pytest.raises(MisconfigurationException, match="twice in `training_step`"):
        fit(LogsTwice, thunder())


def test_logging_in_a_child_lightning_module_does_what_lightning_does() -> None:
    class Child(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            self.log("child", x.sum())
            return self.net(x)

    class Parent(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.net = Child()

    errors = []
    for strategy in (thunder(), "auto"):
        with pytest.raises(Exception) as caught:
            fit(Parent, strategy)
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]
