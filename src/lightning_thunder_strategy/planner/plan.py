"""``lts.plan``: what a training step on any number of devices takes, found on a machine that has none of them."""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Optional, get_args

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_thunder_strategy.compiler.config import check_choice
from lightning_thunder_strategy.distributed.sharding import original_class
from lightning_thunder_strategy.planner.capture import Captured, capture
from lightning_thunder_strategy.planner.flops import graph_flops
from lightning_thunder_strategy.planner.machines import GPUS, INTERCONNECTS, GPUName, InterconnectName
from lightning_thunder_strategy.planner.memory import step_memory, step_programs
from lightning_thunder_strategy.planner.observe import PlanError
from lightning_thunder_strategy.planner.optimizers import optimizer_memory
from lightning_thunder_strategy.planner.rank import LoneRank, nodes, prepare, trainer_options, world
from lightning_thunder_strategy.planner.report import Plan
from lightning_thunder_strategy.planner.timing import Machine, step_time
from lightning_thunder_strategy.strategies.trainer_base import CompiledStepsStrategy

Loss = Callable[[nn.Module, Any], Tensor]


def plan(
    module: nn.Module,
    batch: Any,
    strategy: CompiledStepsStrategy,
    devices: int = 512,
    devices_per_node: int = 8,
    precision: Optional[str] = None,
    gpu: GPUName = "H100",
    interconnect: InterconnectName = "infiniband-ndr",
    efficiency: float = 1.0,
    loss: Optional[Loss] = None,
    optimizer: Callable[[Any], Optimizer] = torch.optim.AdamW,
) -> Plan:
    """Plan a training step: the program of one rank is made as it would be there, and is not run.

    Nothing of ``module`` and ``strategy`` is changed, and no parameter gets memory, so that models of any size can be
    planned. The process must not have joined a process group.

    Args:
        module: A LightningModule, or any module together with ``loss``.
        batch: A batch for one rank, as the training dataloader yields it. Its values are not used.
        strategy: One of our Trainer strategies.
        devices: How many devices train, each with a process of its own.
        devices_per_node: How many of them a node has.
        precision: As the Trainer's option: ``"bf16-true"``, ``"bf16-mixed"``; by default 32 bits.
        gpu: Which GPU they are.
        interconnect: What connects nodes.
        efficiency: The part of the datasheets' speeds that kernels and links reach; 1: times are lower bounds.
        loss: For a module that is not a LightningModule: takes the module and the batch and returns the loss.
        optimizer: For a module that is not a LightningModule: makes its optimizer from an iterable of parameters.

    Returns:
        The plan.

    Raises:
        PlanError: If the step cannot be planned; the message says why in a line.
        ValueError: If an option has a value that is not allowed.
    """
    machine = machine_of(devices, devices_per_node, gpu, interconnect, efficiency)
    planned = _copy_of(module)
    if not isinstance(planned, pl.LightningModule):
        if loss is None:
            raise PlanError(f"{type(module).__name__} is not a LightningModule: give loss=, which makes a loss of it.")
        planned = _Trained(planned, loss, optimizer)
    elif loss is not None:
        raise PlanError("loss is given together with a LightningModule, whose training_step makes the loss.")
    options = trainer_options(devices, devices_per_node)
    if precision is not None:
        options["precision"] = precision
    loader = DataLoader([batch], batch_size=None, collate_fn=_unchanged)
    with quiet(), world(devices):
        trainer = pl.Trainer(
            strategy=copy.deepcopy(strategy), plugins=[LoneRank(devices)] if devices > 1 else [], max_steps=1,
            use_distributed_sampler=False, **options,
        )  # fmt: skip
        prepare(trainer)
        captured = capture(trainer, lambda: trainer.fit(planned, loader))
        return plan_of(captured, devices, machine.devices_per_node, machine)


def plan_of(captured: Captured, devices: int, devices_per_node: int, machine: Machine) -> Plan:
    """The plan of a program that was captured; its process groups must exist yet."""
    optimizer = optimizer_memory(captured.optimizers)
    programs = step_programs(captured.observed, captured.fused)
    memory = step_memory(
        programs, captured.module, captured.batch, optimizer, captured.fused, captured.observed.keeps_gradients
    )
    times, collectives = step_time(programs, graph_flops(captured.observed.joint), optimizer.moved, machine)
    return Plan(
        strategy=captured.strategy,
        module=original_class(captured.module).__name__,
        devices=devices,
        devices_per_node=devices_per_node,
        gpu=machine.gpu.name,
        interconnect=machine.interconnect.name,
        efficiency=machine.efficiency,
        compiled_by="inductor" if captured.fused else "eager",
        memory=memory,
        workspace=machine.gpu.workspace,
        capacity=machine.gpu.memory,
        collectives=collectives,
        time=times,
    )


def machine_of(devices: int, devices_per_node: int, gpu: str, interconnect: str, efficiency: float) -> Machine:
    """What the options of the same names say, checked.

    Raises:
        ValueError: If a value is not allowed; the message names the option, the value and what is allowed.
    """
    check_choice("gpu", gpu, get_args(GPUName))
    check_choice("interconnect", interconnect, get_args(InterconnectName))
    _check_count("devices", devices)
    _check_count("devices_per_node", devices_per_node)
    if isinstance(efficiency, bool) or not isinstance(efficiency, (int, float)) or not 0 < efficiency <= 1:
        raise ValueError(f"efficiency={efficiency!r} is not allowed: give a number above 0, up to 1.")
    count, each = nodes(devices, devices_per_node)
    if count > 1 and interconnect == "nvlink":
        raise ValueError(
            f"interconnect='nvlink' is not allowed with devices={devices} on {count} nodes: choose one of "
            f"{', '.join(name for name, net in INTERCONNECTS.items() if net.bandwidth)}."
        )
    return Machine(GPUS[gpu], INTERCONNECTS[interconnect], each, float(efficiency))


class _Trained(pl.LightningModule):
    """Makes a LightningModule of a module and a loss."""

    def __init__(self, model: nn.Module, loss: Loss, optimizer: Callable[[Any], Optimizer]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(self.model, batch)

    def configure_optimizers(self) -> Optimizer:
        return self._optimizer(self.parameters())


def _copy_of(module: nn.Module) -> nn.Module:
    """A copy whose parameters are on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        made = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        memo[id(parameter)] = made
    for attached in ("_trainer", "_fabric"):
        if getattr(module, attached, None) is not None:
            memo[id(getattr(module, attached))] = None
    return copy.deepcopy(module, memo)


def _unchanged(batch: Any) -> Any:
    return batch


def _check_count(option: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{option}={value!r} is not allowed: give a number of devices, 1 or more.")


@contextmanager
def quiet() -> Iterator[None]:
    """While open, the Trainer says nothing: it trains nothing."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
