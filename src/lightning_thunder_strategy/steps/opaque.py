"""Lightning's own machinery kept out of the compiled parts of a step: the breaks sit only where it works."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from lightning_thunder_strategy.steps.loggers import Loggers, own
from lightning_thunder_strategy.steps.recorder import walk

_MODULE_METHODS = (
    "log", "log_dict", "print", "manual_backward", "toggle_optimizer", "untoggle_optimizer", "toggled_optimizer",
    "optimizers", "lr_schedulers", "clip_gradients", "configure_gradient_clipping", "all_gather", "lr_scheduler_step",
)  # fmt: skip


class OpaqueMachinery:
    """Wraps a module's Lightning methods, optimizers and metrics so that Dynamo calls them and does not read them.

    Args:
        module: The LightningModule.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._loggers = Loggers(
            lambda cls, name: hide(getattr(cls, name)),
            OpaqueExperiment,
            lambda name: hide(lambda connector: own(connector, name)),
        )
        self._wrapped: dict[int, tuple[Any, dict[str, Callable]]] = {}

    @contextmanager
    def hidden(self, optimizers: Sequence[Any]) -> Iterator[None]:
        """While open, the machinery is hidden. ``optimizers``: optimizers and schedulers that the step may use."""
        targets: list[tuple[Any, tuple[str, ...]]] = [(self._module, _MODULE_METHODS)]
        targets += [(item, ("step", "zero_grad") if _is_optimizer(item) else ("step",)) for item in optimizers]
        metrics = [m for m in walk(self._module) if isinstance(m, (Metric, MetricCollection))]
        targets += [(metric, ("forward", "update", "compute", "reset")) for metric in metrics]
        saved = []
        try:
            for target, names in targets:
                attributes = vars(target)
                saved.append((attributes, names, {name: attributes[name] for name in names if name in attributes}))
                attributes.update(self._hidden_methods(target, names))
            with self._loggers.replaced(self._module):
                yield
        finally:
            for attributes, names, before in saved:
                for name in names:
                    attributes.pop(name, None)
                attributes.update(before)

    def _hidden_methods(self, target: Any, names: Sequence[str]) -> dict[str, Callable]:
        """Made once for each object, so that guards on them hold from step to step."""
        if id(target) not in self._wrapped:
            methods = {name: hide(getattr(target, name)) for name in names if _can_be_hidden(target, name)}
            self._wrapped[id(target)] = (target, methods)
        return self._wrapped[id(target)][1]


def _can_be_hidden(target: Any, name: str) -> bool:
    """Not a callable object that the user has put there: the step may use its attributes."""
    return isinstance(vars(target).get(name, hide), (FunctionType, MethodType)) and hasattr(target, name)


def hide(function: Callable) -> Callable:
    """The function, called by Dynamo and not read.

    ``torch.compiler.disable`` gets a function of our own: it reads and sets attributes, and the user's may be a mock.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    hidden = torch.compiler.disable(functools.update_wrapper(call, function, updated=()))
    for name, value in getattr(function, "__dict__", {}).items():  # schedulers leave marks on the optimizer's step
        if not name.startswith("_torchdynamo"):
            vars(hidden).setdefault(name, value)
    return hidden


class OpaqueExperiment:
    """A logger's experiment whose methods Dynamo calls and does not read."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self._methods: dict[str, Any] = {}

    @torch.compiler.disable
    def __getattr__(self, name: str) -> Any:
        if name not in self._methods:
            value = getattr(own(self._logger, "experiment"), name)
            if not callable(value):
                return value
            self._methods[name] = hide(value)
        return self._methods[name]


def _is_optimizer(item: Any) -> bool:
    return isinstance(item, Optimizer) or hasattr(item, "zero_grad")
