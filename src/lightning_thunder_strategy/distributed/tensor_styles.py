"""What an entry of a tensor-parallel plan does with one module: where its parameters are, and how it computes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Optional, Union

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_thunder_strategy.distributed.tensor_collectives import (
    copy_to_ranks,
    join_logits,
    join_parts,
    join_to_ranks,
    own_part,
    own_part_of_sum,
    sum_over_ranks,
)

Plan = Union[Literal["auto"], dict[str, str]]

SEQUENCE = 1  # dimension of activations that is split by entries about the sequence


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that compute one layer together.

    Attributes:
        size: How many.
        rank: Which of them this one is.
        name: Of their process group.
    """

    size: int
    rank: int
    name: str

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "TensorGroup":
        """The group of dimension ``tensor`` of a mesh that this rank is in."""
        return cls(mesh.size(0), mesh.get_local_rank("tensor"), mesh.get_group("tensor").group_name)


@dataclass(frozen=True)
class Form:
    """What a module of a tensor-parallel model sees of one of its parameters in a step.

    Attributes:
        rest: The dimension that is split over the tensor-parallel ranks at rest; ``None``: whole on each.
        kind: ``"part"``: what this rank has. ``"whole"``: all of it. ``"rows"``: some rows of all of it.
        summed: Whether each rank's gradient is a part of a sum over the ranks; otherwise each has the gradient. It is
            for ``"rows"``.
        rows: First and last (exclusive) row of each block of ``"rows"``.
    """

    rest: Optional[int] = None
    kind: Literal["part", "whole", "rows"] = "whole"
    summed: bool = False
    rows: tuple[tuple[int, int], ...] = ()


Forward = Callable[..., Tensor]  # (module, input) -> output, where ``module`` sees parameters in their forms


@dataclass(frozen=True)
class Style:
    """One kind of entry.

    Attributes:
        kinds: The module classes it is for, whose own ``forward`` is used; empty: any.
        rest: By parameter, the dimension split over the ranks at rest.
        summed: The parameters of which each rank has a part of the gradient; ``True``: all.
        divides: What must divide by the number of ranks: attributes of the module.
        forward: Makes the forward of a module, from its own; ``None``: it stays.
    """

    kinds: tuple[type, ...] = ()
    rest: dict[str, int] = field(default_factory=dict)
    summed: Any = ()
    divides: tuple[str, ...] = ()
    forward: Optional[Callable[[TensorGroup, Callable], Forward]] = None

    def is_summed(self, name: str) -> bool:
        return self.summed is True or name in (self.summed or ())


# ---------------------------------------------------------------------------------------------------------- forwards


def _colwise(group: TensorGroup, own: Callable) -> Forward:
    return lambda module, x: own(module, copy_to_ranks(x, group.name))


def _colwise_gathering(group: TensorGroup, own: Callable) -> Forward:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        return join_parts(own(module, copy_to_ranks(x, group.name)), -1, group.size, group.rank, group.name)

    return forward


def _colwise_to_loss(group: TensorGroup, own: Callable) -> Forward:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        return join_logits(own(module, copy_to_ranks(x, group.name)), -1, group.size, group.rank, group.name)

    return forward


def _from_sequence(group: TensorGroup, own: Callable) -> Forward:
    def forward(module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(module, join_to_ranks(x, SEQUENCE, group.size, group.name), *args, **kwargs)

    return forward


def _rowwise(group: TensorGroup, own: Callable) -> Forward:
    def forward(module: nn.Linear, x: Tensor) -> Tensor:
        return _plus(sum_over_ranks(F.linear(x, module.weight), group.name), module.bias)

    return forward


def _rowwise_splitting(group: TensorGroup, own: Callable) -> Forward:
    rowwise = _rowwise(group, own)
    return lambda module, x: rowwise(module, own_part(x, -1, group.size, group.rank, group.name))


def _rowwise_to_sequence(group: TensorGroup, own: Callable) -> Forward:
    def forward(module: nn.Linear, x: Tensor) -> Tensor:
        y = F.linear(x, module.weight)
        _check_sequence(y, group)
        return _plus(own_part_of_sum(y, SEQUENCE, group.size, group.name), module.bias)

    return forward


def _plus(x: Tensor, bias: Optional[Tensor]) -> Tensor:
    return x if bias is None else x + bias.to(x.dtype)  # as linear layers do under autocast


def _embedding_rowwise(group: TensorGroup, own: Callable) -> Forward:
    def forward(module: nn.Embedding, index: Tensor) -> Tensor:
        weight, first, padding = module.weight, group.rank * module.weight.shape[0], module.padding_idx
        elsewhere = (index < first) | (index >= first + weight.shape[0])
        own_padding = padding - first if padding is not None else -1
        rows = F.embedding(
            (index - first).masked_fill(elsewhere, 0),
            weight,
            padding_idx=own_padding if 0 <= own_padding < weight.shape[0] else None,
        )
        return sum_over_ranks(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), group.name)

    return forward


def _splitting_sequence(group: TensorGroup, own: Callable) -> Forward:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        y = own(module, *args, **kwargs)
        _check_sequence(y, group)
        return own_part(y, SEQUENCE, group.size, group.rank, group.name)

    return forward


def _joining_sequence(group: TensorGroup, own: Callable) -> Forward:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return join_parts(own(module, *args, **kwargs), SEQUENCE, group.size, group.rank, group.name)

    return forward


def _check_sequence(x: Tensor, group: TensorGroup) -> None:
    if x.shape[SEQUENCE] % group.size:
        raise ValueError(
            f"Sequence parallelism: the length {x.shape[SEQUENCE]} of the sequence does not divide by the "
            f"{group.size} tensor-parallel ranks. Pad batches to a multiple of {group.size}."
        )


_COLUMNS = {"weight": 0, "bias": 0}
_LINEAR = (nn.Linear,)

STYLES: dict[str, Style] = {
    "colwise": Style(_LINEAR, _COLUMNS, (), ("out_features",), _colwise),
    "colwise_gather_output": Style(_LINEAR, _COLUMNS, (), ("out_features",), _colwise_gathering),
    "colwise_loss_parallel": Style(_LINEAR, _COLUMNS, (), ("out_features",), _colwise_to_loss),
    "local_colwise": Style(_LINEAR, _COLUMNS, (), ("out_features",)),
    "rowwise": Style(_LINEAR, {"weight": 1}, (), ("in_features",), _rowwise),
    "rowwise_split_input": Style(_LINEAR, {"weight": 1}, (), ("in_features",), _rowwise_splitting),
    "rowwise_scatter_sequence": Style(_LINEAR, {"weight": 1}, ("bias",), ("in_features",), _rowwise_to_sequence),
    "embedding_rowwise": Style((nn.Embedding,), {"weight": 0}, (), ("num_embeddings",), _embedding_rowwise),
    "replicated_with_grad_allreduce": Style(summed=True),
    "sequence_parallel": Style(summed=True),
    "sequence_parallel_gather_output": Style(summed=True, forward=_joining_sequence),
    "gather_sequence_input": Style(forward=_from_sequence),
    "split_sequence_output": Style(forward=_splitting_sequence),
}
"""Every entry that a plan may name. What each does is in ``docs/sharding.md``."""

ALIASES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
"""Names of the same in other releases of Hugging Face Transformers."""


def check_entries(plan: Mapping[str, str]) -> None:
    """Raise ``ValueError`` unless all entries of a plan are known."""
    known = [*STYLES, *ALIASES]
    for glob, style in plan.items():
        if style not in known:
            raise ValueError(
                f"plan: {glob!r}: {style!r} is not an entry that is known. Known are: {', '.join(sorted(known))}."
            )
