"""Loggers inside a compiled step: ``self.logger.log_metrics(...)``, ``self.logger.experiment.add_scalar(...)``.

A logger's own code (files, network, growing lists) is nothing to compile. While a step runs its loggers have a class of
the same name whose methods, and whose experiment, are stand-ins.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Loggers:
    """Gives loggers, for a while, a class with stand-ins.

    Args:
        method: Makes a method's stand-in from the logger's own class and the method's name.
        experiment: Makes the stand-in of a logger's experiment.
    """

    def __init__(self, method: Callable[[type, str], Callable], experiment: Callable[[Any], Any]) -> None:
        self._method = method
        self._experiment = experiment
        self._classes: dict[int, tuple[Any, type]] = {}

    @contextmanager
    def replaced(self, loggers: Sequence[Any]) -> Iterator[None]:
        """While open, the stand-ins are in place."""
        changed: list[tuple[Any, type]] = []
        try:
            for logger in loggers:
                original, replacement = type(logger), self._class(logger)
                object.__setattr__(logger, "__class__", replacement)
                changed.append((logger, original))
            yield
        finally:
            for logger, original in changed:
                object.__setattr__(logger, "__class__", original)

    def _class(self, logger: Any) -> type:
        """Made once for each logger, so that guards on it hold from step to step."""
        if id(logger) not in self._classes:
            original, experiment = type(logger), self._experiment(logger)
            body: dict[str, Any] = {
                name: self._method(original, name)
                for name in dir(original)
                if not name.startswith("_") and callable(getattr(original, name))
            }
            body.update(__module__=original.__module__, __qualname__=original.__qualname__, _lts_replaced=True)
            body["experiment"] = property(lambda self: experiment)
            self._classes[id(logger)] = (logger, type(original.__name__, (original,), body))
        return self._classes[id(logger)][1]


def real_experiment(logger: Any) -> Any:
    """The logger's own experiment, whether or not a stand-in is in its place."""
    cls = type(logger)
    return super(cls, logger).experiment if "_lts_replaced" in vars(cls) else logger.experiment
