"""Passes over a program, ours and the user's."""

from collections.abc import Mapping
from typing import Optional

from torch import nn

from lightning_thunder_strategy.compiler.keys import object_key
from lightning_thunder_strategy.compiler.trace import Trace


class ProgramRefusedError(RuntimeError):
    """What a pass raises for a program that must not run at all, compiled or not. Never a reason to fall back."""


class TransformError(ProgramRefusedError):
    """A pass failed. The program without it may be another one than was asked for, so it does not run."""

    def __init__(self, transform: "Transform", stage: str, error: Exception) -> None:
        super().__init__(f"The pass {transform.name} failed on the {stage} program: {type(error).__name__}: {error}")


class Transform:
    """A pass with one job. Override the hooks it needs and edit the trace's ``graph_module`` in place.

    Programs that a pass has edited may be reused from the compile cache by other processes, so its :meth:`cache_key`
    must change whenever what it does changes. The default covers its code, the file it is in and plain options; a
    pass that depends on anything else, such as another file of yours, must add that. For a program from the cache
    :meth:`joint` and :meth:`partitioned` are not called.
    """

    @property
    def name(self) -> str:
        """How traces and reports call it."""
        return type(self).__name__

    @property
    def functions(self) -> Mapping[str, str]:
        """Module and qualified name to a version, for functions of yours that :meth:`acquired` puts into programs.

        A program with other functions than these and torch's is not written to the compile cache.
        """
        return {}

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
        return object_key(self, Transform)
