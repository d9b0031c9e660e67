"""Where parameters are at rest, and what a step sees of them."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from lightning_thunder_strategy.distributed.accumulation import (
    adding_gradient,
    gather_unreduced,
    reduces_always,
    waiting_gradient,
)
from lightning_thunder_strategy.distributed.tensor_styles import Form


@dataclass(frozen=True)
class Scheme:
    """How a module's parameters are spread over the ranks of a mesh. Subclasses say how.

    Attributes:
        mesh: The data-parallel ranks.
    """

    mesh: DeviceMesh
    copies: ClassVar[bool] = False  # whether what a step sees is a copy, whose edits would be lost

    @property
    def accumulates(self) -> bool:
        """Whether gradients of several micro-batches may stay on their rank until the last one reduces them."""
        return True

    def place(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter at rest: what optimizers, callbacks and checkpoints see. May communicate."""
        raise NotImplementedError

    def gather(self, parameter: Tensor, local: bool = False) -> Tensor:
        """The plain tensor that a step computes with. Traced by Dynamo.

        It requires a gradient where the parameter does, like the parameter also while gradients are not recorded.

        Args:
            parameter: As it is stored.
            local: Whether its gradient stays this rank's own, instead of being averaged over the ranks.
        """
        if not parameter.requires_grad:
            return self._gather(parameter)
        if torch.is_grad_enabled():
            return self._gather_for_gradient(parameter, local)
        with torch.enable_grad():
            return self._gather_for_gradient(parameter, local)

    def _gather_for_gradient(self, parameter: Tensor, local: bool) -> Tensor:
        if local and not reduces_always(parameter):
            return self._gather_local(parameter)
        waiting = waiting_gradient(parameter)
        gathered = self._gather(parameter)
        return gathered if waiting is None else adding_gradient(gathered, waiting)

    def _gather(self, parameter: Tensor) -> Tensor:
        raise NotImplementedError

    def _gather_local(self, parameter: Tensor) -> Tensor:
        raise NotImplementedError

    def accepts(self, parameter: Tensor) -> bool:
        """Whether a stored parameter is one that :meth:`place` made."""
        raise NotImplementedError

    def holds(self, parameter: Tensor) -> bool:
        """Whether a distributed parameter is stored as this scheme stores it."""
        return False

    def of_form(self, form: Form) -> "Scheme":
        """The scheme for parameters that a tensor-parallel plan has given a form."""
        raise NotImplementedError


@dataclass(frozen=True)
class Replicated(Scheme):
    """Every rank holds the whole plain parameter; gradients are averaged by an all-reduce in the backward (DDP)."""

    def place(self, parameter: nn.Parameter) -> nn.Parameter:
        with torch.no_grad():
            torch.distributed.broadcast(parameter.data, group=self.mesh.get_group(), group_src=0)
        return parameter

    def _gather(self, parameter: Tensor) -> Tensor:
        if not parameter.requires_grad:
            return parameter
        replicated = DTensor.from_local(parameter, self.mesh, [Replicate()], run_check=False)
        return replicated.to_local(grad_placements=[Partial("avg")])

    def _gather_local(self, parameter: Tensor) -> Tensor:
        return parameter

    def accepts(self, parameter: Tensor) -> bool:
        return not isinstance(parameter, DTensor)


@dataclass(frozen=True)
class Sharded(Scheme):
    """Every rank holds a part of the rows (dimension 0) of each parameter; a step gathers the whole parameter where it
    is used and reduce-scatters its gradient (ZeRO, see https://arxiv.org/abs/1910.02054).

    Attributes:
        whole_gradients: Whether gradients stay whole on each rank while micro-batches accumulate (ZeRO-1).
    """

    whole_gradients: bool = False
    copies: ClassVar[bool] = True

    @property
    def accumulates(self) -> bool:
        return self.whole_gradients

    def place(self, parameter: nn.Parameter) -> nn.Parameter:
        if isinstance(parameter, DTensor):
            return parameter
        placements = self._placements(parameter)
        placed = nn.Parameter(distribute_tensor(parameter.data, self.mesh, placements), parameter.requires_grad)
        _carry_over(parameter, placed)
        return placed

    def _placements(self, parameter: Tensor) -> list[Placement]:
        return [Shard(0) if parameter.ndim else Replicate()]

    def _gather(self, parameter: Tensor) -> Tensor:
        return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])

    def _gather_local(self, parameter: Tensor) -> Tensor:
        return gather_unreduced(parameter)  # type: ignore[arg-type]

    def accepts(self, parameter: Tensor) -> bool:
        return isinstance(parameter, DTensor)

    def holds(self, parameter: Tensor) -> bool:
        placements = list(parameter.placements)  # type: ignore[attr-defined]
        return parameter.device_mesh == self.mesh and placements == self._placements(parameter)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class HybridSharded(Sharded):
    """Several replicas of the shards: dimension ``shard`` of the mesh shards, ``replicate`` repeats (hybrid sharding).

    Gradients are reduce-scattered among the ranks that share a replica, and the shards all-reduced among replicas.
    """

    def _placements(self, parameter: Tensor) -> list[Placement]:
        return [Replicate(), *super()._placements(parameter)]

    def _gather(self, parameter: Tensor) -> Tensor:
        kept = parameter.placements  # type: ignore[attr-defined]
        same = parameter.redistribute(placements=kept)  # whose gradient is reduced among replicas
        local = same.to_local(grad_placements=[Partial("avg"), kept[1]])
        shard = DTensor.from_local(
            local, self.mesh["shard"], [kept[1]], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def _carry_over(old: nn.Parameter, new: nn.Parameter) -> None:
    """Hooks and attributes that users have put on a parameter stay with it."""
    new.__dict__.update(old.__dict__)
    for hooks, register in (
        (old._backward_hooks, new.register_hook),
        (getattr(old, "_post_accumulate_grad_hooks", None), new.register_post_accumulate_grad_hook),
    ):
        for hook in list((hooks or {}).values()):
            register(hook)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a distributed tensor, on every rank (a collective); a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def place_like(value: Any, like: Any) -> Any:
    """``value`` distributed as ``like``, if ``like`` is a distributed tensor of the same shape."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != like.shape:
        return value
    mesh, placements = like.device_mesh, like.placements
    if mesh.ndim == 1 and isinstance(placements[0], Shard):
        dim, rank = placements[0].dim, mesh.get_local_rank()
        parts = torch.chunk(value, mesh.size(), dim)
        local = parts[rank] if rank < len(parts) else value.narrow(dim, 0, 0)
        local = local.to(like.to_local().device, copy=True)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=like.stride())
    return distribute_tensor(value.to(like.device), mesh, placements, src_data_rank=None)


def local_bytes(tensor: Tensor) -> int:
    """Bytes that this rank stores of a tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()
