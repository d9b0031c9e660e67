"""Loggers inside a compiled step: ``self.logger.log_metrics(...)``, ``self.logger.experiment.add_scalar(...)``.

A logger's own code (files, network, growing lists) is nothing to compile. While a step runs its loggers, and what the
Trainer has collected for them, have a class of the same name with stand-ins for methods and properties.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule

_COLLECTED = ("metrics", "callback_metrics", "logged_metrics", "progress_bar_metrics")


class Loggers:
    """Gives loggers, for a while, a class with stand-ins.

    Args:
        method: Makes a method's stand-in from the logger's own class and the method's name.
        experiment: Makes the stand-in of a logger's experiment.
        collected: Makes the stand-in of a property of the Trainer, such as ``callback_metrics``, from its name.
    """

    def __init__(
        self,
        method: Callable[[type, str], Callable],
        experiment: Callable[[Any], Any],
        collected: Callable[[str], Callable[[Any], Any]],
    ) -> None:
        self._method = method
        self._experiment = experiment
        self._collected = collected
        self._classes: dict[int, tuple[Any, type]] = {}  # made once, so that guards on them hold from step to step

    @contextmanager
    def replaced(self, module: LightningModule) -> Iterator[None]:
        """While open, the stand-ins for the loggers of the module's Trainer are in place."""
        changed: list[tuple[Any, type]] = []
        trainer = module._trainer
        try:
            if trainer is not None:
                for item in (trainer._logger_connector, *trainer.loggers):
                    original, replacement = type(item), self._class(item, item is trainer._logger_connector)
                    try:
                        object.__setattr__(item, "__class__", replacement)
                    except (AttributeError, TypeError):
                        continue  # such as a mock: a step that uses it is cut there
                    changed.append((item, original))
            yield
        finally:
            for item, original in changed:
                object.__setattr__(item, "__class__", original)

    def _class(self, item: Any, connector: bool) -> type:
        if id(item) not in self._classes:
            original = type(item)
            body = self._connector_body(original) if connector else self._logger_body(item)
            body.update(__module__=original.__module__, __qualname__=original.__qualname__, _lts_replaced=True)
            self._classes[id(item)] = (item, type(original.__name__, (original,), body))
        return self._classes[id(item)][1]

    def _connector_body(self, original: type) -> dict[str, Any]:
        return {name: property(self._collected(name)) for name in _COLLECTED if hasattr(original, name)}

    def _logger_body(self, logger: Any) -> dict[str, Any]:
        original, experiment = type(logger), self._experiment(logger)
        names = [name for name in dir(original) if not name.startswith("_") and callable(getattr(original, name))]
        body: dict[str, Any] = {name: self._method(original, name) for name in names}
        body["experiment"] = property(lambda self: experiment)
        return body


def own(item: Any, name: str) -> Any:
    """An attribute as the item's own class has it, whether or not a stand-in is in its place."""
    cls = type(item)
    return getattr(super(cls, item), name) if "_lts_replaced" in vars(cls) else getattr(item, name)
