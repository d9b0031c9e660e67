"""What the precision plugins of Trainer and Fabric share: their options, and the plugin whose work they do besides."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Optional, Protocol, TypeGuard, Union, get_args

import torch
from torch import nn

from lightning_thunder_strategy.compiler.config import check_choice
from lightning_thunder_strategy.precision.delayed import DelayedScales
from lightning_thunder_strategy.precision.linears import LowPrecisionLinears
from lightning_thunder_strategy.precision.recipe import PrecisionName, Recipe, resolve_recipe

Base = Literal["bf16-true", "bf16-mixed", "32-true"]
Precision = Union[PrecisionName, Recipe]


class LowPrecision:
    """The options, checked, and what Lightning asks of a plugin; mixed in before Lightning's base class.

    A subclass sets ``_bases``: for each base precision a function of the device type that makes Lightning's plugin.
    """

    _bases: dict[str, Any]

    def _configure(self, precision: Precision, base: Base, skip: Sequence[str]) -> None:
        self.recipe = resolve_recipe(precision)
        check_choice("base", base, get_args(Base))
        self.passes = (LowPrecisionLinears(precision, skip),)
        self.precision = base
        self._strategy: Optional[UsesPrecision] = None

    @property
    def delayed(self) -> Optional[DelayedScales]:
        """What delayed scaling remembers, ``None`` without it."""
        return self.passes[0].delayed

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        if self.delayed is not None:
            several = self._strategy is not None and self._strategy.several_ranks
            self.delayed.update(_maximum_over_ranks if several else None)
        return result

    def state_dict(self) -> dict[str, Any]:
        """With delayed scaling the amax histories of all linears, the same on all ranks; otherwise empty."""
        return {} if self.delayed is None else {"amax_histories": self.delayed.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.delayed is not None:
            self.delayed.load_state_dict(state_dict.get("amax_histories", {}))

    def used_by(self, strategy: "UsesPrecision") -> None:
        """A strategy of this package, which runs the passes, uses this plugin."""
        self._strategy = strategy

    def _base(self, device: str = "cpu") -> Any:
        """Lightning's own plugin for everything that is not a linear; the device matters to autocast only.

        Raises:
            TypeError: If the strategy is not one that compiles.
        """
        if self._strategy is None:
            raise TypeError(
                "ThunderPrecision works on the programs that the strategies of lightning_thunder_strategy compile, and "
                "the strategy in use is another one, so linears would silently stay in the base precision: choose "
                "strategy='thunder', 'thunder_ddp' or 'thunder_fsdp', or leave ThunderPrecision out."
            )
        return self._bases[self.precision](device)

    def convert_module(self, module: nn.Module) -> nn.Module:
        return self._base().convert_module(module)

    def tensor_init_context(self) -> AbstractContextManager:
        return self._base().tensor_init_context()

    def module_init_context(self) -> AbstractContextManager:
        return self._base().module_init_context()

    def forward_context(self) -> AbstractContextManager:
        return self._base(self._strategy.root_device.type if self._strategy else "cpu").forward_context()

    def convert_input(self, data: Any) -> Any:
        return self._base().convert_input(data)

    def convert_output(self, data: Any) -> Any:
        return self._base().convert_output(data)


def _maximum_over_ranks(tensor: torch.Tensor) -> None:
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)


class UsesPrecision(Protocol):
    """What :func:`accept` needs of a strategy."""

    @property
    def root_device(self) -> torch.device: ...

    @property
    def several_ranks(self) -> bool: ...


def accept(plugin: Any, strategy: UsesPrecision) -> TypeGuard[LowPrecision]:
    """Let a strategy of this package use ``plugin`` if it is one of ours, and whether it is."""
    if not isinstance(plugin, LowPrecision):
        return False
    plugin.used_by(strategy)
    return True
