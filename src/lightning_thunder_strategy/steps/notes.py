"""Notes: calls that a compiled step would make, written down to be made after it."""

from dataclasses import dataclass
from typing import Any, Optional

from torch import Tensor, fx

from lightning_thunder_strategy.steps.token import Token


@dataclass
class Note:
    """One call to be made.

    Attributes:
        target: Whose method is called.
        method: Its name.
        args: Positional arguments.
        kwargs: Keyword arguments.
        token: What the step was given in place of the result, if anything.
    """

    target: Any
    method: str
    args: tuple
    kwargs: dict[str, Any]
    token: Optional[Token] = None


def kept(value: Any) -> Any:
    """A value as it is now: tensors detached (see :func:`copy_changed_notes`), containers copied."""
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) in (list, tuple):
        return type(value)([kept(item) for item in value])
    if type(value) is dict:
        return {key: kept(item) for key, item in value.items()}
    return value


def copy_changed_notes(gm: fx.GraphModule) -> None:
    """Copy noted tensors that the program changes in place, so that a note holds the value at the time of the call.

    Args:
        gm: A program as Dynamo reads it. Its example values count in-place changes, those through views included.
    """
    changed = False
    for node in list(gm.graph.nodes):
        if node.op != "call_method" or node.target != "detach" or __file__ not in (node.meta.get("stack_trace") or ""):
            continue
        value = node.meta.get("example_value")
        if isinstance(value, Tensor) and value._version > 0:
            with gm.graph.inserting_after(node):
                copy = gm.graph.call_method("clone", (node,))
            copy.meta = {**node.meta}
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
            changed = True
    if changed:
        gm.recompile()
