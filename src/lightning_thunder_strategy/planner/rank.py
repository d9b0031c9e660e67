"""Lets a Trainer with one of our strategies believe that it is one rank of many."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Optional

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn
from typing_extensions import override

from lightning_thunder_strategy.compiler._torch_hollow import join_fake_group
from lightning_thunder_strategy.compiler.config import Mode
from lightning_thunder_strategy.compiler.pipeline import Pipeline
from lightning_thunder_strategy.planner.hollow import make_hollow, make_meta
from lightning_thunder_strategy.planner.observe import Observe, PlanError
from lightning_thunder_strategy.strategies.engine import Engine
from lightning_thunder_strategy.strategies.trainer_base import CompiledStepsStrategy


class LoneEngine(Engine):
    """The engine of rank 0 of many, of which it is the only one that exists: there is nobody to agree with.

    Args:
        engine: As the strategy was configured.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(
            dataclasses.replace(engine.options, report=False),
            engine.parallelism,
            engine.timeout,
            engine.communication,
            engine.replicas,
            engine.tensor,
        )
        self.precision_passes = engine.precision_passes

    @override
    def connect_ranks(self, device: torch.device, on_node: int) -> None:
        super().connect_ranks(device, on_node)
        self.agreement = None

    @override
    def check_inputs(self, name: str, inputs: Any) -> None:
        """Other ranks' inputs are arbitrary."""


class PlannedEngine(LoneEngine):
    """Parameters have no values, and the first program of a step ends the run.

    Attributes:
        fused: Whether TorchInductor compiles the program.
    """

    fused = False

    @override
    def _materialize(self, module: nn.Module, device: torch.device) -> dict[nn.Parameter, nn.Parameter]:
        make_meta(module)
        if not self.sharded:
            make_hollow(module)
        return {}

    @override
    def spread(self, module: nn.Module, device: torch.device) -> dict[nn.Parameter, nn.Parameter]:
        replaced = super().spread(module, device)
        make_hollow(module)
        return replaced

    @override
    def release_module(self, module: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
        make_hollow(module)  # Lightning moves it after this, and an error of the program came first
        return super().release_module(module)

    @override
    def pipeline(
        self, modules: Mapping[str, nn.Module], fullgraph: bool, mode: Optional[Mode] = None, number: int = 0
    ) -> Pipeline:
        pipeline = super().pipeline(modules, fullgraph, mode, number)
        pipeline.config = dataclasses.replace(pipeline.config, on_error="raise")
        self.fused = any(executor.name == "inductor" for executor in pipeline.executors)
        whole = fullgraph and pipeline.config.mode == "step"
        pipeline.transforms = (*pipeline.transforms, Observe(pipeline, whole))
        return pipeline


class LoneRank(LightningEnvironment):
    """Rank 0 of a cluster.

    Args:
        devices: Of the cluster.
    """

    def __init__(self, devices: int) -> None:
        super().__init__()
        self._devices = devices

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @override
    def world_size(self) -> int:
        return self._devices

    @override
    def set_world_size(self, size: int) -> None:
        pass

    @override
    def set_global_rank(self, rank: int) -> None:
        pass

    @override
    def global_rank(self) -> int:
        return 0

    @override
    def local_rank(self) -> int:
        return 0

    @override
    def node_rank(self) -> int:
        return 0


@contextmanager
def world(devices: int) -> Iterator[None]:
    """While open, this process is rank 0 of ``devices``.

    Raises:
        PlanError: If it is a rank of a real process group already.
    """
    if torch.distributed.is_initialized():
        raise PlanError("this process has joined a process group already: plan in a process of its own.")
    if devices > 1:
        join_fake_group(devices)
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def nodes(devices: int, per_node: int) -> tuple[int, int]:
    """Number of nodes, and of devices on each.

    Raises:
        PlanError: If they do not fit.
    """
    if devices <= per_node:
        return 1, devices
    if devices % per_node:
        raise PlanError(f"devices={devices} is not a multiple of devices_per_node={per_node}.")
    return devices // per_node, per_node


def trainer_options(devices: int, per_node: int) -> dict[str, Any]:
    """What a Trainer must be told so that it is rank 0 of ``devices``, takes one step and writes nothing."""
    count, each = nodes(devices, per_node)
    return {
        "accelerator": "cpu", "devices": each, "num_nodes": count, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0, "detect_anomaly": False,
        "profiler": None, "fast_dev_run": False, "limit_val_batches": 0, "val_check_interval": None,
    }  # fmt: skip


def prepare(trainer: "pl.Trainer", engine: type[LoneEngine] = PlannedEngine) -> CompiledStepsStrategy:
    """Make a Trainer's strategy plan, or run, as a lone rank.

    Raises:
        PlanError: If the strategy is not one of ours.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, CompiledStepsStrategy):
        raise PlanError(
            f"the Trainer's strategy is {type(strategy).__name__}, whose program is not known: choose ThunderStrategy, "
            "ThunderDDPStrategy, ThunderFSDPStrategy or ThunderTPStrategy."
        )
    strategy._use(engine(strategy._engine))
    return strategy
