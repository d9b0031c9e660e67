"""Logging and metrics inside a compiled step: written down while it runs, replayed right after."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.utils._pytree import tree_map
from torchmetrics import Metric, MetricCollection


class Token:
    """Stands for the value of a metric that is computed after the step. It can only be logged or returned."""

    def __init__(self, index: int) -> None:
        self.index = index


class StepRecorder:
    """Replaces ``log``, ``log_dict`` and metric calls of a module by notes while its step runs as one program.

    The notes are outputs of the program. :meth:`replay` makes the real calls in the same order, so the state of
    metrics, reductions and loggers stays with torchmetrics and Lightning.

    Args:
        module: The LightningModule.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._notes: list[tuple] = []
        self._logging = _recording_log(module, self._notes)
        self._metrics = [m for m in module.modules() if isinstance(m, (Metric, MetricCollection))]
        self._metric_classes: dict[type, type] = {}
        self._metric_methods = [_recording_methods(metric, self._notes) for metric in self._metrics]  # hashes change

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While open, the module's ``log`` and the calls of its metrics are noted down."""
        attributes = self._module.__dict__
        self._notes.clear()
        saved = {name: attributes[name] for name in self._logging if name in attributes}
        classes = [type(metric) for metric in self._metrics]
        methods = [{k: metric.__dict__[k] for k in _METRIC_METHODS if k in metric.__dict__} for metric in self._metrics]
        try:
            attributes.update(self._logging)
            for metric, cls, recorders in zip(self._metrics, classes, self._metric_methods):
                metric.__dict__.update(recorders)
                metric.__class__ = self._recording_class(cls)
            yield
        finally:
            for name in self._logging:
                attributes.pop(name, None)
            attributes.update(saved)
            for metric, cls, before in zip(self._metrics, classes, methods):
                metric.__class__ = cls
                for name in _METRIC_METHODS:
                    metric.__dict__.pop(name, None)
                metric.__dict__.update(before)

    def _recording_class(self, cls: type) -> type:
        if cls not in self._metric_classes:
            notes = self._notes

            def forward(self: Metric, *args: Any, **kwargs: Any) -> Token:
                notes.append(("metric", self, "forward", _detached(args), _detached(kwargs)))
                return Token(len(notes) - 1)

            body = {
                "__call__": forward,
                "forward": forward,
                "__module__": cls.__module__,
                "__qualname__": cls.__qualname__,
            }
            self._metric_classes[cls] = type(cls.__name__, (cls,), body)
        return self._metric_classes[cls]

    def replay(self, output: Any) -> Any:
        """Make the noted calls, and put real values in place of tokens in the step's output."""
        values: dict[int, Any] = {}
        notes = list(self._notes)
        self._notes.clear()
        for index, note in enumerate(notes):
            if note[0] == "metric":
                _, metric, method, args, kwargs = note
                values[index] = (
                    metric(*args, **kwargs) if method == "forward" else getattr(metric, method)(*args, **kwargs)
                )
            else:
                name, args, kwargs = note
                getattr(self._module, name)(*_resolved(args, values), **_resolved(kwargs, values))
        return _resolved(output, values) if values else output


_METRIC_METHODS = ("update", "compute", "reset")


def _recording_log(module: LightningModule, notes: list[tuple]) -> dict[str, Callable]:
    def log(self: LightningModule, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        notes.append(("log", (name, _detach(value), *args), kwargs))

    def log_dict(self: LightningModule, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(dictionary, (Token, MetricCollection)):
            notes.append(("log_dict", (dictionary, *args), kwargs))
        else:
            notes.append(("log_dict", ({key: _detach(value) for key, value in dictionary.items()}, *args), kwargs))

    return {"log": MethodType(log, module), "log_dict": MethodType(log_dict, module)}


def _recording_methods(metric: Metric, notes: list[tuple]) -> dict[str, Callable]:
    """Instance attributes, because torchmetrics keeps wrapped methods there that would hide those of a class."""

    def update(self: Metric, *args: Any, **kwargs: Any) -> None:
        notes.append(("metric", self, "update", _detached(args), _detached(kwargs)))

    def compute(self: Metric) -> Token:
        notes.append(("metric", self, "compute", (), {}))
        return Token(len(notes) - 1)

    def reset(self: Metric) -> None:
        notes.append(("metric", self, "reset", (), {}))

    return {function.__name__: MethodType(function, metric) for function in (update, compute, reset)}


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _detached(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _detach(value) for key, value in values.items()}
    return tuple(_detach(value) for value in values)


def _resolved(tree: Any, values: dict[int, Any]) -> Any:
    """The tree with real values in place of tokens."""
    if isinstance(tree, Token):
        return values[tree.index]
    if type(tree) in (tuple, list):
        return type(tree)(_resolved(item, values) for item in tree)
    if type(tree) is dict:
        return {key: _resolved(value, values) for key, value in tree.items()}
    return tree_map(lambda leaf: values[leaf.index] if isinstance(leaf, Token) else leaf, tree)
