"""TorchInductor: whole programs, or regions of one."""

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import fx

from lightning_thunder_strategy.compiler import _torch_inductor
from lightning_thunder_strategy.executors.base import FusionExecutor
from lightning_thunder_strategy.executors.packages import gpu_problem, import_problem


class InductorExecutor(FusionExecutor):
    """Compiles with TorchInductor: whole programs, or regions of one.

    A program that it takes whole goes through the same decompositions, joint passes and partitioner as in plain
    ``torch.compile``.
    """

    name = "inductor"

    def unavailable(self) -> Optional[str]:
        if not torch.cuda.is_available():
            return _torch_inductor.cpp_compiler_problem()
        return import_problem("triton") or gpu_problem((7, 0))

    def install_command(self) -> str:
        return "pip install triton" if torch.cuda.is_available() else "apt install g++ (or any C++ compiler as $CXX)"

    def supports(self, node: fx.Node) -> Optional[str]:
        return None

    def fuse(self, region: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list], Sequence[Any]]:
        return _torch_inductor.inductor_compile_region(region, inputs)
