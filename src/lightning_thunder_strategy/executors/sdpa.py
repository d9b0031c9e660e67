"""Scaled dot product attention by the backend of torch that the user names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Optional, get_args

import torch
import torch.nn.functional as F
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_thunder_strategy.compiler._torch_fakes import run_on_fakes
from lightning_thunder_strategy.compiler.config import check_choice
from lightning_thunder_strategy.compiler.emit import node_value, type_text
from lightning_thunder_strategy.compiler.refusals import told_by_the_parser_too
from lightning_thunder_strategy.executors.base import OperatorExecutor
from lightning_thunder_strategy.executors.packages import gpu_problem

SdpaBackend = Literal["flash", "efficient", "math", "cudnn"]


def flash_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """FlashAttention; on a CPU, torch's blocked kernel of the same kind."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(*args, **kwargs)


def efficient_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The memory-efficient kernel of xFormers, as torch has it."""
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(*args, **kwargs)


def math_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Products and a softmax, which executors behind this one see and may fuse."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def cudnn_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The kernels of cuDNN, as torch has them."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(*args, **kwargs)


_FUNCTIONS: dict[str, Callable] = {
    "flash": flash_attention,
    "efficient": efficient_attention,
    "math": math_attention,
    "cudnn": cudnn_attention,
}


@told_by_the_parser_too
@dataclass(frozen=True)
class SdpaExecutor(OperatorExecutor):
    """Scaled dot product attention by one backend of torch: flash, efficient, math or cudnn.

    Args:
        backend: Which one. ``"flash"`` and ``"math"`` run on CPUs too; ``"efficient"`` and ``"cudnn"`` need a CUDA GPU.

    Raises:
        ValueError: If the backend is none of these.
    """

    backend: SdpaBackend = "flash"
    name: ClassVar[str] = "sdpa"

    def __post_init__(self) -> None:
        check_choice("SdpaExecutor.backend", self.backend, get_args(SdpaBackend))

    def unavailable(self) -> Optional[str]:
        if self.backend in ("flash", "math"):
            return None
        problem = gpu_problem((8, 0))
        return None if problem is None else f"backend={self.backend!r} needs a CUDA GPU: {problem}"

    def nondeterministic(self, node: fx.Node) -> Optional[str]:
        on_cpu = node_value(node).device.type == "cpu"
        if on_cpu or self.backend == "math":
            return None
        return f"the backward of {self.backend} attention adds up in no fixed order"

    def considers(self, node: fx.Node) -> bool:
        return node.op == "call_function" and node.target is F.scaled_dot_product_attention

    def replacement(self, node: fx.Node) -> "Callable | str":
        function = _FUNCTIONS[self.backend]
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), node_value)
        try:
            run_on_fakes(function, args, kwargs)
        except RuntimeError as error:
            if "No available kernel" not in str(error) and "No viable backend" not in str(error):
                raise
            values = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            options = "".join(
                f", {key}={value}" for key, value in kwargs.items() if not isinstance(value, torch.Tensor)
            )
            shapes = ", ".join(type_text(value) for value in values)
            sparse = any(value.dim() > 0 and value.stride(-1) != 1 for value in values)
            layout = ", whose last dimension is not dense," if sparse else ""
            return f"torch's {self.backend} attention has no kernel for {shapes}{layout}{options} on {values[0].device}"
        return function
