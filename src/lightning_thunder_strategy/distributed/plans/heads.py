"""Attention heads: which rows of a projection belong to which."""

from dataclasses import dataclass
from typing import Any, Optional

from torch import nn


@dataclass(frozen=True)
class FusedHeads:
    """A projection whose rows are those of all queries, then all keys, then all values, as in LitGPT.

    Attributes:
        queries: Number of query heads.
        groups: Number of key heads and of value heads; each serves ``queries / groups`` query heads that follow each
            other.
        size: Rows of a head.
    """

    queries: int
    groups: int
    size: int

    def rows(self, rank: int, ranks: int) -> tuple[tuple[int, int], ...]:
        """First and last (exclusive) row of each block of one of several ranks: its query, key and value heads."""
        blocks, start = [], 0
        for heads in (self.queries, self.groups, self.groups):
            count = heads // ranks * self.size
            blocks.append((start + rank * count, start + (rank + 1) * count))
            start += heads * self.size
        return tuple(blocks)


def fused_heads(name: str, module: nn.Linear, parent: nn.Module) -> Optional[FusedHeads]:
    """The heads of LitGPT's fused projection, or ``None`` if the linear is not one.

    Raises:
        ValueError: If the attention computes over all heads at once, and so cannot be split.
    """
    if not _is_litgpt_attention(parent) or name.rpartition(".")[2] != "qkv":
        return None
    config: Any = vars(parent)["config"]
    if getattr(config, "norm_qk", False) and getattr(config, "norm_qk_type", "default") != "default":
        raise ValueError(
            f"plan: `{name}`: norm_qk_type={config.norm_qk_type!r} normalizes over all heads together, so they cannot "
            "be split over ranks: leave the attention's `qkv` and `proj` out of the plan."
        )
    return FusedHeads(config.n_head, config.n_query_groups, config.head_size)


def _is_litgpt_attention(module: nn.Module) -> bool:
    classes = type(module).__mro__
    return any(cls.__module__.startswith("litgpt.") and cls.__name__ == "CausalSelfAttention" for cls in classes)


def heads_of(module: nn.Linear, parent: nn.Module) -> tuple[str, int]:
    """What the heads of a projection are called, and their number: 0 if its parent has no ``head_dim``."""
    head = getattr(parent, "head_dim", None)
    if not isinstance(head, int) or head <= 0 or module.out_features % head:
        return "heads", 0
    return "heads", module.out_features // head
