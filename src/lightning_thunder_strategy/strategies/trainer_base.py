"""What all our Trainer strategies do: compiled steps, states, setup and teardown."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_thunder_strategy.compiler.config import CompileConfig
from lightning_thunder_strategy.compiler.report import OptimizerRecord, Record, Report
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.distributed import checkpoint as states
from lightning_thunder_strategy.distributed import last_words, sharding
from lightning_thunder_strategy.precision.options import accept
from lightning_thunder_strategy.steps.notes import copy_changed_notes
from lightning_thunder_strategy.steps.opaque import OpaqueMachinery
from lightning_thunder_strategy.steps.precompile import compile_early
from lightning_thunder_strategy.steps.recorder import StepRecorder
from lightning_thunder_strategy.steps.step import CompiledStep, StepPipelines
from lightning_thunder_strategy.strategies.early_release import EarlyRelease
from lightning_thunder_strategy.strategies.engine import Engine
from lightning_thunder_strategy.strategies.trainer_states import SavedStates

_STAGES = {TrainerFn.FITTING: "training", TrainerFn.VALIDATING: "validation", TrainerFn.TESTING: "test",
           TrainerFn.PREDICTING: "predict"}  # fmt: skip


class CompiledStepsStrategy(SavedStates):
    """Base of the Trainer strategies, mixed in before the Lightning class that knows launchers and ranks."""

    @override
    def _use(self, engine: Engine) -> None:
        super()._use(engine)
        self._steps: dict[str, CompiledStep] = {}
        self._records: dict[str, Record] = {}
        self._shared: Optional[tuple[StepRecorder, OpaqueMachinery]] = None
        self._connected: Optional[pl.LightningModule] = None  # what steps and records belong to
        self._stage = ""  # "training", "validation", "test" or "predict"
        self._example_batch: Any = None
        self._early_release = EarlyRelease()

    @property
    def compile_config(self) -> CompileConfig:
        """The options that ``compile=`` stands for."""
        return self._engine.options.compile_config

    # -------------------------------------------------------------------------------------------------------- setup

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Optional[Precision]) -> None:
        self._precision_plugin = precision_plugin
        if accept(precision_plugin, self):
            self._engine.use_precision(precision_plugin.passes)

    @property
    def several_ranks(self) -> bool:
        """Whether other ranks train with this one."""
        return self._engine.scheme is not None

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """A transform may change what the module's state consists of, and does so in setup."""
        return any(type(transform).module is not Transform.module for transform in self._engine.options.transforms)

    @override
    def connect(self, model: "pl.LightningModule") -> None:
        if getattr(model, "_compiler_ctx", None) is not None:
            raise TypeError(
                f"{type(model).__name__} is already compiled with torch.compile, and {type(self).__name__} compiles it "
                "itself: pass the plain module (`trainer.fit(model)` instead of `trainer.fit(torch.compile(model))`)."
            )
        if model is not self._connected:
            self._connected = model
            self._records = {}
            self._drop_steps()
            self._engine.forget_precision(everything=True)
        super().connect(model)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.accelerator is not None and self.model is not None
        self._engine.failed = False
        _refuse_callbacks(trainer.callbacks, self._engine)  # type: ignore[attr-defined]
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._open_saves(trainer.callbacks)  # type: ignore[attr-defined]
        layer_sync = getattr(self, "_layer_sync", None)
        if fitting and layer_sync is not None:
            self.model = layer_sync.apply(self.model)
        if not sharding.has_sharded_parameters(self.model):
            self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.model = self._setup_model(self.model)
        if fitting:
            self._engine.spread_copies(_averages(trainer.callbacks))  # type: ignore[attr-defined]
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            optimizers_to_device(self.optimizers, self.root_device)
        self._stage = _STAGES[trainer.state.fn]
        if any(step.outdated for step in self._steps.values()):
            self._drop_steps()
        self._compile_early(trainer)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        sharding.move_to(self.model, self.root_device)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        if self._engine.scheme is not None:
            self._drop_steps()  # programs hold the parameters of the earlier stage
        replaced = self._engine.spread(model, self.root_device)
        for optimizer in self.optimizers:  # of an earlier fit, whose state may still be saved
            states.exchange_parameters(optimizer, replaced)
        return model

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        self._reset_optimizers_and_schedulers()
        self._engine.optimizer_steps.forget()
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self._engine.check_optimizer(optimizer)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._engine.failed = True
        reason = last_words.explain(exception)
        if reason is not None:
            exception.args = (f"{reason} Here communication failed: {exception}",)
        self._close_saves()
        if isinstance(exception, RuntimeError) and "double backward" in str(exception):
            exception.args = (f"{_DIFFERENTIATED_TWICE} ({exception})",)

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        if module is not None:
            if self._engine.options.report and self.is_global_zero and self._stage == "training":
                from rich.console import Console

                Console().print(self.report())
            if self._engine.scheme is not None:
                self._drop_steps()  # programs hold the parameters as they were spread
            replaced = self._engine.release_module(module)
            for optimizer in self.optimizers:
                states.exchange_parameters(optimizer, replaced)
            if sharding.has_sharded_parameters(module):
                layer_sync = getattr(self, "_layer_sync", None)
                if layer_sync is not None and self._stage == "training":
                    layer_sync.revert(module)
                self._lightning_module = None  # the base class would move it
        sharded_optimizers = self._optimizers if self._engine.sharded else []
        if sharded_optimizers:
            self._optimizers = []
        try:
            super().teardown()
        finally:
            self._lightning_module = module
            if sharded_optimizers:
                self._optimizers = sharded_optimizers
            self._close_saves()

    def __getstate__(self) -> dict:
        state = super().__getstate__()
        state.update(_steps={}, _shared=None)
        return state

    # -------------------------------------------------------------------------------------------------------- steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self._early_release.within(self.lightning_module), self.precision_plugin.train_step_context():
            return self._call_step("training_step", args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._call_step("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._call_step("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._call_step("predict_step", args, kwargs)

    def _call_step(self, name: str, args: tuple, kwargs: dict) -> Any:
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        step = self._step(name)
        self._before_step(step, args)
        self._engine.check_inputs(name, args)
        optimizers = [*self._lightning_optimizers, *self.optimizers]
        return step(args, kwargs, optimizers, schedulers, self._gathering)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Optional[nn.Module] = None, **kwargs: Any
    ) -> Any:
        with self._engine.optimizer_steps.taken(optimizer) as outside:
            return super().optimizer_step(optimizer, outside(closure), model, **kwargs)

    def _before_step(self, step: CompiledStep, args: Sequence[Any]) -> None:
        """What happens before each step, outside its program."""

    def _gathering(self) -> AbstractContextManager:
        if self._engine.scheme is None:
            return nullcontext()
        assert self.lightning_module is not None
        return sharding.gathering(listed=self.lightning_module.automatic_optimization)

    def _step(self, name: str) -> CompiledStep:
        if name not in self._steps:
            module = self.lightning_module
            assert module is not None
            if self._shared is None:
                self._shared = (StepRecorder(module), OpaqueMachinery(module))
            fullgraph = self.compile_config.fullgraph
            pipelines = StepPipelines(
                self._engine.pipeline({"": module}, True), self._engine.pipeline({"": module}, fullgraph)
            )
            pipelines.whole.prepare = copy_changed_notes
            pipelines.whole.before = self._early_release if name == "training_step" else None
            step = CompiledStep(module, name, pipelines, *self._shared, self._engine.agreement)
            if name in self._records:
                step.continue_record(self._records[name])
            self._records[name] = step.record
            self._steps[name] = step
        return self._steps[name]

    def _drop_steps(self) -> None:
        self._steps = {}
        self._shared = None

    def precompile(self, batch: Any) -> None:
        """Compile the training step during setup of the next ``fit`` instead of at its first batch.

        Args:
            batch: A batch as the training dataloader yields it. It is only read for its structure, shapes and dtypes;
                buffers, gradients and random numbers are as before afterwards.
        """
        self._example_batch = batch

    def _compile_early(self, trainer: "pl.Trainer") -> None:
        module = self.lightning_module
        assert module is not None
        if self._stage == "training" and self._example_batch is not None:
            batch, step = self._as_loaded(self._example_batch), self._step("training_step")
            with self.precision_plugin.train_step_context():
                compile_early(module, step, (batch, 0), self._gathering, torch.enable_grad())
        elif module.example_input_array is not None:
            predicts = self._stage == "predict" and not is_overridden("predict_step", module)
            if not predicts and self.compile_config.mode != "forward":
                return
            inputs, step = self._as_loaded(module.example_input_array), self._step(f"{self._stage}_step")
            inference = torch.inference_mode if trainer.predict_loop.inference_mode else torch.no_grad
            gradients = torch.enable_grad if self._stage == "training" else inference
            with self.precision_plugin.forward_context():
                compile_early(module, step, (inputs, 0), self._gathering, gradients())
        self._engine.forget_precision(everything=False)

    def _as_loaded(self, batch: Any) -> Any:
        """An example batch as a loop hands it to a step."""
        assert self.lightning_module is not None
        batch = self.precision_plugin.convert_input(batch)
        return self.batch_to_device(self.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0))

    # ------------------------------------------------------------------------------------------------------- report

    def records(self) -> list[Record]:
        """What was compiled, one record a step."""
        return list(self._records.values())

    def optimizer_records(self) -> list[OptimizerRecord]:
        """How optimizers took their newest steps; none without ``compile_optimizer``."""
        return self._engine.optimizer_steps.records

    def report(self) -> Report:
        """What was compiled, by whom, and what was not."""
        return self._engine.report(self.records(), self.lightning_module)


_DIFFERENTIATED_TWICE = (
    "A part of the step was compiled, and `torch.autograd.grad(..., create_graph=True)` was applied to it outside: it "
    "cannot be differentiated twice. Compute it and its gradient without anything in between that cuts the program, or "
    "set compile='off'."
)


def _averages(callbacks: Sequence[Any]) -> list[nn.Module]:
    """Copies of the module in which callbacks keep an average of its weights."""
    held = [callback._average_model for callback in callbacks if isinstance(callback, WeightAveraging)]
    return [average.module for average in held if average is not None]


def _refuse_callbacks(callbacks: Sequence[Any], engine: Engine) -> None:
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging) and engine.sharded:
            raise TypeError(
                f"The callback {type(callback).__name__} averages a copy of the module that it made before the "
                "parameters were sharded, and cannot mix the two: use WeightAveraging or EMAWeightAveraging instead, "
                "or a strategy that keeps parameters whole, such as ThunderDDPStrategy."
            )
        if isinstance(callback, ModelPruning) and engine.parallelism != "none":
            raise TypeError(
                f"The callback {type(callback).__name__} replaces parameters during training, and the strategy has "
                "spread them over the ranks: prune before `fit` or in `configure_model`, or use ThunderStrategy."
            )
