"""Passes over a program, ours and the user's."""

import hashlib
import inspect
from dataclasses import fields, is_dataclass
from typing import Any, Optional

from torch import nn

from lightning_thunder_strategy.compiler.trace import Trace


class ProgramRefusedError(RuntimeError):
    """What a pass raises for a program that must not run at all, compiled or not. Never a reason to fall back."""


class TransformError(ProgramRefusedError):
    """A pass failed. The program without it may be another one than was asked for, so it does not run."""

    def __init__(self, transform: "Transform", stage: str, error: Exception) -> None:
        super().__init__(f"The pass {transform.name} failed on the {stage} program: {type(error).__name__}: {error}")


class Transform:
    """A pass with one job. Override the hooks it needs and edit the trace's ``graph_module`` in place.

    A pass that other processes may reuse from the compile cache must have a :meth:`cache_key` that changes whenever
    what it does changes. The default covers a class whose instances hold only plain options.
    """

    @property
    def name(self) -> str:
        """How traces and reports call it."""
        return type(self).__name__

    def module(self, module: nn.Module) -> None:
        """Edit the module before anything is compiled, such as its parameters."""

    def acquired(self, trace: Trace) -> None:
        """Edit the torch-level program that was read from the Python bytecode, before autograd."""

    def joint(self, trace: Trace) -> None:
        """Edit the forward and backward as one ATen program: tag what is saved and what is computed again."""

    def partitioned(self, forward: Trace, backward: Optional[Trace]) -> None:
        """Edit the two ATen programs. ``backward`` is ``None`` for inference."""

    def cache_key(self) -> Optional[str]:
        """What must be equal for a cached program to be the one this pass would make; ``None`` disables caching."""
        options = _plain_options(self)
        if options is None:
            return None
        try:
            source = inspect.getsource(type(self))
        except (OSError, TypeError):
            return None
        return (
            f"{type(self).__module__}.{type(self).__qualname__}:{hashlib.sha256(source.encode()).hexdigest()}:{options}"
        )


def _plain_options(transform: Transform) -> Optional[str]:
    """The instance's options as text, or ``None`` if some are not plain values."""
    if is_dataclass(transform):
        values = {item.name: getattr(transform, item.name) for item in fields(transform)}
    else:
        values = dict(vars(transform))
    return repr(sorted(values.items())) if all(_is_plain(value) for value in values.values()) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list, frozenset)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
