"""The precision plugin for Lightning's Fabric."""

from collections.abc import Sequence

from lightning.fabric.plugins import HalfPrecision, MixedPrecision, Precision

from lightning_thunder_strategy.compiler.refusals import told_by_the_parser
from lightning_thunder_strategy.precision import options


class ThunderPrecision(options.LowPrecision, Precision):
    """Computes linears in low precision, and everything else in a base precision.

    Works with every strategy of this package, on one process or several: it is a pass over compiled programs. Modules,
    parameters, optimizer state and checkpoints are those of the base precision.

    Args:
        precision: A name such as ``"fp8"``, or a ``Recipe``.
        base: The precision of parameters and of all other operations.
        skip: Patterns of module names (as in ``fnmatch``): these modules, and all inside them, are left in the base
            precision.

    Raises:
        ValueError: If an option has a value that is not allowed.
    """

    _bases = {
        "bf16-true": lambda device: HalfPrecision("bf16-true"),
        "bf16-mixed": lambda device: MixedPrecision("bf16-mixed", device),
        "32-true": lambda device: Precision(),
    }

    @told_by_the_parser
    def __init__(
        self,
        precision: options.Precision = "fp8",
        base: options.Base = "bf16-true",
        skip: Sequence[str] = ("*lm_head",),
    ) -> None:
        self._configure(precision, base, skip)
