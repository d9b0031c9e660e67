"""Compiles the outermost submodules that a step calls."""

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_thunder_strategy.compiler import _torch_compat
from lightning_thunder_strategy.compiler.compile import module_entry
from lightning_thunder_strategy.compiler.pipeline import Pipeline
from lightning_thunder_strategy.compiler.report import Record


class CompiledSubmodules:
    """Finds the submodules that a step calls directly by watching one eager call, then compiles those.

    Args:
        root: The module whose submodules may be compiled.
        pipeline: Compiles them.
        record: What is recorded if no step is active.
        forward: Also compile calls of ``root`` itself.
    """

    def __init__(self, root: nn.Module, pipeline: Pipeline, record: Record, forward: bool) -> None:
        self._root = root
        self._pipeline = pipeline
        self._record = record
        self._candidates = [m for m in root.modules() if forward or m is not root]
        self._made: dict[nn.Module, Callable] = {}
        self.entries: dict[nn.Module, Callable] | None = None

    def _entry(self, module: nn.Module) -> Callable:
        if module not in self._made:
            self._made[module] = module_entry(module, self._pipeline, self._record)
        return self._made[module]

    def compile_root(self, inputs: Any) -> None:
        """Compile calls of the root on example inputs: positional, or by name in a dictionary."""
        with _torch_compat.compiled_calls({self._root: self._entry(self._root)}):
            self._root(**inputs) if isinstance(inputs, dict) else self._root(*inputs)

    def watch(self, call: Callable[[], Any]) -> Any:
        """Run ``call`` eagerly, but for what is compiled already, and note which modules it calls from outside any
        other."""
        found: dict[nn.Module, Callable] = {}
        depth = 0

        def spy(module: nn.Module) -> Callable:
            def entry(*args: Any, **kwargs: Any) -> Any:
                nonlocal depth
                run = _torch_compat.plain_call(module)
                if depth == 0 and any(True for _ in module.parameters()):
                    ready = module in self._made
                    found[module] = self._entry(module)
                    if ready:
                        return found[module](*args, **kwargs)
                depth += 1
                try:
                    return run(*args, **kwargs)
                finally:
                    depth -= 1

            return entry

        with _torch_compat.compiled_calls({module: spy(module) for module in self._candidates}):
            result = call()
        self.entries = found
        return result

    def __call__(self, call: Callable[[], Any]) -> Any:
        """Run ``call`` with the found modules compiled."""
        if self.entries is None:
            return self.watch(call)
        with _torch_compat.compiled_calls(self.entries):
            return call()
