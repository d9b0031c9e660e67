"""Names of torch for what an optimizer does inside its ``step``.

Checked on torch 2.13.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Optional

from torch.optim import Optimizer

_COLLECT = "_init_group"
Collect = Callable[..., Any]  # called with a param group and empty lists, which it fills


def own_step(optimizer: Optimizer, base: type[Optimizer]) -> Optional[str]:
    """Why the step of an optimizer is not that of ``base``, or ``None`` if it is."""
    for name in ("step", _COLLECT):  # which profiler and TorchDynamo wrap, each class's by itself
        if inspect.unwrap(getattr(type(optimizer), name)) is inspect.unwrap(getattr(base, name)):
            continue
        nearest = next(each for each in type(optimizer).__mro__ if each.__module__.startswith("torch.optim."))
        return f"its class has a step of its own, other than that of {nearest.__name__}"
    if hasattr(optimizer.step, "_torchdynamo_orig_callable"):
        return "its step is compiled with torch.compile"
    return None


@contextmanager
def collecting(
    optimizer: Optimizer, around: Callable[[Collect, dict[str, Any], list[list]], Any]
) -> Iterator[Callable[[Callable], Callable]]:
    """While open, ``around`` runs where the optimizer's step collects what it is about to update.

    Only this optimizer is changed, and only while this is open. ``step`` makes lists of parameters, gradients and
    states for each param group, and updates what it finds in them: what ``around`` takes out is left as it is.

    Args:
        optimizer: Of one of torch's classes.
        around: Gets the function that fills the lists, the param group and the empty lists, and returns what that
            function does.

    Yields:
        What makes a closure run as if this were not open: a step may compile there, which looks at the optimizer.
    """
    before = vars(optimizer).get(_COLLECT)
    original = getattr(optimizer, _COLLECT)

    def collect(group: dict[str, Any], *lists: list) -> Any:
        return around(original, group, list(lists))

    def change(value: Optional[Collect]) -> None:
        vars(optimizer).pop(_COLLECT, None) if value is None else setattr(optimizer, _COLLECT, value)

    def outside(closure: Callable) -> Callable:
        def call() -> Any:
            change(before)
            try:
                return closure()
            finally:
                change(collect)

        return call

    change(collect)
    try:
        yield outside
    finally:
        change(before)
