"""What all our Fabric strategies do: compiled modules and functions, and their states."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Optional, Union

import torch
from lightning.fabric.plugins import Precision, TorchCheckpointIO
from lightning.fabric.strategies.strategy import Strategy, _apply_filter, _validate_keys_for_strict_loading
from lightning.fabric.utilities.types import _PATH as PathLike
from lightning.fabric.utilities.types import _Stateful
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_thunder_strategy.compiler.compile import CompiledFunction, compiled_view, inlined_views
from lightning_thunder_strategy.compiler.config import CompileConfig
from lightning_thunder_strategy.compiler.report import OptimizerRecord, Record, Report
from lightning_thunder_strategy.distributed import checkpoint as states
from lightning_thunder_strategy.distributed import sharding
from lightning_thunder_strategy.distributed.schemes import whole
from lightning_thunder_strategy.precision.options import LowPrecision, accept
from lightning_thunder_strategy.strategies import storage
from lightning_thunder_strategy.strategies.compiled_calls import CompiledModule, begin_call, gathering
from lightning_thunder_strategy.strategies.engine import Engine

_State = dict[str, Union[nn.Module, Optimizer, Any]]


def _filtered(state: _State, filter: Optional[dict[str, Callable[[str, Any], bool]]]) -> dict[str, Any]:
    """What the user's filters leave of a state."""
    kept: dict[str, Any] = {}
    for key, item in state.items():
        _apply_filter(key, filter or {}, item, kept)
    return kept


def _placed_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A state that is loaded into an optimizer of sharded parameters, cut to this rank's shards."""
    return states.placed_optimizer_state(optimizer, state)


def _names(optimizer: Optimizer, state: _State) -> dict[nn.Parameter, str]:
    """The names of an optimizer's parameters; with the module's key in ``state`` before those that it has twice."""
    owners: dict[nn.Parameter, tuple[str, str]] = {}
    for key, item in state.items():
        if isinstance(item, nn.Module):
            for name, parameter in item.named_parameters():
                owners.setdefault(parameter, (key, name))
    held = [owners[p] for group in optimizer.param_groups for p in group["params"] if p in owners]
    counts = Counter(name for _, name in held)
    return {p: name if counts[name] == 1 else f"{key}.{name}" for p, (key, name) in owners.items()}


class CompiledModulesStrategy(Strategy):
    """Base of the Fabric strategies, mixed in before the Lightning class that knows launchers and ranks."""

    _engine: Engine
    _broadcast_buffers: bool = False

    def _use(self, engine: Engine) -> None:
        self._engine = engine
        self._compiled: list[CompiledModule] = []
        self._functions: list[Record] = []

    @property
    def compile_config(self) -> CompileConfig:
        """The options that ``compile=`` stands for."""
        return self._engine.options.compile_config

    # -------------------------------------------------------------------------------------------------------- setup

    @property
    @override
    def precision(self) -> Precision:
        return self._precision if self._precision is not None else Precision()  # Dynamo reads it

    @precision.setter
    def precision(self, precision: Optional[Precision]) -> None:
        self._precision = precision
        if accept(precision, self):
            self._engine.use_precision(precision.passes)

    @property
    def several_ranks(self) -> bool:
        """Whether other ranks train with this one."""
        return self._engine.scheme is not None

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        return self._setup(module, [])

    @override
    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        return self._setup(module, optimizers), [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def _setup(self, module: nn.Module, optimizers: list[Optimizer]) -> nn.Module:
        if getattr(type(module), "_lts_records", None) is not None:
            raise TypeError(
                f"{type(module).__name__} is already compiled with lts.compile, and {type(self).__name__} compiles it "
                "itself: pass the plain module to `fabric.setup`."
            )
        module = self._engine.setup_module(module, self.root_device, optimizers)
        compiled = CompiledModule(module, self._engine, len(self._compiled))
        self._compiled.append(compiled)
        return compiled_view(module, compiled, lambda: list(compiled.records.values()))

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._engine.check_optimizer(optimizer)
        self._engine.check_precision(self.precision)
        if self._engine.sharded:
            optimizer.register_load_state_dict_pre_hook(_placed_state)  # whole states load as they do elsewhere
        return optimizer

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        for compiled in self._compiled:
            compiled.settle()
        self._engine.check_gradients(optimizer, [compiled.module for compiled in self._compiled])
        with self._engine.optimizer_steps.taken(getattr(optimizer, "_optimizer", optimizer)) as outside:
            if kwargs.get("closure") is not None:
                kwargs["closure"] = outside(kwargs["closure"])
            result = super().optimizer_step(optimizer, **kwargs)
        for compiled in self._compiled:
            compiled.buffers_changed = self._broadcast_buffers
        return result

    @override
    def module_to_device(self, module: nn.Module) -> None:
        sharding.move_to(module, self.root_device)

    def compile_function(self, function: Callable) -> Callable:
        """Compile a function that calls modules set up by this strategy, such as model and loss, as one program.

        Args:
            function: Any function. Modules that it calls become part of its program.

        Returns:
            The compiled function. ``lts.explain`` and ``lts.traces`` take it.
        """
        if self.compile_config.mode == "off":
            return function
        name = getattr(function, "__qualname__", type(function).__qualname__)
        modules = {str(index) if index else "": compiled.module for index, compiled in enumerate(self._compiled)}
        pipeline = self._engine.pipeline(modules, self.compile_config.fullgraph)
        compiled_function = CompiledFunction(function, pipeline, Record(name))
        self._functions.append(compiled_function.record)
        engine, record = self._engine, compiled_function.record
        owner = f" (function {len(self._functions)})" if len(self._functions) > 1 else ""

        def around(call: Callable[[], Any]) -> Any:
            for compiled in self._compiled:
                compiled.share_buffers()
            local = [compiled.begin() for compiled in self._compiled]
            begin_call(engine, record, owner, any(local))
            with gathering(engine), inlined_views():
                result = call()
            for compiled in self._compiled:
                compiled.reduce_after_backward_of(result)
            return result

        compiled_function.around = around
        return compiled_function

    # ------------------------------------------------------------------------------------------------------- report

    def records(self) -> list[Record]:
        """What was compiled: one record for each module's forward and marked methods, and for each function."""
        labelled = []
        for index, compiled in enumerate(self._compiled):
            prefix = f"{type(compiled.module).__name__}[{index}]." if len(self._compiled) > 1 else ""
            labelled += [(prefix + record.name, record) for record in compiled.records.values()]
        names: Counter = Counter()
        for record in self._functions:
            names[record.name] += 1
            number = f"#{names[record.name]}" if names[record.name] > 1 else ""
            labelled.append((record.name + number, record))
        return [dataclasses.replace(record, label=label) for label, record in labelled]

    def module(self) -> Optional[nn.Module]:
        """The modules that were set up, as one."""
        modules = [compiled.module for compiled in self._compiled]
        return modules[0] if len(modules) == 1 else nn.ModuleList(modules) if modules else None

    def optimizer_records(self) -> list[OptimizerRecord]:
        """How optimizers took their newest steps; none without ``compile_optimizer``."""
        return self._engine.optimizer_steps.records

    def report(self) -> Report:
        """What was compiled, by whom, and what was not."""
        return self._engine.report(self.records(), self.module())

    # ------------------------------------------------------------------------------------------------------- states

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return states.full_state(module.state_dict(), keep=True)

    @override
    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        states.load_model_state(module, state_dict, strict)

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's whole state, on every rank (collectives)."""
        return states.full_state(optimizer.state_dict(), keep=True)

    @override
    def save_checkpoint(
        self,
        path: PathLike,
        state: _State,
        storage_options: Optional[Any] = None,
        filter: Optional[dict[str, Callable[[str, Any], bool]]] = None,
    ) -> None:
        path = self.broadcast(path)
        state = self._with_precision(state)
        own = type(self.checkpoint_io) is TorchCheckpointIO and storage.is_local(path)
        if self._engine.options.state_dict_type == "full":
            converted = self._full_checkpoint(state)

            def write(file: Path) -> None:
                self.checkpoint_io.save_checkpoint(_filtered(converted, filter), file)

            if own and storage_options is None:
                storage.write_file(self, Path(path), write)
            elif self.is_global_zero:
                self.checkpoint_io.save_checkpoint(
                    checkpoint=_filtered(converted, filter), path=path, storage_options=storage_options
                )
            return
        if storage_options is not None or not storage.is_local(path):
            where = f"{path!r} with storage_options={storage_options!r}"
            raise ValueError(f"state_dict_type='sharded' writes to a local folder, not to {where}.")
        sharded: dict[str, Any] = {}
        metadata: dict[str, Any] = {}
        for key, item in state.items():
            if isinstance(item, Optimizer):
                item = states.named_optimizer_state(item, _names(item, state))
            elif isinstance(item, _Stateful):
                item = item.state_dict()
            in_shards = isinstance(state[key], (nn.Module, Optimizer)) or states.has_distributed_tensors(item)
            _apply_filter(key, filter or {}, item, sharded if in_shards else metadata)
        storage.write_folder(self, Path(path), sharded, metadata)

    def _with_precision(self, state: _State) -> _State:
        """With what ThunderPrecision remembers, under its name as in the Trainer's checkpoints."""
        name = type(self.precision).__qualname__
        remembered = self.precision.state_dict() if isinstance(self.precision, LowPrecision) else {}
        if remembered and name in state:
            raise ValueError(f"The state has an entry {name!r}, the name of the precision plugin's: rename it.")
        return {**state, name: remembered} if remembered else state

    def _full_checkpoint(self, state: _State) -> dict[str, Any]:
        """Everything that is saved; rank zero gets whole values. Every rank calls it (collectives)."""
        plain = {key: item.state_dict() if isinstance(item, _Stateful) else item for key, item in state.items()}
        return {key: states.full_state(item, keep=self.is_global_zero) for key, item in plain.items()}

    @override
    def load_checkpoint(
        self,
        path: PathLike,
        state: Optional[Union[nn.Module, Optimizer, _State]] = None,
        strict: bool = True,
        weights_only: Optional[bool] = None,
    ) -> dict[str, Any]:
        path = self.broadcast(path)
        checkpoint = self._read(path, state, weights_only)
        if not state:
            return checkpoint
        if isinstance(state, (nn.Module, Optimizer)):
            self._load_into(state, checkpoint, strict)
            return {}
        name = type(self.precision).__qualname__
        if isinstance(self.precision, LowPrecision) and self.precision.delayed is not None and name in checkpoint:
            self.precision.load_state_dict(checkpoint.pop(name))
        _validate_keys_for_strict_loading(state.keys(), checkpoint.keys(), strict=strict)
        for key, item in state.copy().items():
            if key not in checkpoint:
                continue
            if isinstance(item, _Stateful):
                self._load_into(item, checkpoint.pop(key), strict, state)
            else:
                state[key] = checkpoint.pop(key)
        return checkpoint

    def _load_into(self, item: Any, saved: Any, strict: bool, state: Optional[_State] = None) -> None:
        if isinstance(item, nn.Module):
            self.load_module_state_dict(item, saved, strict)
        elif isinstance(item, Optimizer):
            states.load_optimizer_state(item, saved, _names(item, state or {}))
        else:
            item.load_state_dict(saved)

    def _read(self, path: Any, state: Any, weights_only: Optional[bool]) -> dict[str, Any]:
        if storage.is_local(path) and states.is_sharded_checkpoint(Path(path)):
            items = state if isinstance(state, dict) else {}
            likes = {key: item.state_dict() for key, item in items.items() if isinstance(item, nn.Module)}
            optimizers = [key for key, item in items.items() if isinstance(item, Optimizer)]
            sharded, metadata = storage.read_folder(Path(path), likes, optimizers, weights_only)
            return {**metadata, **sharded}
        if type(self.checkpoint_io) is TorchCheckpointIO:
            return storage.read_file(path, weights_only)
        return self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)

    # ---------------------------------------------------------------------------------------------------- gradients

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: Union[float, int],
        norm_type: Union[float, int] = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        return whole(super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite))

    def _init_context(self, empty_init: Optional[bool]) -> AbstractContextManager:
        """Sharded strategies make empty modules on the meta device; setup gives them values."""
        stack = ExitStack()
        if empty_init:
            stack.enter_context(torch.device("meta"))
        stack.enter_context(self.precision.module_init_context())
        return stack
