"""Trains under a strategy and notes everything that must be equal under another."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.distributed.schemes import whole
from tests.distributed.models import Base, make

warnings.filterwarnings("ignore", ".*does not have many workers.*")
PATIENCE = timedelta(seconds=60)


def thunder(kind: str, **options: Any) -> Any:
    """Our strategy called ``kind``: ``ddp``, ``zero2`` or ``zero3``, with the eager executor unless told otherwise."""
    options = {"executors": ["eager"], "timeout": PATIENCE, **options}
    if kind == "ddp":
        return lts.ThunderDDPStrategy(**options)
    return lts.ThunderFSDPStrategy(sharding=kind, **options)


@dataclass
class Result:
    """What a fit did on this rank; parameters and gradients are whole."""

    module: Any
    trainer: Any
    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)


class Watch(L.Callback):
    """Notes losses, gradients and weights."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if isinstance(outputs, dict) and "loss" in outputs:
            self.result.losses.append(outputs["loss"].detach().clone())

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        found = {name: whole(p.grad).clone() for name, p in module.named_parameters() if p.grad is not None}
        self.result.gradients.append(found)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.result.weights = {name: whole(value.detach()).clone() for name, value in module.state_dict().items()}


def trainer(strategy: Any, **options: Any) -> L.Trainer:
    """A quiet Trainer on two CPU processes."""
    quiet = {
        "accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False, "max_epochs": 2,
        "enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False,
    }  # fmt: skip
    return L.Trainer(strategy=strategy, **{**quiet, **options})


def loader(data: Dataset, batch_size: int = 4) -> DataLoader:
    """Batches that, of both ranks together, are those of one process in order."""
    return DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data, shuffle=False))


def fit(strategy: Any, module: Base, data: Dataset, batch_size: int = 4, **options: Any) -> Result:
    """Fit a module; the random numbers of two fits are the same."""
    callbacks, ckpt_path = options.pop("callbacks", []), options.pop("ckpt_path", None)
    result = Result(module, None)
    result.trainer = made = trainer(strategy, **options, callbacks=[*callbacks, Watch(result)])
    torch.manual_seed(11)
    made.fit(module, loader(data, batch_size), loader(data, batch_size), ckpt_path=ckpt_path)
    if not result.weights:  # nothing was left to train
        result.weights = {name: whole(value.detach()).clone() for name, value in module.state_dict().items()}
    result.metrics = {key: value.clone() for key, value in made.callback_metrics.items()}
    return result


def fit_case(strategy: Any, case: str, **options: Any) -> Result:
    return fit(strategy, *make(case), **options)


def fit_fsdp2(case: str, distributed_checkpoint: bool = True, **options: Any) -> Result:
    """The case under Lightning's ModelParallelStrategy, sharded by torch's ``fully_shard``."""
    module, data = make(case)
    original = type(module)

    def configure_model(self: Any) -> None:
        mesh = self.device_mesh["data_parallel"]
        for unit in self.units():
            fully_shard(unit, mesh=mesh)
        if not self.units():
            fully_shard(self, mesh=mesh)

    module.__class__ = type(original.__name__, (original,), {"configure_model": configure_model})
    strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=distributed_checkpoint)
    return fit(strategy, module, data, **options)


def fit_alone(
    case: str,
    batch_size: int = 8,
    epochs: int = 2,
    before_epoch: Callable[[Base, int], None] = lambda module, epoch: None,
    accumulate: int = 1,
) -> Result:
    """The case in a plain loop on the batches of both ranks together, without any strategy or Lightning's loop."""
    module, data = make(case)
    result = Result(module, None)
    module.log = lambda *args, **kwargs: None
    configured = module.configure_optimizers()
    optimizer, schedulers = configured if isinstance(configured, tuple) else (configured, [])
    optimizer = optimizer[0] if isinstance(optimizer, list) else optimizer
    for epoch in range(epochs):
        before_epoch(module, epoch)
        for index, batch in enumerate(DataLoader(data, batch_size=batch_size)):
            loss = module.training_step(batch, index)
            (loss / accumulate).backward()
            result.losses.append(loss.detach())
            if (index + 1) % accumulate:
                continue
            result.gradients.append({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    result.weights = {name: value.clone() for name, value in module.state_dict().items()}
    return result


def assert_equal_results(ours: Result, theirs: Result, losses: bool = True, **tolerance: Any) -> None:
    """Losses, gradients, weights and metrics are equal."""
    close: Callable = lambda a, b, what: torch.testing.assert_close(  # noqa: E731
        a, b, msg=lambda text: f"{what}: {text}", check_dtype=True, **tolerance
    )
    if losses:
        close(ours.losses, theirs.losses, "losses")
    assert len(ours.gradients) == len(theirs.gradients) > 0
    for index, (mine, other) in enumerate(zip(ours.gradients, theirs.gradients)):
        assert_same_gradients(mine, other, f"step {index}", close)
    assert ours.weights.keys() == theirs.weights.keys()
    for name in theirs.weights:
        close(ours.weights[name], theirs.weights[name], f"weight {name}")
    if theirs.trainer is not None:
        close(ours.metrics, theirs.metrics, "metrics")


def assert_same_gradients(mine: dict, other: dict, where: str, close: Callable) -> None:
    """A gradient that one does not have is zero for the other."""
    for name in mine.keys() | other.keys():
        a, b = mine.get(name), other.get(name)
        present = a if a is not None else b
        zero = torch.zeros_like(present)
        close(a if a is not None else zero, b if b is not None else zero, f"{where}, gradient of {name}")
