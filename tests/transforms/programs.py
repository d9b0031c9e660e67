"""Compiles a function over sharded modules with some passes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.compiler.report import Program
from lightning_thunder_strategy.distributed.schemes import Replicated, Sharded
from lightning_thunder_strategy.distributed.sharding import gathering, parallelize

GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"


def compiled(
    function: Callable,
    module: nn.Module,
    mesh: DeviceMesh,
    passes: Sequence[lts.Transform],
    *args: Any,
    ddp: bool = False,
) -> Program:
    """The program of ``function(*args)`` over ``module``, whose parameters are sharded, or replicated (``ddp``)."""
    parallelize(module, Replicated(mesh) if ddp else Sharded(mesh))
    run = lts.compile(function, ["eager"], passes, lts.CompileConfig(fullgraph=True))
    with gathering():
        result = run(*args)
    if isinstance(result, torch.Tensor) and result.requires_grad:
        result.sum().backward()
    (program,) = run.record.programs
    return program


def counts(program: Program) -> dict[str, dict[str, int]]:
    return {stage: {item.op: item.count for item in items} for stage, items in program.collectives.items()}
