"""Trains the same module under our strategy and under Lightning's own, and compares the two runs."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_thunder_strategy as lts

FEATURES, CLASSES = 6, 3


def thunder(**options: Any) -> lts.ThunderStrategy:
    """Our strategy with the eager executor, which promises bit-equal results."""
    options.setdefault("executors", ["eager"])
    return lts.ThunderStrategy(**options)


def classification_data(samples: int = 24, batch_size: int = 8, shuffle: bool = False, seed: int = 7) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=shuffle)


def token_data(samples: int = 12, length: int = 8, vocabulary: int = 32, batch_size: int = 4) -> DataLoader:
    tokens = torch.randint(0, vocabulary, (samples, length + 1), generator=torch.Generator().manual_seed(7))
    return DataLoader(TensorDataset(tokens), batch_size=batch_size)


class GradientLog(Callback):
    """Keeps every gradient that an optimizer sees."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor | None]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.gradients.append(
            {name: None if p.grad is None else p.grad.clone() for name, p in pl_module.named_parameters()}
        )


@dataclass
class Run:
    """What a run left behind."""

    trainer: L.Trainer
    module: L.LightningModule
    random: Tensor
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)

    def steps(self) -> dict[str, dict[str, Any]]:
        """The steps of the compile report."""
        return lts.explain(self.trainer).to_dict()["steps"]

    def step(self, name: str = "training_step") -> dict[str, Any]:
        return self.steps()[name]


def make_trainer(strategy: Any, **options: Any) -> L.Trainer:
    """A quiet Trainer on one CPU."""
    defaults = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 2, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return L.Trainer(strategy=strategy, **{**defaults, **options})


def fit(
    make: Callable[[], L.LightningModule],
    strategy: Any,
    train: Any = None,
    val: Any = None,
    ckpt_path: Any = None,
    callbacks: Callable[[], list] = list,
    **options: Any,
) -> Run:
    """Make a module under a fixed seed and fit it."""
    L.seed_everything(11, verbose=False)
    module = make()
    log = GradientLog()
    trainer = make_trainer(strategy, callbacks=[log, *callbacks()], **options)
    trainer.fit(module, train if train is not None else classification_data(), val, ckpt_path=ckpt_path)
    return Run(trainer, module, torch.get_rng_state(), log.gradients)


def fit_both(
    make: Callable[[], L.LightningModule], thunder_options: dict | None = None, **options: Any
) -> tuple[Run, Run]:
    """The same fit under our strategy and under Lightning's for one device."""
    return fit(make, thunder(**(thunder_options or {})), **options), fit(make, "auto", **options)


def assert_same_training(ours: Run, eager: Run) -> None:
    """Weights, buffers, gradients, metrics, progress bar, optimizer states and random numbers are bit-equal."""
    assert_same_state(ours.module, eager.module)
    assert len(ours.gradients) == len(eager.gradients)
    for index, (one, other) in enumerate(zip(ours.gradients, eager.gradients)):
        for name, gradient in other.items():
            assert_same(one[name], gradient, f"gradient of {name} at step {index}")
    for kind in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        assert_same(dict(getattr(ours.trainer, kind)), dict(getattr(eager.trainer, kind)), kind)
    for one, other in zip(ours.trainer.optimizers, eager.trainer.optimizers, strict=True):
        assert_same(one.state_dict(), other.state_dict(), "optimizer")
    assert ours.trainer.global_step == eager.trainer.global_step
    assert torch.equal(ours.random, eager.random), "the random number generator is in another state"


def assert_same_state(module: nn.Module, other: nn.Module) -> None:
    assert_same(dict(module.state_dict()), dict(other.state_dict()), "state")


def assert_same(actual: Any, expected: Any, where: str) -> None:
    """Equal structures; tensors bit-equal, NaN equal to NaN."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), where
        assert actual.dtype == expected.dtype, f"{where}: {actual.dtype} is not {expected.dtype}"
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{where}: {m}")
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(actual[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for index, (one, other) in enumerate(zip(actual, expected)):
            assert_same(one, other, f"{where}[{index}]")
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(actual), where
    else:
        assert actual == expected, where


@contextmanager
def compile_warnings() -> Iterator[list[str]]:
    """Collects the texts of our warnings."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts.extend(str(item.message) for item in caught if issubclass(item.category, lts.CompileWarning))
