"""Our own Triton kernels: the last linear layer with its cross-entropy loss, and RMSNorm."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Optional

import torch
import torch.nn.functional as F
from torch import fx

from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.refusals import told_by_the_parser_too
from lightning_thunder_strategy.executors import triton_operators
from lightning_thunder_strategy.executors.base import OperatorExecutor, Replacement
from lightning_thunder_strategy.executors.linear_cross_entropy import find
from lightning_thunder_strategy.executors.packages import gpu_problem, import_problem, version_of
from lightning_thunder_strategy.executors.registered import is_call_of
from lightning_thunder_strategy.executors.rms_norm_pattern import find_rms_norm, is_rms_norm

_MOST_FEATURES = 16384  # a row of RMSNorm is one block
_TYPES = (torch.float32, torch.bfloat16)


@told_by_the_parser_too
@dataclass(frozen=True)
class TritonExecutor(OperatorExecutor):
    """Our own Triton kernels: a linear layer with its cross-entropy loss in chunks of rows, and RMSNorm.

    Args:
        chunk_rows: How many rows (tokens) of logits exist at once.

    Raises:
        ValueError: If that is not a positive number.
    """

    chunk_rows: int = 2048
    name: ClassVar[str] = "triton"

    def __post_init__(self) -> None:
        if isinstance(self.chunk_rows, bool) or not isinstance(self.chunk_rows, int) or self.chunk_rows < 1:
            raise ValueError(f"TritonExecutor.chunk_rows={self.chunk_rows!r} is not allowed: give 1 or more rows.")

    def unavailable(self) -> Optional[str]:
        problem = import_problem("triton")
        return problem if problem is not None or interpreted() else gpu_problem((8, 0))

    def install_command(self) -> str:
        return "pip install triton" if import_problem("triton") is not None else ""

    def version(self) -> Optional[str]:
        return version_of("triton")

    def considers(self, node: fx.Node) -> bool:
        return is_call_of(node, F.cross_entropy) or is_rms_norm(node)

    def replacement(self, node: fx.Node) -> "Callable | Replacement | str":
        tensors = [node_value(used) for used in node.all_input_nodes]
        values = [value for value in tensors if isinstance(value, torch.Tensor)]
        device = "cpu" if interpreted() else "cuda"
        if any(value.device.type != device for value in values):
            return f"its kernels run on {device}, and this is on {values[0].device.type}"
        if any(value.is_floating_point() and value.dtype not in _TYPES for value in values):
            return f"its kernels take float32 and bfloat16, and this is {values[0].dtype}"
        if is_call_of(node, F.cross_entropy):
            return find(node, triton_operators.triton_linear_cross_entropy, self.chunk_rows)
        return _norm(node)


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on a CPU, for testing."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _norm(node: fx.Node) -> "Replacement | str":
    found = find_rms_norm(node)
    if isinstance(found, str):
        return found
    features = node_value(found.x).shape[-1]
    if features > _MOST_FEATURES:
        return f"its rows have {features} features, and the kernel takes up to {_MOST_FEATURES}"
    if found.rounding != "end":
        return f"it rounds the normalized values to {node_value(node).dtype}, and the kernel rounds only the result"
    args = (found.x, found.weight, found.eps)
    return Replacement(triton_operators.triton_rms_norm, args, covers=found.covers)
