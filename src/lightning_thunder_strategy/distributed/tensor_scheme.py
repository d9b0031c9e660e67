"""Parameters of tensor-parallel models: where they are at rest, and what a step sees of them."""

import dataclasses
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from lightning_thunder_strategy.distributed.schemes import Scheme, Sharded
from lightning_thunder_strategy.distributed.tensor_parallel import resting_dim
from lightning_thunder_strategy.distributed.tensor_styles import Form, TensorGroup


@dataclass(frozen=True)
class TensorParallel(Sharded):
    """Parameters are split over dimension ``tensor`` of the mesh by a plan, and then over ``data``.

    A step gathers over ``data`` and averages gradients over it. What it sees of the dimension ``tensor`` is the form
    that the plan gives the parameter.

    Attributes:
        spread: Whether ``data`` shards each part further (ZeRO), or repeats it.
        form: Of the parameters that are gathered.
        group: The tensor-parallel ranks.
    """

    spread: bool = True
    form: Optional[Form] = None

    @property
    def group(self) -> TensorGroup:
        return TensorGroup.of(self.mesh)

    def of_form(self, form: Form) -> Scheme:
        return dataclasses.replace(self, form=form)

    def accepts(self, parameter: Tensor) -> bool:
        return isinstance(parameter, DTensor) and parameter.device_mesh == self.mesh

    def _placements(self, parameter: Tensor) -> list[Placement]:
        dim = resting_dim(parameter)
        on_data = Shard(0) if self.spread and parameter.ndim else Replicate()
        return [Replicate() if dim is None else Shard(dim), on_data]

    def _gather(self, parameter: Tensor) -> Tensor:
        form = self.form or Form()
        on_tensor, on_data = parameter.placements  # type: ignore[attr-defined]
        shape, stride = self._part(parameter, form)
        summed_here = Partial() if form.rest is None and form.summed else on_tensor
        same = parameter.redistribute(placements=[on_tensor, on_data])  # whose gradient is summed if it must be
        part = same.to_local(grad_placements=[summed_here, on_data])
        stored = DTensor.from_local(
            part, self.mesh["data"], [on_data], run_check=False, shape=torch.Size(shape), stride=stride
        )
        part = stored.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])
        if form.kind == "part" or form.rest is None:
            return part
        parts = DTensor.from_local(
            part,
            self.mesh["tensor"],
            [on_tensor],
            run_check=False,
            shape=parameter.shape,
            stride=_dense(parameter.shape),
        )
        whole = parts.redistribute(placements=[Replicate()])
        if form.kind == "whole":
            return whole.to_local(grad_placements=[Partial() if form.summed else Replicate()])
        whole = whole.to_local(grad_placements=[Partial()])
        return torch.cat([whole[first:last] for first, last in form.rows])

    def _part(self, parameter: Tensor, form: Form) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Size and stride of this rank's part of the dimension ``tensor``; plans split only what divides."""
        shape = parameter.shape
        if form.rest is None:
            return tuple(shape), parameter.stride()
        sizes = tuple(size // self.mesh.size(0) if dim == form.rest else size for dim, size in enumerate(shape))
        return sizes, _dense(sizes)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The stride of a tensor in row order."""
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * max(shape[dim + 1], 1)
    return tuple(stride)
