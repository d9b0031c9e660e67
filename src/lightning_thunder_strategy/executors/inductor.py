"""TorchInductor: whole programs, or regions of one."""

from collections.abc import Callable, Sequence
from typing import Any, Optional

from torch import fx

from lightning_thunder_strategy.compiler import _torch_compat
from lightning_thunder_strategy.executors.base import FusionExecutor


class InductorExecutor(FusionExecutor):
    """Compiles with TorchInductor: whole programs, or regions of one.

    A program that it takes whole goes through the same decompositions, joint passes and partitioner as in plain
    ``torch.compile``.
    """

    name = "inductor"

    def unavailable(self) -> Optional[str]:
        return _torch_compat.compilers_found()

    def supports(self, node: fx.Node) -> Optional[str]:
        return None

    def fuse(self, region: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list], Sequence[Any]]:
        return _torch_compat.inductor_compile_region(region, inputs)
