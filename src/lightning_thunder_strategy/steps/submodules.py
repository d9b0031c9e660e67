"""Compiles the outermost submodules that a step calls."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_thunder_strategy.compiler import _torch_dynamo
from lightning_thunder_strategy.compiler.compile import module_entry
from lightning_thunder_strategy.compiler.pipeline import Pipeline
from lightning_thunder_strategy.compiler.report import Record


class CompiledSubmodules:
    """Runs a function so that modules which it calls, and not through another module, run compiled.

    Args:
        root: The module whose submodules may be compiled.
        pipeline: Compiles them.
        record: What is recorded if no step is active.
        forward: Also compile calls of ``root`` itself.

    Attributes:
        entries: The modules that were called so far, and their compiled calls.
    """

    def __init__(self, root: nn.Module, pipeline: Pipeline, record: Record, forward: bool) -> None:
        self._root = root
        self._pipeline = pipeline
        self._record = record
        modules = [m for m in root.modules() if not isinstance(m, (Metric, MetricCollection))]
        self._watched = {m: self._outermost(m) for m in modules if forward or m is not root}
        self.entries: dict[nn.Module, Callable] = {}

    def __call__(self, call: Callable[[], Any]) -> Any:
        """Run ``call``."""
        known = len(self.entries)
        with _torch_dynamo.compiled_calls(self._watched):
            result = call()
        if len(self.entries) > known:
            self._stop_watching_parts()
        return result

    def compile_root(self, inputs: Any) -> None:
        """Compile calls of the root on example inputs: positional, or by name in a dictionary."""
        self(lambda: self._root(**inputs) if isinstance(inputs, dict) else self._root(*inputs))

    def _outermost(self, module: nn.Module) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if module not in self.entries:
                if not any(True for _ in module.parameters()):
                    return _torch_dynamo.plain_call(module)(*args, **kwargs)
                self.entries[module] = module_entry(module, self._pipeline, self._record)
            with _torch_dynamo.compiled_calls(dict.fromkeys(self._watched)):  # its own submodules are part of it
                return self.entries[module](*args, **kwargs)

        return call

    def _stop_watching_parts(self) -> None:
        """What is only called as part of a compiled module need not be watched."""
        parts = {part for module in self.entries for part in module.modules()} - self.entries.keys()
        self._watched = {module: call for module, call in self._watched.items() if module not in parts}
