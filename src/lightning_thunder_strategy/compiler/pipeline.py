"""The backend that Dynamo calls with each acquired graph: transform, differentiate, dispatch."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter  # by name: tests of users replace `time.perf_counter`
from typing import Any, Optional, Protocol

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_thunder_strategy.compiler import _torch_aot, _torch_dynamo, _torch_inductor, cache, events
from lightning_thunder_strategy.compiler._torch_dtensor import merge_equal_functions
from lightning_thunder_strategy.compiler.claims import claim_operators
from lightning_thunder_strategy.compiler.config import CompileConfig
from lightning_thunder_strategy.compiler.differentiate import Differentiation, run_pass
from lightning_thunder_strategy.compiler.fuel import fuel_of
from lightning_thunder_strategy.compiler.report import Fallback, Program, Record, active_record, warn
from lightning_thunder_strategy.compiler.saved_values import Saved
from lightning_thunder_strategy.compiler.surgery import copy_program
from lightning_thunder_strategy.compiler.trace import Decision, Origin, Trace
from lightning_thunder_strategy.compiler.transform import ProgramRefusedError, Transform
from lightning_thunder_strategy.executors.base import Executor


class Agreement(Protocol):
    """Makes sure that all ranks run the same programs."""

    def __call__(
        self, record: Record, program: Program, graph: fx.GraphModule, failure: Optional[BaseException]
    ) -> bool:
        """Whether a compiled program may be run. ``False``: every rank runs the graph as it was read."""

    def refused(self, record: Record, graph: fx.GraphModule) -> None:
        """This rank is about to raise an error instead of running the graph."""

    def guarded(
        self,
        record: Record,
        program: Program,
        graph: fx.GraphModule,
        parameters: Mapping[fx.Node, str],
        compiled: Optional[Callable],
    ) -> Callable:
        """What is run instead of ``compiled``, or of the graph as it was read."""


class Refusal(BaseException):
    """Carries an error of ours past Dynamo, which would otherwise run the function eagerly or wrap the error.

    Attributes:
        error: What the caller of the function is to see.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Pipeline:
    """Compiles acquired graphs.

    Args:
        executors: By priority, ``eager`` last.
        transforms: Passes, in order.
        config: Options.
        modules: Modules whose parameters and buffers have names worth printing, by prefix.
        agree: See :class:`Agreement`; ``None`` on one process.
    """

    def __init__(
        self,
        executors: Sequence[Executor],
        transforms: Sequence[Transform],
        config: CompileConfig,
        modules: Mapping[str, nn.Module],
        agree: Optional[Agreement] = None,
    ) -> None:
        self.executors = tuple(executors)
        self.transforms = tuple(transforms)
        self.config = config
        self.modules = dict(modules)
        self.prepare: Optional[Callable[[fx.GraphModule], None]] = None  # edits each graph before anything else
        self.before: Optional[Callable[[], None]] = None  # called before a program that looks at no gradient runs
        self.auto_reason: Optional[str] = None  # why these executors, if the user left the choice to us
        self.fuel = fuel_of(config.fuel)
        self._agree = agree

    @property
    def cache_key(self) -> Optional[str]:
        """What must be equal for a program that another process compiled to be reused, or ``None``: never reused."""
        if self.fuel is not None:
            return None  # what a program becomes depends on those that were compiled before it
        parts = [part.cache_key() for part in (*self.executors, *self.transforms)]
        return cache.pipeline_key([*parts, repr(self.config)])

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        try:
            return self._after_before(self._run(gm, example_inputs))
        except _torch_dynamo.control_flow_errors():
            raise
        except Exception as error:
            raise Refusal(error) from error

    def _after_before(self, compiled: Callable) -> Callable:
        before = self.before
        if before is None or _torch_dynamo.reads_gradients():
            return compiled

        def run(*inputs: Any) -> Any:
            before()
            return compiled(*inputs)

        return run

    def _run(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        entered = perf_counter()
        if self.config.cudagraphs and not any(isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs):
            raise ValueError("cudagraphs=True needs CUDA tensors, and this program has none: set cudagraphs=False.")
        merge_equal_functions(gm)
        if self.prepare is not None:
            self.prepare(gm)
        record = active_record() or Record("function")
        program = Program()
        record.programs.append(program)
        program.seconds["acquire"] = max(0.0, entered - events.compile_started)
        original = copy_program(gm)
        failure: Optional[BaseException] = None
        compiled: Optional[Callable] = None
        try:
            compiled = self._compile(program, gm, example_inputs)
        except _torch_dynamo.control_flow_errors():
            record.programs.remove(program)  # Dynamo reads the function again
            raise
        except ProgramRefusedError:
            if self._agree is not None:
                self._agree.refused(record, original)
            raise
        except Exception as error:
            if self.config.on_error == "raise" and self._agree is None:
                raise
            failure = error
        program.seconds["differentiate"] = max(
            0.0, perf_counter() - entered - program.seconds["dispatch"] - program.seconds["transform"]
        )
        agreed = self._agree(record, program, original, failure) if self._agree is not None else True
        if failure is not None and self.config.on_error == "raise":
            raise failure
        _torch_aot.eager_checkpoints(original)
        if compiled is None or not agreed:
            self._eager(record, program, original, failure)
            compiled = None
        self._say_executors(program, example_inputs)
        if self._agree is not None:
            names = {node: origin.name for node, origin in self._origins(original, example_inputs).items()}
            return self._agree.guarded(record, program, original, names, compiled)
        return original.forward if compiled is None else compiled

    def _say_executors(self, program: Program, example_inputs: Sequence[Any]) -> None:
        """The report says what ``executors="auto"`` has become, and why."""
        if self.auto_reason is None:
            return
        devices = sorted({value.device.type for value in example_inputs if isinstance(value, torch.Tensor)})
        names = ", ".join(executor.name for executor in self.executors)
        where = f"on {', '.join(devices) or 'no tensors'}"
        program.decisions.insert(0, Decision('executors="auto"', where, names, self.auto_reason))

    def _eager(
        self, record: Record, program: Program, original: fx.GraphModule, failure: Optional[BaseException]
    ) -> None:
        """The acquired graph runs as it is: autograd, hooks and collectives work as in eager PyTorch."""
        program.executors.clear()
        program.executors["eager"] = sum(node.op in ("call_function", "call_method") for node in original.graph.nodes)
        program.collectives = {"forward": [], "backward": []}
        program.saved, program.computed_again = Saved(), 0
        reason = "its program runs eagerly, as it was read"
        program.decisions = [dataclasses.replace(d, choice="left alone", reason=reason) for d in program.decisions]
        if failure is not None:
            reason = events.first_line(failure)
            names = ", ".join(executor.name for executor in self.executors[:-1]) or "eager"
            program.fallbacks.append(Fallback(f"one graph of {record.name}", names, reason))
            warn(f"{record.name}: one graph could not be compiled and runs eagerly ({names}: {reason}).")

    def _compile(self, program: Program, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        origins = self._origins(gm, example_inputs)
        trace = Trace("acquired", gm, origins)
        program.traces.append(trace.snapshot("as read by TorchDynamo"))
        pipeline_key = self.cache_key  # before any pass has run
        functions = self._acquired_passes(trace, program)
        example_inputs = [*example_inputs, *trace.added_inputs.values()]
        key = self._stored_key(trace, example_inputs, functions, pipeline_key)
        stored = cache.load(key) if key is not None else None

        def store() -> None:
            if key is not None and not program.from_cache:
                cache.store(key, program)

        placeholders = gm.graph.find_nodes(op="placeholder")
        differentiation = Differentiation(
            program,
            [trace.origin(node) or Origin(node.name, "argument") for node in placeholders],
            self.executors,
            self.transforms,
            self.config,
            store,
            self.fuel,
        )
        spare = copy_program(gm) if key is not None and stored is None else None
        compiled = differentiation.compile(gm, example_inputs, key, functions)
        if not program.executors:  # taken from the cache: none of our passes ran
            if stored is not None:
                program.restore(stored)
            elif spare is not None:
                compiled = differentiation.compile(spare, example_inputs, None, functions)
        trace.take_added_inputs_out()
        for wrap in reversed(trace.calls):
            compiled = wrap(compiled)
        return compiled

    def _acquired_passes(self, trace: Trace, program: Program) -> dict[str, str]:
        for transform in self.transforms:
            if type(transform).acquired is not Transform.acquired:
                run_pass(program, transform, lambda t: t.acquired(trace), [trace])
        functions = claim_operators(trace, self.executors, program, self.config, self.fuel)
        for transform in self.transforms:
            functions.update(transform.functions)
        if functions:
            program.traces.append(trace.snapshot("after operator claims"))
        trace.graph_module.recompile()  # type: ignore[union-attr]
        return functions

    def _stored_key(
        self, trace: Trace, inputs: Sequence[Any], functions: dict[str, str], pipeline_key: Optional[str]
    ) -> Optional[str]:
        inductor = any(executor.name == "inductor" for executor in self.executors)
        if not inductor or pipeline_key is None or not _torch_inductor.aot_cache_enabled():
            return None
        if any("<" in name for name in functions):
            return None
        return cache.program_key(trace, inputs, pipeline_key)

    def _origins(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[fx.Node, Origin]:
        """Names for the acquired program's inputs: qualified names for parameters and buffers."""
        known: dict[int, tuple[str, str]] = {}
        for prefix, module in self.modules.items():
            for kind, items in _named_tensors(module):
                for name, value in items:
                    known.setdefault(id(value), (kind, f"{prefix}.{name}" if prefix else name))
        origins = {}
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs):
            source = _torch_dynamo.placeholder_source(node)
            kind, name = known.get(id(value), ("", ""))
            if not kind:
                kind = "parameter" if isinstance(value, nn.Parameter) else "argument"
                name = source or node.name
                if isinstance(value, DeviceMesh):
                    origins[node] = Origin("mesh", "object")
                    continue
                if not isinstance(value, torch.Tensor):
                    kind = "integer" if isinstance(value, (int, float, torch.SymInt)) else "object"
            origins[node] = Origin(_short_name(name, node.name), kind, name)
        return origins


def _named_tensors(module: nn.Module) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Stored parameters and buffers with qualified names; a property that hides a parameter is looked past."""
    parameters, buffers = [], []
    for prefix, child in module.named_modules():
        for name, value in child._parameters.items():
            parameters.append((f"{prefix}.{name}" if prefix else name, value))
        for name, value in child._buffers.items():
            buffers.append((f"{prefix}.{name}" if prefix else name, value))
    return [("parameter", parameters), ("buffer", buffers)]


def _short_name(name: str, node_name: str) -> str:
    """A readable name: ``batch_0`` for ``L['batch'][0]``, the qualified name for parameters."""
    if not name.startswith(("L[", "G[")):
        return name
    inner = name[1:].replace("__kwdefaults__", "")
    return inner if len(inner) <= 60 else node_name
