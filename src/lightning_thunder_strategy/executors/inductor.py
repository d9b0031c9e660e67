"""TorchInductor: whole programs, or regions of one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Optional, Union, get_args

import torch
from torch import fx

from lightning_thunder_strategy.compiler import _torch_inductor
from lightning_thunder_strategy.compiler.config import check_choice
from lightning_thunder_strategy.compiler.refusals import told_by_the_parser_too
from lightning_thunder_strategy.executors.base import FusionExecutor
from lightning_thunder_strategy.executors.packages import gpu_problem, import_problem

InductorMode = Literal["default", "max-autotune"]
InductorOption = Union[bool, int, float, str, None]
_OURS = {
    "triton.cudagraphs": "use CompileConfig(cudagraphs=...)",
    "fallback_random": "use CompileConfig(eager_random=...)",
    "deterministic": "use Trainer(deterministic=...) or torch.use_deterministic_algorithms",
    "custom_partitioner_fn": "this package sets it, to its own partitioner; leave it out",
    "unsafe_marked_cacheable_functions": "this package sets it, for its own operators; leave it out",
}


@told_by_the_parser_too
@dataclass(frozen=True)
class InductorExecutor(FusionExecutor):
    """Compiles with TorchInductor: whole programs, or regions of one.

    A program that it takes whole goes through the same decompositions, joint passes and partitioner as in plain
    ``torch.compile``.

    Args:
        mode: ``"max-autotune"`` times several kernels for each matrix product and more settings of each kernel while
            compiling, and takes the fastest, as ``torch.compile(mode="max-autotune-no-cudagraphs")`` does.
        options: Options of Inductor by name, as ``{"epilogue_fusion": False}``, which go before those of ``mode``.
            ``torch._inductor.list_options()`` has their names; torch does not promise to keep them. A value has the
            type of Inductor's default; a whole number does for a float, and any value where the default is ``None``.

    Raises:
        ValueError: If the mode is none of these, Inductor has no such option or not of that type, a number is nan,
            or it is an option that another one of the strategy sets, or this package itself.
    """

    mode: InductorMode = "default"
    options: dict[str, InductorOption] = field(default_factory=dict, hash=False)
    name: ClassVar[str] = "inductor"

    def __post_init__(self) -> None:
        check_choice("InductorExecutor.mode", self.mode, get_args(InductorMode))
        if not isinstance(self.options, dict):
            raise ValueError(
                f"InductorExecutor.options={self.options!r} is not allowed: give options of Inductor by name."
            )
        for option, value in self.options.items():
            problem = _torch_inductor.inductor_option_problem(option, value)
            if option in _OURS:
                problem = _OURS[option]
            if problem is not None:
                raise ValueError(f"InductorExecutor.options[{option!r}]={value!r} is not allowed: {problem}.")

    def config_patches(self) -> dict[str, Any]:
        """What is set in Inductor's configuration while it compiles."""
        mode = {"default": "default", "max-autotune": "max-autotune-no-cudagraphs"}[self.mode]
        return {**_torch_inductor.inductor_mode_options(mode), **self.options}

    def unavailable(self) -> Optional[str]:
        if not torch.cuda.is_available():
            return _torch_inductor.cpp_compiler_problem()
        return import_problem("triton") or gpu_problem((7, 0))

    def install_command(self) -> str:
        return "pip install triton" if torch.cuda.is_available() else "apt install g++ (or any C++ compiler as $CXX)"

    def supports(self, node: fx.Node) -> Optional[str]:
        return None

    def fuse(self, region: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list], Sequence[Any]]:
        return _torch_inductor.inductor_compile_region(region, inputs, self.config_patches())
