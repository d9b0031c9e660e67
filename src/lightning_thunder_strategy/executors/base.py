"""What an executor is: something that runs parts of a program."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

import torch
from torch import fx

from lightning_thunder_strategy.compiler.keys import object_key


@dataclass(frozen=True)
class Claim:
    """One decision of an executor about one operation.

    Attributes:
        operation: The operation, as the trace prints it.
        executor: Name of the executor.
        accepted: Whether it runs the operation.
        reason: Why it declined, or an empty string.
    """

    operation: str
    executor: str
    accepted: bool
    reason: str = ""


class Executor:
    """Base of all executors. Subclass :class:`OperatorExecutor` or :class:`FusionExecutor`."""

    name: str = ""

    def unavailable(self) -> Optional[str]:
        """Why this executor cannot run on this machine, in a sentence, or ``None`` if it can."""
        return None

    def install_command(self) -> str:
        """What to do so that it can run, such as ``pip install triton``; empty if nothing helps or is needed."""
        return ""

    def version(self) -> Optional[str]:
        """The version of what it runs with, or ``None`` if that is not installed."""
        return torch.__version__

    def nondeterministic(self, node: fx.Node) -> Optional[str]:
        """Why this executor's result for ``node`` may differ from run to run, or ``None`` if it does not.

        Under ``torch.use_deterministic_algorithms`` (``Trainer(deterministic=True)``) such operations are declined.
        """
        return None

    def cache_key(self) -> Optional[str]:
        """What must be equal for a program cached by another process to be reused, or ``None`` to disable caching."""
        return object_key(self, Executor)


def declined_as_nondeterministic(executor: Executor, node: fx.Node) -> Optional[str]:
    """The reason why ``executor`` must not run ``node``, if results are to be the same in every run and would not."""
    reason = executor.nondeterministic(node) if torch.are_deterministic_algorithms_enabled() else None
    return None if reason is None else f"it is not deterministic: {reason}"


@dataclass(frozen=True)
class Replacement:
    """A function that runs an operation with other arguments than the operation has.

    Attributes:
        function: The function.
        args: Its arguments: plain values, and values of the program that come before the operation.
        kwargs: Its keyword arguments.
        covers: Earlier operations whose work the function does too, in the order of the program; they are removed.
            Nothing else may use them.
    """

    function: Callable
    args: tuple = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    covers: tuple[fx.Node, ...] = ()


class OperatorExecutor(Executor):
    """Claims torch-level operations before autograd."""

    def replacement(self, node: fx.Node) -> "Callable | Replacement | str":
        """The function that runs ``node`` instead, with the same arguments, or the reason why this executor declines.

        The function must be differentiable (plain torch operations, a ``torch.autograd.Function`` or a
        ``torch.library`` operator) and importable, or the program is not written to the compile cache. It is tried
        on fake tensors first; if it fails there, the next executor is asked.
        ``node.meta["example_value"]`` holds a fake tensor with the shape, dtype and device of the result.
        """
        raise NotImplementedError

    def considers(self, node: fx.Node) -> bool:
        """Whether ``node`` is an operation of the kind this executor runs: only these appear in the claim log."""
        raise NotImplementedError


class FusionExecutor(Executor):
    """Compiles regions of the ATen program after differentiation.

    Attributes:
        gathers: Whether a region may also take operations that stand elsewhere in the program, where their data allows
            it. If not, regions are runs of operations in the order of the program.
    """

    gathers: ClassVar[bool] = False

    def supports(self, node: fx.Node) -> Optional[str]:
        """``None`` if ``node`` may be part of a region, else the reason why not."""
        raise NotImplementedError

    def worthwhile(self, nodes: Sequence[fx.Node]) -> Optional[str]:
        """``None`` if a region of these operations is worth compiling, else why the next executor should have them."""
        return None

    def fuse(self, region: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list], Sequence[Any]]:
        """Compile ``region``.

        Args:
            region: An ATen program without side effects. The executor may edit it.
            inputs: A fake tensor or symbolic integer for each input.

        Returns:
            A function of one list of inputs that returns the outputs.
        """
        raise NotImplementedError
