"""Kernels of Liger: RMSNorm, SwiGLU, rotary embeddings, cross-entropy with and without its linear layer."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Optional, Union

import torch
import torch.nn.functional as F
from torch import fx

from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.refusals import told_by_the_parser_too
from lightning_thunder_strategy.executors import liger_operators
from lightning_thunder_strategy.executors.base import OperatorExecutor, Replacement
from lightning_thunder_strategy.executors.linear_cross_entropy import find, find_loss
from lightning_thunder_strategy.executors.packages import gpu_problem, import_problem, version_of
from lightning_thunder_strategy.executors.registered import is_call_of
from lightning_thunder_strategy.executors.rms_norm_pattern import find_rms_norm, is_rms_norm
from lightning_thunder_strategy.executors.rope_pattern import find_rope, is_rope
from lightning_thunder_strategy.executors.swiglu_pattern import find_swiglu, is_swiglu
from lightning_thunder_strategy.executors.triton import interpreted

_MOST_FEATURES = 65536  # a row is one block
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_OLDEST = (0, 8)


@told_by_the_parser_too
@dataclass(frozen=True)
class LigerExecutor(OperatorExecutor):
    """Liger's kernels: RMSNorm, SwiGLU, rotary embeddings, cross-entropy with and without its linear layer.

    Args:
        chunk_rows: How many rows (tokens) of logits exist at once, for a loss with its linear layer.

    Raises:
        ValueError: If that is not a positive number.
    """

    chunk_rows: int = 1024
    name: ClassVar[str] = "liger"

    def __post_init__(self) -> None:
        if isinstance(self.chunk_rows, bool) or not isinstance(self.chunk_rows, int) or self.chunk_rows < 1:
            raise ValueError(f"LigerExecutor.chunk_rows={self.chunk_rows!r} is not allowed: give 1 or more rows.")

    def unavailable(self) -> Optional[str]:
        problem = import_problem("triton") or import_problem("liger_kernel.ops")
        if problem is not None:
            return problem
        version = self.version()
        if version is not None and tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST:
            return f"liger-kernel {version} is too old: 0.8 or newer is needed."
        return None if interpreted() else gpu_problem((8, 0))

    def install_command(self) -> str:
        problem = self.unavailable()
        return "pip install 'liger-kernel>=0.8'" if problem is not None and problem != gpu_problem((8, 0)) else ""

    def version(self) -> Optional[str]:
        return version_of("liger-kernel")

    def cache_key(self) -> Optional[str]:
        return f"{super().cache_key()}:{self.version()}"

    def considers(self, node: fx.Node) -> bool:
        return is_call_of(node, F.cross_entropy) or is_rms_norm(node) or is_swiglu(node) or is_rope(node)

    def replacement(self, node: fx.Node) -> "Callable | Replacement | str":
        found = self._found(node)
        if isinstance(found, str):
            return found
        values = [node_value(used) for used in _nodes(found)]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        device = "cpu" if interpreted() else "cuda"
        if any(value.device.type != device for value in tensors):
            return f"its kernels run on {device}, and this is on {tensors[0].device.type}"
        types = {value.dtype for value in tensors if value.is_floating_point()}
        if types - set(_TYPES):
            return f"its kernels take float32, bfloat16 and float16, and this is {(types - set(_TYPES)).pop()}"
        return found

    def _found(self, node: fx.Node) -> Union[Replacement, str]:
        if is_call_of(node, F.cross_entropy):
            found = find(node, liger_operators.liger_linear_cross_entropy, self.chunk_rows)
            return find_loss(node, liger_operators.liger_cross_entropy) if isinstance(found, str) else found
        if is_rms_norm(node):
            norm = find_rms_norm(node)
            if isinstance(norm, str):
                return norm
            args = (norm.x, norm.weight, norm.eps, norm.rounding)
            return _features(norm.x) or Replacement(liger_operators.liger_rms_norm, args, covers=norm.covers)
        if is_swiglu(node):
            swiglu = find_swiglu(node)
            if isinstance(swiglu, str):
                return swiglu
            gate, up, covers = swiglu
            return _features(gate) or Replacement(liger_operators.liger_swiglu, (gate, up), covers=covers)
        rope = find_rope(node)
        if isinstance(rope, str):
            return rope
        args = (rope.x, rope.cos, rope.sin, rope.known, node_value(node).dtype)
        return Replacement(liger_operators.liger_rope, args, covers=rope.covers)


def _features(x: fx.Node) -> Optional[str]:
    count = node_value(x).shape[-1]
    return (
        f"its rows have {count} features, and the kernel takes up to {_MOST_FEATURES}"
        if count > _MOST_FEATURES
        else None
    )


def _nodes(found: Replacement) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.node.map_arg((found.args, dict(found.kwargs)), lambda node: nodes.append(node) or node)
    return nodes
