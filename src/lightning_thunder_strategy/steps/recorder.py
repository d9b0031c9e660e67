"""Logging and metrics inside a compiled step: written down while it runs, replayed right after."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_thunder_strategy.steps.lists import GrowingList, GrowingLists
from lightning_thunder_strategy.steps.loggers import Loggers, own
from lightning_thunder_strategy.steps.notes import Note, kept
from lightning_thunder_strategy.steps.token import MetricValueUsedError, Token, has_token, resolved, store_values

_OWN_REFERENCES = 2  # to a token: a local variable, the argument of getrefcount


class StepRecorder:
    """Replaces what a step does to the world by notes while it runs as one program.

    That is ``log``, ``log_dict``, calls of metrics and loggers, and appending to the module's lists.

    The notes are outputs of the program. :meth:`replay` makes the real calls in the same order, so the state of
    metrics, reductions and loggers stays with torchmetrics and Lightning.

    Args:
        module: The LightningModule.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._notes: list[Note] = []
        self._logging = _recording_log(module, self._notes)
        self._lists = GrowingLists(vars(module), self._notes)
        self._loggers = Loggers(
            lambda cls, name: _recording_call(self._notes, name),
            lambda logger: RecordedExperiment(logger, self._notes),
            _refuse_collected,
        )
        self._metrics: list[Any] = []
        self._classes: dict[tuple, type] = {}
        self._substitutes: list[tuple[type, dict[str, Callable]]] = []  # for each metric: its class and methods

    @contextmanager
    def recording(self, schedulers: Sequence[Any] = ()) -> Iterator[None]:
        """While open, those calls are noted down.

        Args:
            schedulers: Learning-rate schedulers that the step may ask for the last learning rate, which Dynamo would
                refuse to read.
        """
        self._notes.clear()
        self._find_metrics()
        saved: list[tuple[dict, tuple[str, ...], dict]] = []
        classes: list[tuple[Any, type]] = []
        lists = self._lists.put()
        try:
            _put(self._module, self._logging, saved)
            for scheduler in schedulers:
                if "get_last_lr" not in vars(scheduler) and hasattr(scheduler, "_last_lr"):
                    _put(scheduler, {"get_last_lr": MethodType(_last_learning_rates, scheduler)}, saved)
            for metric, (cls, methods) in zip(self._metrics, self._substitutes):
                classes.append((metric, type(metric)))
                _put(metric, methods, saved)
                object.__setattr__(metric, "__class__", cls)
            with self._loggers.replaced(self._module):
                yield
        finally:
            self._lists.take_back(lists)
            for metric, cls in classes:
                object.__setattr__(metric, "__class__", cls)
            for attributes, names, before in saved:
                for name in names:
                    attributes.pop(name, None)
                attributes.update(before)

    def replay(self, output: Any) -> Any:
        """Make the noted calls, and put real values in place of tokens in the step's output.

        Raises:
            RuntimeError: If the step kept the value of a metric where it cannot be found.
        """
        notes, tokens = list(self._notes), {}
        self._notes.clear()
        values: dict[int, Any] = {}
        for note in notes:
            target = note.target.real if isinstance(note.target, (GrowingList, RecordedExperiment)) else note.target
            function = target if note.method == "forward" else getattr(target, note.method)
            value = function(*resolved(note.args, values), **resolved(note.kwargs, values))
            if note.token is not None:
                values[note.token.number] = value
                tokens[note.token.number] = (note.token, f"{type(target).__name__}.{note.method}")
        if not tokens:
            return output
        returned = has_token(output)
        output = resolved(output, values)
        del notes, note
        for number in list(tokens):
            token, name = tokens.pop(number)
            if sys.getrefcount(token) > _OWN_REFERENCES:
                self._store(token, name, values[number], returned)
        return output

    def adapt(self, reason: str) -> bool:
        """A step could not be compiled as one program. Whether to try again, because some lists are left alone now."""
        return self._lists.leave_alone(reason)

    def _store(self, token: Token, name: str, value: Any, returned: bool) -> None:
        """The step kept a token: put the value in its place."""
        if not store_values(self._module, {token.number: value}) and not returned:
            raise RuntimeError(
                f"The step keeps the result of {name} somewhere outside its module, where its value cannot be filled "
                "in after the step. Keep it in an attribute of the LightningModule, or compile less than the whole "
                "step (compile='forward')."
            )

    def _find_metrics(self) -> None:
        """Metrics may be added or exchanged while training goes on."""
        metrics = [module for module in walk(self._module) if isinstance(module, (Metric, MetricCollection))]
        if len(metrics) == len(self._metrics) and all(new is old for new, old in zip(metrics, self._metrics)):
            return
        known = {id(metric): substitutes for metric, substitutes in zip(self._metrics, self._substitutes)}
        self._substitutes = [
            known.get(id(metric)) or (self._recording_class(metric), _recording_methods(metric, self._notes))
            for metric in metrics
        ]
        self._metrics = metrics

    def _recording_class(self, metric: Any) -> type:
        cls, states = type(metric), tuple(getattr(metric, "_defaults", ()))
        if (cls, states) not in self._classes:
            notes = self._notes

            def forward(self: Metric, *args: Any, **kwargs: Any) -> Token:
                return _noted(notes, self, "forward", args, kwargs)

            body = {
                "__call__": forward, "forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__,
                "__hash__": object.__hash__,  # torchmetrics' own reads the state
                **{state: property(_refuse_state) for state in states},
            }  # fmt: skip
            self._classes[cls, states] = type(cls.__name__, (cls,), body)
        return self._classes[cls, states]


def walk(root: nn.Module) -> list[nn.Module]:
    """All modules under ``root``, as ``root.modules()`` gives them but in less time."""
    found: dict[int, nn.Module] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            waiting.extend(module._modules.values())
    return list(found.values())


def _put(target: Any, methods: dict[str, Callable], saved: list[tuple[dict, tuple[str, ...], dict]]) -> None:
    """Set instance attributes, and remember what was there."""
    attributes, names = vars(target), tuple(methods)
    saved.append((attributes, names, {name: attributes[name] for name in names if name in attributes}))
    attributes.update(methods)


# ------------------------------------------------------------------------------------- what runs while Dynamo reads


def _noted(notes: list[Note], target: Any, method: str, args: tuple, kwargs: dict) -> Token:
    token = Token(len(notes))
    notes.append(Note(target, method, kept(args), kept(kwargs), token))
    return token


def _recording_call(notes: list[Note], name: str) -> Callable:
    def call(self: Any, *args: Any, **kwargs: Any) -> Token:
        return _noted(notes, self, name, args, kwargs)

    return call


class RecordedExperiment:
    """Stands in for a logger's experiment; every attribute is taken for a method."""

    def __init__(self, logger: Any, notes: list[Note]) -> None:
        self._logger = logger
        self._notes = notes

    def __getattr__(self, name: str) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Token:
            return _noted(self._notes, self, name, args, kwargs)

        return call

    @property
    def real(self) -> Any:
        return own(self._logger, "experiment")


def _recording_log(module: LightningModule, notes: list[Note]) -> dict[str, Callable]:
    def log(self: LightningModule, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        notes.append(Note(self, "log", (name, kept(value), *args), kwargs))

    def log_dict(self: LightningModule, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(dictionary, (Token, MetricCollection)):
            dictionary = {key: kept(value) for key, value in dictionary.items()}
        notes.append(Note(self, "log_dict", (dictionary, *args), kwargs))

    return {"log": MethodType(log, module), "log_dict": MethodType(log_dict, module)}


def _recording_methods(metric: Any, notes: list[Note]) -> dict[str, Callable]:
    """Instance attributes, because torchmetrics keeps wrapped methods there that would hide those of a class."""

    def update(self: Metric, *args: Any, **kwargs: Any) -> None:
        notes.append(Note(self, "update", kept(args), kept(kwargs)))

    def compute(self: Metric) -> Token:
        return _noted(notes, self, "compute", (), {})

    def reset(self: Metric) -> None:
        notes.append(Note(self, "reset", (), {}))

    return {function.__name__: MethodType(function, metric) for function in (update, compute, reset)}


def _refuse_collected(name: str) -> Callable[[Any], Any]:
    def read(self: Any) -> Any:
        raise MetricValueUsedError(f"The step reads trainer.{name}, which is only up to date after the step.")

    return read


def _refuse_state(self: Metric) -> Any:
    raise MetricValueUsedError("The step reads the state of a metric, which is only up to date after the step.")


def _last_learning_rates(self: Any) -> list:
    return [rate.clone() if isinstance(rate, Tensor) else rate for rate in self._last_lr]
