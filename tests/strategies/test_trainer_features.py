"""Trainer options and callbacks do under ThunderStrategy what they do under Lightning's own strategy."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn

from tests.strategies.modules import Classifier, Linear
from tests.strategies.training import (
    FEATURES,
    Run,
    assert_same,
    assert_same_training,
    classification_data,
    compile_warnings,
    fit,
    fit_both,
    make_trainer,
    thunder,
)


class WithSchedulers(Classifier):
    """Two schedulers, one a step and one that watches a metric."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return [optimizer], [
            {"scheduler": cosine, "interval": "step"},
            {"scheduler": plateau, "interval": "epoch", "monitor": "train_loss_epoch"},
        ]


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulate": {"accumulate_grad_batches": 2},
    "clip norm": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "norm"},
    "clip value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulate and clip": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    "overfit": {"overfit_batches": 1},
    "fast dev run": {"fast_dev_run": 2},
    "no inference mode": {"inference_mode": False},
    "limits": {"limit_train_batches": 2, "limit_val_batches": 1, "val_check_interval": 1},
    "deterministic": {"deterministic": True},
    "detect anomaly": {"detect_anomaly": True},
    "profiler": {"profiler": "simple"},
    "min and max steps": {"max_steps": 4, "max_epochs": -1},
    "no sanity check": {"num_sanity_val_steps": 0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_trainer_option_gives_the_training_of_eager(options: dict[str, Any]) -> None:
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        with compile_warnings() as messages:
            ours, eager = fit_both(WithSchedulers, val=classification_data(seed=9), **options)
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert messages == []
    assert_same_training(ours, eager)
    assert (ours.step()["mode"], ours.step()["graphs"], ours.step()["graph_breaks"]) == ("step", 1, [])


def test_barebones_trains_as_eager() -> None:
    runs = []
    for strategy in (thunder(), "auto"):
        L.seed_everything(11, verbose=False)
        module = Classifier()
        options = {
            "logger": None,
            "enable_checkpointing": None,
            "enable_progress_bar": None,
            "enable_model_summary": None,
        }
        trainer = make_trainer(strategy, barebones=True, **options)
        trainer.fit(module, classification_data())
        runs.append(Run(trainer, module, torch.get_rng_state()))
    assert_same_training(*runs)


DTYPES = {
    "bf16-mixed": (torch.bfloat16, torch.float32),
    "bf16-true": (torch.bfloat16, torch.bfloat16),
    "64-true": (torch.float64, torch.float64),
    "16-true": (torch.float16, torch.float16),
}


@pytest.mark.parametrize("precision", DTYPES)
def test_precision_trains_as_eager(precision: str) -> None:
    class Checks(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.dtypes = [p.dtype for p in self.parameters()]
            return super().training_step(batch, batch_idx)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.seen = self(batch[0]).dtype

    data = classification_data(seed=9)
    ours, eager = fit_both(Checks, val=data, precision=precision)
    assert_same_training(ours, eager)
    assert all(torch.isfinite(parameter).all() for parameter in ours.module.parameters())
    assert (ours.step()["graphs"], ours.step()["graph_breaks"]) == (1, [])
    for run in (ours, eager):
        run.trainer.test(run.module, data, verbose=False)
    assert ours.module.seen is eager.module.seen
    assert ours.module.dtypes == eager.module.dtypes
    seen, stored = DTYPES[precision]
    assert ours.module.seen is seen and ours.module.dtypes[0] is stored


def test_several_optimizers_with_manual_optimization_and_schedulers_train_as_eager() -> None:
    class Manual(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.clip_gradients(first, 0.1, "norm")
            if batch_idx % 2 == 1:
                first.step()
                second.step()
                first.zero_grad()
                second.zero_grad()
            if self.trainer.is_last_batch:
                for scheduler in self.lr_schedulers():
                    scheduler.step()
            self.log("loss", loss, prog_bar=True)

        def configure_optimizers(self) -> Any:
            first = torch.optim.SGD(self.net[0].parameters(), lr=0.1, momentum=0.9)
            second = torch.optim.Adam(self.net[1:].parameters(), lr=0.01)
            return [first, second], [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (first, second)]

    with compile_warnings() as messages:
        ours, eager = fit_both(Manual, max_epochs=3)
    assert len(messages) == 1
    assert_same_training(ours, eager)


def test_backward_in_a_hook_after_the_step_trains_as_eager() -> None:
    class LateBackward(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.pending = self.loss(batch)

        def on_train_batch_end(self, *args: Any) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.pending)
            optimizer.step()

    ours, eager = fit_both(LateBackward)
    assert_same_training(ours, eager)


class Finetunes(BaseFinetuning):
    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=1e-3)


class EMA(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(avg_fn=get_ema_avg_fn(0.8))

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None


class OnlyTrains(Classifier):
    """Optimizes what is not frozen when training starts, as finetuning wants it."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


CALLBACKS: dict[str, tuple[Callable[[], Callback], int]] = {
    "EMA": (EMA, 1),
    "EarlyStopping": (lambda: EarlyStopping("val_loss", min_delta=10.0, patience=1), 1),
    "GradientAccumulationScheduler": (lambda: GradientAccumulationScheduler({0: 1, 1: 3}), 1),
    "ModelPruning": (lambda: ModelPruning("l1_unstructured", amount=0.4), 3),  # a new mask hook an epoch, at first
    "LearningRateFinder": (lambda: LearningRateFinder(num_training_steps=6, update_attr=False), 1),
    "Timer": (lambda: Timer(duration="00:01:00:00"), 1),
}


@pytest.mark.parametrize("callback, graphs", CALLBACKS.values(), ids=CALLBACKS)
def test_callback_gives_the_training_of_eager(callback: Callable[[], Callback], graphs: int, tmp_path) -> None:
    def run(strategy: Any) -> Run:
        return fit(
            Classifier, strategy, val=classification_data(seed=9), callbacks=lambda: [callback()], max_epochs=4,
            default_root_dir=tmp_path,
        )  # fmt: skip

    with compile_warnings() as messages:
        ours, eager = run(thunder()), run("auto")
    assert messages == []
    assert_same_training(ours, eager)
    assert ours.step()["graph_breaks"] == [] and ours.step()["graphs"] == graphs
    results = [run.trainer.test(run.module, classification_data(seed=9), verbose=False) for run in (ours, eager)]
    assert_same(*results, "test")


def test_weight_averaging_with_batchnorm_trains_as_eager_and_says_what_is_cut() -> None:
    # its last epoch sets BatchNorm's momentum to None, which computes with a number read from a tensor
    with compile_warnings() as messages:
        ours, eager = fit_both(Classifier, callbacks=lambda: [StochasticWeightAveraging(swa_lrs=1e-2)], max_epochs=4)
    assert_same_training(ours, eager)
    assert len(messages) == 1 and "data-dependent" in messages[0]


def test_finetuning_trains_as_eager_with_one_more_program() -> None:
    with compile_warnings() as messages:
        ours, eager = fit_both(OnlyTrains, callbacks=lambda: [Finetunes()], max_epochs=3)
    assert messages == []
    assert_same_training(ours, eager)
    assert ours.step()["graphs"] == 2 and ours.step()["graph_breaks"] == []
    assert all(gradients["net.0.weight"] is None for gradients in ours.gradients[:3])


def test_checkpointed_batchnorm_gets_the_gradients_of_eager() -> None:
    class Checkpointed(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False)

    ours, eager = fit_both(Checkpointed)
    assert_same([dict(g) for g in ours.gradients], [dict(g) for g in eager.gradients], "gradients")
    # eager PyTorch counts each batch twice, because it runs the forward twice
    assert (ours.module.net[1].num_batches_tracked, eager.module.net[1].num_batches_tracked) == (6, 12)


def test_learning_rate_finder_suggests_what_it_suggests_under_eager(tmp_path) -> None:
    suggestions = []
    for strategy in (thunder(), "auto"):
        L.seed_everything(11, verbose=False)
        trainer = make_trainer(strategy, default_root_dir=tmp_path)
        module = Classifier()
        module.lr = 0.1
        finder = L.pytorch.tuner.Tuner(trainer).lr_find(
            module, classification_data(80), num_training=20, update_attr=False
        )
        suggestions.append((finder.results, finder.suggestion(skip_begin=2, skip_end=1)))
    assert suggestions[0] == suggestions[1]


def test_batch_size_finder_finds_what_it_finds_under_eager(tmp_path) -> None:
    class Data(L.LightningDataModule):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return classification_data(64, batch_size=self.batch_size)

    class OutOfMemory(Linear):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch[0].shape[0] > 16:
                raise RuntimeError("CUDA out of memory. Tried to allocate more.")
            return super().training_step(batch, batch_idx)

    found = []
    for strategy in (thunder(), "auto"):
        L.seed_everything(11, verbose=False)
        module, data = OutOfMemory(), Data()
        finder = BatchSizeFinder(steps_per_trial=2, init_val=8, max_trials=4)
        trainer = make_trainer(strategy, callbacks=[finder], default_root_dir=tmp_path)
        trainer.fit(module, data)
        found.append((data.batch_size, module.state_dict()))
    assert found[0][0] == found[1][0] == 16
    assert_same(found[0][1], found[1][1], "state")


def test_learning_rate_and_device_monitors_log_what_they_log_under_eager(tmp_path) -> None:
    tables = []
    for name, strategy in (("ours", thunder()), ("eager", "auto")):
        monitors = [LearningRateMonitor("step", log_momentum=True), DeviceStatsMonitor()]
        logger = CSVLogger(tmp_path / name)
        fit(WithSchedulers, strategy, callbacks=lambda m=monitors: m, logger=logger, log_every_n_steps=1)
        lines = (tmp_path / name / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
        column = [i for i, title in enumerate(lines[0].split(",")) if title.startswith(("lr-", "step"))]
        tables.append([[line.split(",")[i] for i in column] for line in lines])
    assert tables[0] == tables[1] and any("lr-AdamW" in title for title in tables[0][0])


def test_model_summary_shows_true_counts_names_and_sizes(capsys) -> None:
    class WithExample(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = torch.randn(2, FEATURES)

    outputs, random = [], []
    for strategy in (thunder(), "auto"):
        run = fit(WithExample, strategy, enable_model_summary=True, max_epochs=1)
        random.append(run.random)
        text = capsys.readouterr().out
        outputs.append(text[text.index("|") if "|" in text else 0 :])
    assert outputs[0] == outputs[1]
    assert "Sequential" in outputs[0] and "[2, 6]" in outputs[0].replace("'", "")
    assert torch.equal(*random)


def test_profiler_names_the_strategys_steps() -> None:
    run = fit(Classifier, thunder(), profiler="simple", max_epochs=1)
    actions = run.trainer.profiler.recorded_durations
    assert len(actions["[Strategy]ThunderStrategy.training_step"]) == 3


def test_predictions_are_those_of_eager_for_several_loaders() -> None:
    class Numbered(Classifier):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Tensor:
            return self(batch[0]) * (1 + dataloader_idx)

    results = []
    for strategy in (thunder(), "auto"):
        L.seed_everything(11, verbose=False)
        module = Numbered()
        trainer = make_trainer(strategy)
        results.append(trainer.predict(module, [classification_data(), classification_data(seed=3, samples=12)]))
    assert_same(*results, "predictions")


def test_the_default_predict_step_runs_the_compiled_forward() -> None:
    class Inputs(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Tensor:
            return torch.arange(FEATURES, dtype=torch.float32) + index

    class Plain(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(FEATURES, 2)
            self.example_input_array = torch.randn(4, FEATURES)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    results, trainers = [], []
    for strategy in (thunder(), "auto"):
        L.seed_everything(11, verbose=False)
        trainers.append(make_trainer(strategy))
        results.append(trainers[-1].predict(Plain(), torch.utils.data.DataLoader(Inputs(), batch_size=4)))
    assert_same(*results, "predictions")
    steps = trainers[0].strategy.report().to_dict()["steps"]
    assert steps["predict_step"]["graphs"] == 1
