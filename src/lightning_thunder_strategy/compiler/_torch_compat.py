"""Names which torch does not document, and that have no better place in a sibling of this file. Checked on torch 2.11
and 2.13.

Only this file and its siblings `_torch_*.py` use such names. Each function says what it stands for; the rest of the
package calls these.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.distributed

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def size_hint(size: Any) -> int:
    """The value a size had when it was compiled, also where it is symbolic."""
    return int(number_hint(size))


def number_hint(number: Any) -> Any:
    """The value a number had when it was compiled, also where it is symbolic."""
    if isinstance(number, (int, float, bool)):
        return number
    hint = getattr(getattr(number, "node", None), "hint", None)
    kind = {torch.SymFloat: float, torch.SymBool: bool}.get(type(number), int)
    return kind(hint) if hint is not None else kind(1)


def outside_fake_mode() -> contextlib.AbstractContextManager:
    """While open, operations on real tensors run for real, also in the middle of a trace."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def fake_like(tensor: torch.Tensor, values: Sequence[Any]) -> torch.Tensor:
    """A fake of ``tensor``, of fixed sizes, that goes with the fake ones among ``values``; itself if there are none."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode([value for value in values if isinstance(value, torch.Tensor)])
    return tensor if mode is None else mode.from_tensor(tensor, static_shapes=True)


def defining_module(op: torch._ops.OpOverload) -> Optional[str]:
    """The module that must be imported for ``torch.ops`` to have this operator, or ``None`` if importing torch does."""
    from torch._library.custom_ops import OPDEFS

    if op.namespace == "prims" and op._schema.name.startswith("prims::inductor_"):
        return "torch._inductor.inductor_prims"
    definition = OPDEFS.get(op._schema.name)
    module = getattr(getattr(definition, "_init_fn", None), "__module__", None)
    return None if module == "__main__" else module


def no_node_metadata() -> contextlib.AbstractContextManager:
    from torch.fx.traceback import preserve_node_meta

    return preserve_node_meta(enable=False)


def default_store() -> torch.distributed.Store:
    """The key-value store through which the ranks of the default process group found each other, on a connection of
    its own where torch can make one: waiting on it holds up nobody else."""
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def group_name(group: torch.distributed.ProcessGroup) -> str:
    return group.group_name


def group_ranks(name: str) -> list[int]:
    """The ranks of a process group, given by the name that programs have for it."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return sorted(torch.distributed.get_process_group_ranks(_resolve_process_group(name)))  # type: ignore[arg-type]


def group_named(name: str) -> "Optional[torch.distributed.ProcessGroup]":
    """The process group that has this name now; later groups may have it again."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, KeyError):
        return None


def group_text(name: str) -> str:
    """The members of a group, counted from its first: the same on all ranks for the groups of one mesh dimension."""
    group = group_named(name)
    if group is None:
        return name
    ranks = sorted(torch.distributed.get_process_group_ranks(group))
    steps = {b - a for a, b in zip(ranks, ranks[1:])}
    return f"{len(ranks)}x{steps.pop()}" if len(steps) == 1 else ",".join(str(rank - ranks[0]) for rank in ranks)
