"""A LightningModule's step as a compiled function, in the largest unit that can be compiled."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional

import lightning
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_thunder_strategy.compiler.compile import CompiledFunction, CompileError
from lightning_thunder_strategy.compiler.events import hide_frames, limit_text
from lightning_thunder_strategy.compiler.pipeline import Pipeline
from lightning_thunder_strategy.compiler.report import GraphBreak, Record, recording, warn
from lightning_thunder_strategy.distributed.agreement import AgreedFallback, Agreement
from lightning_thunder_strategy.distributed.sharding import watching_data
from lightning_thunder_strategy.steps.opaque import OpaqueMachinery
from lightning_thunder_strategy.steps.recorder import StepRecorder
from lightning_thunder_strategy.steps.submodules import CompiledSubmodules

hide_frames(Path(lightning.__file__).parent)

Unit = Literal["whole", "parts", "forward", "submodules", "eager"]

HOST_SOURCES = (r".*optim_progress.*", r".*optim_step_progress.*", r".*epoch_progress.*", r"L\['args'\]\[[12]\]")
"""Where a step finds integers that change: the Trainer's counters, ``batch_idx``, ``dataloader_idx``."""

_DATALOADER_IDX = 2  # its place among a step's arguments

_FIRST_UNIT: dict[str, Unit] = {"step": "whole", "forward": "forward", "submodules": "submodules", "off": "eager"}
_MODE: dict[Unit, str] = {
    "whole": "step", "parts": "step", "forward": "forward", "submodules": "submodules", "eager": "off",
}  # fmt: skip


_WHAT: dict[Unit, str] = {
    "parts": "The parts between such places are compiled; Lightning's own calls, backward and optimizer steps in the "
    "step run eagerly.",
    "submodules": "Instead the outermost submodules that it calls are compiled; the rest of it runs eagerly.",
    "eager": "Nothing of it is compiled.",
}


@dataclass(frozen=True)
class StepPipelines:
    """The two ways in which steps are compiled: as one program or not at all, and with breaks."""

    whole: Pipeline
    parts: Pipeline


class CompiledStep:
    """Calls one step method of a module compiled, and falls back to smaller units with one message each.

    Args:
        module: The LightningModule.
        name: ``training_step``, ``validation_step``, ``test_step`` or ``predict_step``.
        pipelines: How to compile.
        recorder: Shared by the steps of the module.
        machinery: Shared by the steps of the module.
        agreement: How ranks agree on falling back; ``None`` on one process.
    """

    def __init__(
        self,
        module: LightningModule,
        name: str,
        pipelines: StepPipelines,
        recorder: StepRecorder,
        machinery: OpaqueMachinery,
        agreement: Optional[Agreement],
    ) -> None:
        self._module = module
        self._name = name
        self._pipelines = pipelines
        self._recorder = recorder
        self._machinery = machinery
        self._agreement = agreement
        self._fullgraph = pipelines.whole.config.fullgraph and pipelines.parts.config.fullgraph
        self._functions: dict[Any, Any] = {}
        self._each_dataloader = False  # whether each dataloader has a program of its own
        self._submodules: Optional[CompiledSubmodules] = None
        self._submodules_called = False
        self._programs_before = 0  # how many there were when this unit was entered
        self._breaks_before = 0
        self._reason = ""  # why the step is not compiled in the unit that was asked for
        self._announced: Optional[Unit] = None  # the smaller unit that was warned of
        self.choose: Callable[[Unit], str] = lambda unit: ""  # which variant of its programs a call of a unit needs
        self._variant = ""
        self.unit: Unit = _FIRST_UNIT[pipelines.whole.config.mode]
        self.record = Record(name, _MODE[self.unit])
        self._automatic_optimization = module.automatic_optimization
        if name == "training_step" and not module.automatic_optimization and self.unit == "whole":
            self._enter("parts", "it uses manual optimization")

    @property
    def outdated(self) -> bool:
        """Whether the module has changed so that another unit may fit."""
        return self._automatic_optimization != self._module.automatic_optimization

    def __call__(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        optimizers: Sequence[Any],
        schedulers: Sequence[Any],
        environment: Callable[[], AbstractContextManager],
    ) -> Any:
        """Call the step.

        Args:
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            optimizers: Optimizers that it may use.
            schedulers: Learning-rate schedulers that it may use.
            environment: Opened around the step's own code, and not around replayed logging.
        """
        self._variant = self.choose(self.unit)
        self.record.group = f"{self._name}{self._variant}"
        if self._agreement is not None:
            self._agreement.begin(self.record.group)
        try:
            while True:
                try:
                    return self._run(tuple(args), kwargs, optimizers, schedulers, environment)
                except (CompileError, AgreedFallback) as error:
                    if not self._adapt(args, error):
                        self._fall_back(error)
                        self._variant = self.choose(self.unit)
        finally:
            self._announce()

    def continue_record(self, record: Record) -> None:
        """Add to the record of an earlier stage of the same step."""
        record.mode, record.note, record.limit_reason = self.record.mode, self.record.note, None
        self.record = record
        self._programs_before = len(record.programs)
        self._breaks_before = len(record.graph_breaks)

    def dry_run(self, args: tuple, environment: Callable[[], AbstractContextManager]) -> Any:
        """Compile the step by calling it, without its logging and metrics. Does nothing if it is not one program."""
        if self.unit != "whole":
            return None
        if self._agreement is not None:
            self._agreement.begin(self.record.group or self._name)
        while self.unit == "whole":
            try:
                with self._recorder.recording(), environment():
                    return self._whole(args)(*args)
            except (CompileError, AgreedFallback) as error:
                if not self._adapt(args, error):
                    self._fall_back(error)
        return None

    def compile_forward(self, inputs: Any, environment: Callable[[], AbstractContextManager]) -> None:
        """Compile the module's forward on example inputs."""
        if self.unit != "forward" or not is_overridden("forward", self._module):
            return
        inputs = inputs if isinstance(inputs, (tuple, list, dict)) else (inputs,)
        with recording(self.record), environment():
            self._compiled_submodules().compile_root(inputs)

    # ------------------------------------------------------------------------------------------------------- units

    def _run(
        self, args: tuple, kwargs: dict, optimizers: Sequence[Any], schedulers: Sequence[Any], environment: Callable
    ) -> Any:
        if self.unit == "whole":
            with self._recorder.recording(schedulers), environment():
                output = self._whole(args)(*args, **kwargs)
            return self._recorder.replay(output)
        if self.unit == "parts":
            with self._machinery.hidden([*optimizers, *schedulers]), environment():
                function = self._function("parts", self._pipelines.parts, self._named_step())
                function.warn_of_limit = False
                output = function(*args, **kwargs)
            if self.record.limit_reason is not None:
                reason, self.record.limit_reason = self.record.limit_reason, None
                self._enter("submodules", limit_text(reason))
            elif self._announced is None and len(self.record.programs) == self._programs_before:
                self._enter("submodules", self._reason)  # nothing could be cut out of it
            return output
        method = getattr(self._module, self._name)
        with recording(self.record), environment():
            if self.unit == "eager":
                with watching_data():
                    return method(*args, **kwargs)
            compiled = self._compiled_submodules()
            output = compiled(lambda: method(*args, **kwargs))
        if self._submodules_called:
            return output
        self._submodules_called = True
        compiled_any = len(self.record.programs) > self._programs_before
        if self.unit == "forward" and self._module not in compiled.entries:
            self._enter("submodules", "the step does not call the module's own forward")
        if not compiled.entries:
            self._enter("eager", f"{self._reason}; it calls no submodule that has parameters".removeprefix("; "))
        elif not compiled_any:
            self._enter("eager", f"{self._reason}; its submodules cannot be compiled either".removeprefix("; "))
        return output

    def _whole(self, args: tuple) -> Callable:
        """The step as one program; of this dataloader only, where its index must be a constant."""
        index = args[_DATALOADER_IDX] if self._each_dataloader and len(args) > _DATALOADER_IDX else None
        return self._function(("whole", index, self._variant), self._pipelines.whole, self._named_step(index))

    def _named_step(self, index: Optional[int] = None) -> Callable:
        module, name = self._module, self._name

        def step(*args: Any, **kwargs: Any) -> Any:
            if index is not None:
                args = (*args[:_DATALOADER_IDX], index, *args[_DATALOADER_IDX + 1 :])
            return getattr(module, name)(*args, **kwargs)

        return step

    def _function(self, key: Any, pipeline: Pipeline, step: Callable) -> CompiledFunction:
        if key not in self._functions:
            self._functions[key] = CompiledFunction(step, pipeline, self.record, HOST_SOURCES)
        return self._functions[key]

    def _compiled_submodules(self) -> CompiledSubmodules:
        if self._submodules is None:
            forward = self.unit == "forward" and is_overridden("forward", self._module)
            self._submodules = CompiledSubmodules(self._module, self._pipelines.parts, self.record, forward)
        return self._submodules

    # ---------------------------------------------------------------------------------------------------- fallback

    def _adapt(self, args: Sequence[Any], error: Exception) -> bool:
        """Whether it is worth trying again to compile the step as one program, with less of it left open."""
        if self.unit != "whole" or not isinstance(error, CompileError) or error.recompile_limit:
            return False
        if self._recorder.adapt(error.reason):
            return True
        if self._each_dataloader or len(args) <= _DATALOADER_IDX:
            return False
        self._each_dataloader = True  # the index may be part of a name, or choose a layer
        return True

    def _fall_back(self, error: Exception) -> None:
        unit: Unit = "parts"
        if isinstance(error, AgreedFallback):
            unit = error.unit  # type: ignore[assignment]
            error = CompileError(self._name, "another rank could not compile it as one program", None, None, False)
        elif isinstance(error, CompileError):
            if error.recompile_limit:
                unit = "submodules"
            if "torch.autograd.grad" in error.reason:
                unit = "eager"  # a compiled part could not be differentiated twice
            if self._agreement is not None and self.unit == "whole":
                unit = self._agreement.fall_back(self.record.group or self._name, unit)  # type: ignore[assignment]
        if self._fullgraph or not isinstance(error, CompileError) or self.unit != "whole":
            raise error
        where = f"{error.file}:{error.line}: " if error.file else ""
        self._enter(unit, f"{where}{error.reason}")

    def _enter(self, unit: Unit, reason: str) -> None:
        """Go on with a smaller unit. It is said once it is known how far the fall goes."""
        if self._fullgraph:
            raise CompileError(self._name, reason, None, None, False)
        self.unit, self._reason = unit, reason.rstrip(".")
        self._programs_before = len(self.record.programs)
        self._breaks_before = len(self.record.graph_breaks)
        self.record.mode = _MODE[unit]
        self.record.note = f"not one compiled program: {self._reason}. {_WHAT[unit]}"

    def _announce(self) -> None:
        """After a call: say what is compiled instead of the step, or where that is cut, if it is new."""
        if self.unit in ("forward", "submodules") and len(self.record.graph_breaks) > self._breaks_before:
            self._announce_cut(self.record.graph_breaks[self._breaks_before])
            self._breaks_before = sys.maxsize  # the report has the others
        if self.unit == self._announced or not self._reason:
            return
        if self.unit == "submodules" and not self._submodules_called:
            return  # the next call tells whether there is anything to compile
        self._announced = self.unit
        warn(f"{self._name} is {self.record.note} Set fullgraph=True to make this an error.")

    def _announce_cut(self, found: GraphBreak) -> None:
        if found.reason.partition(":")[0] in self._reason:
            return  # why the unit was entered: that was said
        what = "forward that it calls is" if self.unit == "forward" else "submodules that it calls are"
        warn(
            f"{self._name}: the compiled {what} cut at {found.file}:{found.line}: {found.reason} That place runs "
            "eagerly. Set fullgraph=True to make this an error."
        )
