"""The compiled calls of a module that Fabric has set up."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional

import torch
from lightning.fabric.wrappers import _LIGHTNING_MODULE_STEP_METHODS as STEP_METHODS
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_thunder_strategy.compiler import _torch_aot, _torch_dynamo
from lightning_thunder_strategy.compiler.compile import CompiledFunction
from lightning_thunder_strategy.compiler.pipeline import Pipeline
from lightning_thunder_strategy.compiler.report import Record, recording
from lightning_thunder_strategy.distributed import sharding
from lightning_thunder_strategy.distributed.buffers import broadcast_buffers
from lightning_thunder_strategy.steps.notes import copy_changed_notes
from lightning_thunder_strategy.steps.opaque import OpaqueMachinery
from lightning_thunder_strategy.steps.recorder import StepRecorder
from lightning_thunder_strategy.steps.step import CompiledStep, StepPipelines
from lightning_thunder_strategy.steps.submodules import CompiledSubmodules
from lightning_thunder_strategy.strategies.engine import Engine


class CompiledModule:
    """The compiled calls of one module: its forward, and each method that Fabric redirects through it.

    Attributes:
        buffers_changed: Whether ranks may have different buffers (such as BatchNorm statistics).

    Args:
        module: The module.
        engine: Compiles.
        number: Which of the modules of the strategy it is.
    """

    def __init__(self, module: nn.Module, engine: Engine, number: int) -> None:
        self.module = module
        self.buffers_changed = False
        self._number = number
        self.records: dict[str, Record] = {}
        self._engine = engine
        self._pipeline: Optional[Pipeline] = None
        self._calls: dict[str, Callable] = {}
        self._steps: dict[str, CompiledStep] = {}
        self._shared: Optional[tuple[StepRecorder, OpaqueMachinery]] = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self._redirected_method()
        self.share_buffers()
        if name not in self._calls:
            self._calls[name] = self._make(name)
        owner = f" of module {self._number}" if self._number else ""
        self._engine.check_inputs(f"{name}{owner}", (args, kwargs))
        begin_call(self._engine, self.records[name], owner, self.begin(), begin=name not in self._steps)
        with gathering(self._engine), recording(self.records[name]):
            result = self._calls[name](*args, **kwargs)
        self.reduce_after_backward_of(result)
        return result

    def begin(self) -> bool:
        """A call of the module, or of a function that calls it, begins. Returns whether its gradients stay local."""
        accumulation = sharding.accumulation_of(self.module)
        if accumulation is None:
            return False
        if torch.is_grad_enabled():
            accumulation.begin(self.module, add=False)
        else:
            accumulation.local = False
        return accumulation.local

    def reduce_after_backward_of(self, result: Any) -> None:
        """Reduce what programs leave unreduced at the end of a backward that starts at a tensor of ``result``."""
        accumulation, scheme = sharding.accumulation_of(self.module), self._engine.scheme
        if accumulation is None or scheme is None or not accumulation.local:
            return

        def after_backward() -> None:
            accumulation.after_backward(self.module, scheme.mesh)

        def hook(gradient: Tensor) -> None:
            _torch_aot.at_end_of_backward(after_backward)

        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(hook)

    def settle(self) -> None:
        """An optimizer is about to step: reduce gradients that no backward has reduced."""
        accumulation, scheme = sharding.accumulation_of(self.module), self._engine.scheme
        if accumulation is not None and scheme is not None:
            accumulation.settle(self.module, scheme.mesh)

    def share_buffers(self) -> None:
        """Give every rank rank zero's buffers, once after each optimizer step."""
        if self.buffers_changed and self._engine.scheme is not None:
            broadcast_buffers(self.module, self._engine.scheme.mesh, again=True)
        self.buffers_changed = False

    def _redirected_method(self) -> str:
        """The method that Fabric redirects through the forward, if it does. Its patch of ``forward`` is taken back."""
        patched = self.module.__dict__.get("forward")
        variables = getattr(getattr(patched, "__code__", None), "co_freevars", ())
        if "method_name" not in variables or "original_forward" not in variables:
            return "forward"
        cells = dict(zip(variables, patched.__closure__))
        original = cells["original_forward"].cell_contents
        if getattr(original, "__func__", None) is type(self.module).forward:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = original
        return cells["method_name"].cell_contents

    def _make(self, name: str) -> Callable:
        module = self.module
        config = self._engine.options.compile_config
        if isinstance(module, LightningModule) and name in STEP_METHODS and config.mode == "forward":
            return self._make_step(module, name)
        record = self.records[name] = Record(name, config.mode)

        def call(*args: Any, **kwargs: Any) -> Any:
            function = _torch_dynamo.plain_call(module) if name == "forward" else getattr(module, name)
            return function(*args, **kwargs)

        if config.mode == "off":
            return call
        if self._pipeline is None:
            self._pipeline = self._engine.pipeline({"": module}, config.fullgraph, number=self._number)
        if config.mode == "submodules":
            compiled = CompiledSubmodules(module, self._pipeline, record, forward=False)
            return lambda *args, **kwargs: compiled(lambda: call(*args, **kwargs))
        return CompiledFunction(call, self._pipeline, record)

    def _make_step(self, module: LightningModule, name: str) -> Callable:
        """A LightningModule's step with its logging, as the Trainer would run it."""
        if self._shared is None:
            self._shared = (StepRecorder(module), OpaqueMachinery(module))
        fullgraph = self._engine.options.compile_config.fullgraph
        whole, parts = (self._engine.pipeline({"": module}, only, "step", self._number) for only in (True, fullgraph))
        whole.prepare = copy_changed_notes
        step = CompiledStep(module, name, StepPipelines(whole, parts), *self._shared, self._engine.agreement)
        self._steps[name], self.records[name] = step, step.record
        return lambda *args, **kwargs: step(args, kwargs, module._fabric_optimizers, [], nullcontext)


def begin_call(engine: Engine, record: Record, owner: str, local: bool, begin: bool = True) -> None:
    """Other modules, inference and gradients that stay local have programs with other collectives: ranks compare only
    those of one kind."""
    if engine.agreement is not None and begin:
        kind = " without gradients" if not torch.is_grad_enabled() else " accumulating" if local else ""
        record.group = f"{record.name}{owner}{kind}"
        engine.agreement.begin(record.group)


def gathering(engine: Engine) -> AbstractContextManager:
    """Inside, parameter attributes yield the tensors to compute with."""
    return nullcontext() if engine.scheme is None else sharding.gathering()
