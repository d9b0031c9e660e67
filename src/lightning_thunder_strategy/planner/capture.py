"""Runs a Trainer up to its first training step, and takes the program of that step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_thunder_strategy.planner.observe import Observed, PlanError, Planned, Unplannable
from lightning_thunder_strategy.planner.rank import PlannedEngine


@dataclass(frozen=True)
class Captured:
    """What a Trainer was about to run.

    Attributes:
        observed: The program of the first training step.
        module: As the strategy has set it up; its parameters have no values.
        optimizers: Over its parameters.
        batch: Tensors of the first batch.
        engine: Of the strategy.
        fused: Whether TorchInductor compiles the program.
        strategy: Name of the strategy's class.
    """

    observed: Observed
    module: nn.Module
    optimizers: tuple[Optimizer, ...]
    batch: tuple[torch.Tensor, ...]
    engine: PlannedEngine
    fused: bool
    strategy: str


def capture(trainer: "pl.Trainer", run: Callable[[], Any]) -> Captured:
    """Run a Trainer that :func:`~lightning_thunder_strategy.planner.rank.prepare` has prepared.

    Args:
        trainer: The Trainer.
        run: Calls its ``fit``.

    Raises:
        PlanError: If it ends without a training step, or the step is not one program.
    """
    strategy: Any = trainer.strategy
    engine = strategy._engine
    if trainer.accumulate_grad_batches != 1:
        raise PlanError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} is not planned: give 1 to plan one micro-batch "
            "that reduces its gradients."
        )
    batches: list[Any] = []
    call = strategy.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        batches.append((args, kwargs))
        return call(*args, **kwargs)

    strategy.training_step = training_step
    try:
        run()
    except Planned as planned:
        tensors = [value for value in tree_leaves(batches[-1]) if isinstance(value, torch.Tensor)]
        return Captured(
            planned.observed,
            strategy.lightning_module,
            tuple(strategy.optimizers),
            tuple(tensors),
            engine,
            engine.fused,
            type(strategy).__name__,
        )
    except Unplannable as found:
        step = strategy._steps.get("training_step")
        reason = getattr(step, "_reason", "") or f"it is compiled {found}"
        raise PlanError(f"the training step is not one program with gradients: {reason}.") from None
    finally:
        del strategy.training_step
    raise PlanError("the run ended before a training step: is there a batch, and does training_step return a loss?")
