"""The last linear layer and its cross-entropy loss in chunks of rows, out of plain torch operations. Runs anywhere."""

from dataclasses import dataclass
from typing import Any, ClassVar, Optional

import torch
import torch.nn.functional as F
from torch import fx

from lightning_thunder_strategy.compiler.refusals import told_by_the_parser_too
from lightning_thunder_strategy.executors.base import OperatorExecutor, Replacement
from lightning_thunder_strategy.executors.linear_cross_entropy import arguments, define, find
from lightning_thunder_strategy.executors.registered import is_call_of


def _rows(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, factor: torch.Tensor, wanted: bool
) -> torch.Tensor:
    wide = logits.to(factor.dtype)
    total = wide.logsumexp(-1)
    counts = target != ignore_index
    classes = torch.where(counts, target, 0)[:, None]
    losses = torch.where(counts, total - wide.gather(1, classes)[:, 0], 0)
    if wanted:
        gradient = (wide - total[:, None]).exp_()
        gradient.scatter_add_(1, classes, gradient.new_full((), -1.0).expand(classes.shape))
        logits.copy_(torch.where(counts[:, None], gradient.mul_(factor), 0))
    return losses.sum()


_operator = define("chunked_linear_cross_entropy", _rows)


def chunked_linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], index: Any, target: torch.Tensor,
    ignore_index: int, reduction: str, logits: torch.dtype, loss: torch.dtype, wanted: bool, chunk_rows: int,
) -> torch.Tensor:  # fmt: skip
    """``F.cross_entropy(F.linear(x, weight, bias)[index].flatten(0, -2), target)`` without all logits at once.

    Args:
        x: ``[..., features]``.
        weight: ``[classes, features]``.
        bias: ``[classes]``.
        index: What of the logits' leading dimensions is used; ``None`` for all.
        target: ``[rows]``, class numbers.
        ignore_index: Rows with this target count for nothing.
        reduction: ``"mean"`` or ``"sum"``.
        logits: The type of the logits.
        loss: The type of the result.
        wanted: Whether gradients may be needed.
        chunk_rows: How many rows of logits exist at once.
    """
    x, weight, bias, target = arguments(x, weight, bias, index, target, logits, wanted)
    needs = [wanted and value is not None and value.requires_grad for value in (x, weight, bias)]
    return _operator(x, weight, bias, target, ignore_index, reduction == "mean", chunk_rows, needs)[0].to(loss)


@told_by_the_parser_too
@dataclass(frozen=True)
class ChunkedLossExecutor(OperatorExecutor):
    """A linear layer and the cross-entropy loss of its result, in chunks of rows: all logits are never held at once.

    Args:
        chunk_rows: How many rows (tokens) of logits exist at once.

    Raises:
        ValueError: If that is not a positive number.
    """

    chunk_rows: int = 2048
    name: ClassVar[str] = "chunked_loss"

    def __post_init__(self) -> None:
        if isinstance(self.chunk_rows, bool) or not isinstance(self.chunk_rows, int) or self.chunk_rows < 1:
            raise ValueError(f"ChunkedLossExecutor.chunk_rows={self.chunk_rows!r} is not allowed: give 1 or more rows.")

    def considers(self, node: fx.Node) -> bool:
        return is_call_of(node, F.cross_entropy)

    def replacement(self, node: fx.Node) -> "Replacement | str":
        return find(node, chunked_linear_cross_entropy, self.chunk_rows)
