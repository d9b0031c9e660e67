"""How a program is compiled: the one options object of the compiler."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, Optional, get_args

from lightning_thunder_strategy.compiler.refusals import told_by_the_parser_too

Mode = Literal["step", "forward", "submodules", "off"]
OnError = Literal["fallback", "raise"]


@told_by_the_parser_too
@dataclass(frozen=True)
class CompileConfig:
    """Options of one compiled function or step.

    Args:
        mode: The largest unit that is compiled. ``"step"``: the whole step (model, loss and metrics) as one program.
            ``"forward"``: the module's ``forward``. ``"submodules"``: the outermost submodules that the step calls.
            ``"off"``: nothing is compiled.
        fullgraph: If ``True``, anything that cannot be part of the one program is an error that names file, line and
            reason. If ``False``, it runs eagerly and is reported once.
        dynamic: ``None`` compiles static shapes first and symbolic ones after a shape has changed, ``True`` starts
            with symbolic shapes, ``False`` compiles one program for each shape.
        cudagraphs: Replay the compiled CUDA kernels from CUDA graphs. Needs CUDA tensors and the ``inductor`` executor.
        on_error: What happens when an executor cannot compile a region, or ``compile_optimizer`` cannot update a
            parameter. ``"fallback"``: the next executor, or torch's own optimizer, takes it, with one warning.
            ``"raise"``: the error is raised.
        eager_random: Draw random numbers (dropout) from the same stream as eager PyTorch, also under ``inductor``.
            The ``eager`` executor always does.
        fuel: How many operations executors other than ``eager`` may take of each compiled function; then ``eager`` runs
            the rest. For finding the operation that an executor gets wrong. ``None``: no limit.

    Raises:
        ValueError: If an option has a value that is not allowed. The message names the option, the value and
            what is allowed.
    """

    mode: Mode = "step"
    fullgraph: bool = False
    dynamic: Optional[bool] = None
    cudagraphs: bool = False
    on_error: OnError = "fallback"
    eager_random: bool = False
    fuel: Optional[int] = None

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, get_args(Mode))
        check_choice("on_error", self.on_error, get_args(OnError))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("fullgraph", "cudagraphs", "eager_random") and not isinstance(value, bool):
                raise ValueError(f"{field.name}={value!r} is not allowed: choose True or False.")
        if self.dynamic is not None and not isinstance(self.dynamic, bool):
            raise ValueError(f"dynamic={self.dynamic!r} is not allowed: choose None, True or False.")
        fuel = self.fuel
        if fuel is not None and (isinstance(fuel, bool) or not isinstance(fuel, int) or fuel < 0):
            raise ValueError(f"fuel={fuel!r} is not allowed: give a number of operations, or None for no limit.")
        if fuel is not None and self.cudagraphs:
            raise ValueError(f"fuel={fuel!r} is not allowed with cudagraphs=True, which needs whole programs.")


def check_choice(option: str, value: object, allowed: tuple) -> None:
    """Raise ``ValueError`` naming ``option``, ``value`` and what is allowed, unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{option}={value!r} is not allowed: choose one of {', '.join(map(repr, allowed))}.")


def check_patterns(option: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is a list of patterns of module names."""
    texts = isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(each, str) for each in value)
    if not texts:
        raise ValueError(f"{option}={value!r} is not allowed: give a list of patterns, such as ['*lm_head'].")
