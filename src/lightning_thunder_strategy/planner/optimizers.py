"""What an optimizer keeps, and what its step takes for a while: found by running it without values."""

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_thunder_strategy.compiler._torch_hollow import without_values
from lightning_thunder_strategy.planner.hollow import local
from lightning_thunder_strategy.planner.liveness import ROUND


@dataclass(frozen=True)
class OptimizerMemory:
    """Memory of the optimizers of a step.

    Attributes:
        state: Bytes that they keep from step to step.
        temporary: Most bytes that a step takes besides, at once.
        moved: Bytes that a step reads and writes: parameters, gradients and states.
    """

    state: int = 0
    temporary: int = 0
    moved: int = 0


def optimizer_memory(optimizers: Sequence[Optimizer]) -> OptimizerMemory:
    """Take a step of each optimizer on parameters and gradients without values.

    Raises:
        RuntimeError: Naming the optimizer that cannot take a step without values.
    """
    state = temporary = moved = 0
    for optimizer in optimizers:
        with without_values():
            made = _copy_of(getattr(optimizer, "_optimizer", optimizer))
            _step(made)  # makes the state
            tracked = _Allocations()
            with tracked:
                _step(made)
        tensors = [value for value in tree_leaves(dict(made.state)) if isinstance(value, torch.Tensor)]
        held = sum(_bytes(value) for value in tensors)
        parameters = sum(_bytes(p) for group in made.param_groups for p in group["params"] if p.grad is not None)
        state += held
        temporary = max(temporary, tracked.peak)
        moved += 2 * held + 3 * parameters
    return OptimizerMemory(state, temporary, moved)


def _step(optimizer: Optimizer) -> None:
    try:
        with torch.no_grad():
            type(optimizer).step(optimizer)
    except Exception as error:
        raise RuntimeError(
            f"the optimizer {type(optimizer).__name__} cannot take a step without values: {error}"
        ) from error


def _copy_of(optimizer: Optimizer) -> Optimizer:
    """A copy whose parameters and gradients have no values. It runs as it would on a GPU."""
    copies: dict[int, Any] = {}
    foreach = True
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            foreach = foreach and not isinstance(parameter, DTensor)
            held = local(parameter.detach())
            made = nn.Parameter(
                torch.empty_strided(held.shape, held.stride(), dtype=held.dtype), parameter.requires_grad
            )
            if parameter.requires_grad:
                made.grad = torch.empty_like(made)
            copies[id(parameter)] = made
    groups = [{**group, "params": [copies[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    made = copy.copy(optimizer)
    made.__dict__ = {**optimizer.__dict__}
    made.param_groups = [_as_on_gpu(group, foreach) for group in groups]
    made.state = type(optimizer.state)(optimizer.state.default_factory)
    made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks = {}, {}
    made.defaults = dict(optimizer.defaults)
    return made


def _as_on_gpu(group: dict[str, Any], foreach: bool) -> dict[str, Any]:
    """Torch chooses the implementation by the device: on a GPU one over lists of tensors, where there is one.

    Distributed tensors it takes one by one.
    """
    if "foreach" in group and group["foreach"] is None and not group.get("fused") and foreach:
        return {**group, "foreach": True}
    return group


def _bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.untyped_storage().nbytes() // ROUND) * ROUND


class _Allocations(TorchDispatchMode):
    """Bytes of tensors that were made while it is open, and of which somebody still holds one."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._known: dict[int, Optional[weakref.finalize]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Optional[dict] = None) -> Any:
        tree_map(self._exists, (args, kwargs))
        result = func(*args, **(kwargs or {}))
        tree_map(self._made, result)
        return result

    def _exists(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self._known.setdefault(value.untyped_storage()._cdata, None)
        return value

    def _made(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            key = storage._cdata
            if key not in self._known:
                size = _bytes(value)
                self._now += size
                self.peak = max(self.peak, self._now)
                self._known[key] = weakref.finalize(storage, self._gone, key, size)
        return value

    def _gone(self, key: int, size: int) -> None:
        self._now -= size
        self._known.pop(key, None)
