"""A trace: one stage of one compiled program, as Python that can be read, saved and run."""

import linecache
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional, Union

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_thunder_strategy.compiler import _torch_aot, _torch_compat, _torch_dynamo, saving
from lightning_thunder_strategy.compiler.emit import Emission, Notes, emit, node_value, type_text
from lightning_thunder_strategy.compiler.expressions import mesh_expression
from lightning_thunder_strategy.compiler.saved_values import Saved


@dataclass(frozen=True)
class TraceInput:
    """One input of a trace.

    Attributes:
        name: Its name in the printed function.
        kind: ``"parameter"``, ``"buffer"``, ``"argument"``, ``"saved"`` (from the forward), ``"random state"`` (saved
            too), ``"gradient"`` (of an output), ``"integer"`` or ``"object"``.
        origin: Its qualified name (parameters and buffers) or the expression that finds it, where known.
        type: Such as ``f32[4, 8]``.
        shape: Sizes; symbolic sizes appear with the value they had when compiled. ``None`` if it is not a tensor.
        stride: Strides, in elements.
        dtype: Such as ``torch.float32``.
        device: Such as ``cuda:0``.
        requires_grad: Whether it requires a gradient, in the acquired program.
        value: The value an integer had when compiled.
        layout: For a distributed tensor, the expression of its mesh and placements.
    """

    name: str
    kind: str
    origin: Optional[str] = None
    type: str = ""
    shape: Optional[tuple[int, ...]] = None
    stride: Optional[tuple[int, ...]] = None
    dtype: Optional[str] = None
    device: Optional[str] = None
    requires_grad: bool = False
    value: Optional[Union[int, float, bool]] = None
    layout: Optional[str] = None


@dataclass(frozen=True)
class TraceOutput:
    """One output of a trace.

    Attributes:
        kind: ``"result"``, ``"saved"`` (for the backward), ``"gradient"`` or ``"edited"`` (the new value of an input);
            ``""`` if it is not known.
        origin: The input whose gradient or new value it is.
    """

    kind: str
    origin: Optional[str] = None

    def __str__(self) -> str:
        return f"{'new value' if self.kind == 'edited' else self.kind} of {self.origin}" if self.origin else self.kind


@dataclass(frozen=True)
class Origin:
    """What is known of a program's input besides its type: see :class:`TraceInput`."""

    name: str
    kind: str
    origin: Optional[str] = None


@dataclass(frozen=True)
class Decision:
    """What a pass did with one part of a program.

    Attributes:
        subject: The part, such as a module's name.
        shape: Its size, in words.
        choice: What became of it.
        reason: Why, or an empty string.
    """

    subject: str
    shape: str
    choice: str
    reason: str = ""


class Trace:
    """One stage of one compiled program.

    A trace that is handed to a :class:`~lightning_thunder_strategy.compiler.transform.Transform` is live: its
    ``graph_module`` may be edited in place. The traces returned by ``lts.traces`` are records of what it was then.

    Args:
        stage: ``"acquired"``, ``"joint"``, ``"forward"``, ``"backward"``, ``"final forward"`` or ``"final backward"``.
        graph_module: The program.
        origins: What is known of its inputs, by node.
        provenance: What made it, such as ``after DeduplicateUnshard, 3.1 ms``.
        notes: A word for each statement, such as the executor that runs it.
        outputs: What is known of its outputs.

    Attributes:
        decisions: A pass may add what it did with parts of the program: the report lists it.
        added_inputs: What :meth:`add_input` has added, with an example of each.
        calls: What :meth:`call_through` was given.
    """

    def __init__(
        self,
        stage: str,
        graph_module: Optional[fx.GraphModule] = None,
        origins: Optional[Mapping[fx.Node, Origin]] = None,
        provenance: str = "",
        notes: Optional[Mapping[fx.Node, str]] = None,
        outputs: Sequence[TraceOutput] = (),
    ) -> None:
        self.stage = stage
        self.provenance = provenance
        self.graph_module = graph_module
        self._origins = dict(origins or {})
        self._notes = dict(notes or {})
        self._outputs = tuple(outputs)
        self.decisions: list[Decision] = []
        self.trial: Optional[Callable[[Collection[fx.Node]], Saved]] = None
        self.added_inputs: dict[fx.Node, torch.Tensor] = {}
        self.calls: list[Callable[[Callable], Callable]] = []
        self._emission: Optional[Emission] = None
        self._inputs: Optional[tuple[TraceInput, ...]] = None

    @property
    def graph(self) -> fx.Graph:
        """The live program's graph.

        Raises:
            RuntimeError: If this trace is a record.
        """
        if self.graph_module is None:
            raise RuntimeError(
                f"This {self.stage!r} trace is a record and has no graph to edit: edit it in a Transform."
            )
        return self.graph_module.graph

    def would_keep(self, without: Collection[fx.Node] = ()) -> Saved:
        """What the forward would keep for the backward if this joint program were partitioned as it is now.

        It takes as long as a partition does. With symbolic sizes it is for those that the program was read with.

        Args:
            without: Operations of this program whose results do not count, such as gathered parameters.

        Raises:
            RuntimeError: If this is not the live joint program.
        """
        if self.trial is None:
            raise RuntimeError(f"This {self.stage!r} trace cannot be partitioned: call it in Transform.joint.")
        return self.trial(without)

    def origin(self, node: fx.Node) -> Optional[Origin]:
        """What is known of an input of the live program."""
        return self._origins.get(node)

    def add_input(self, name: str, example: torch.Tensor) -> fx.Node:
        """Give a live acquired program one more input, after the others, that :meth:`call_through` fills.

        Args:
            name: Its name in the printed function.
            example: A tensor like it, of the same sizes in every call.
        """
        operation = next(node for node in self.graph.nodes if node.op != "placeholder")
        with self.graph.inserting_before(operation):
            node = self.graph.placeholder(name)
        value = _torch_compat.fake_like(example, [node_value(other) for other in self.graph.nodes])
        node.meta["example_value"] = value
        _torch_dynamo.no_source(node)
        self._origins[node] = Origin(name, "argument")
        self.added_inputs[node] = value
        return node

    def take_added_inputs_out(self) -> None:
        """Once the program has been compiled: TorchDynamo calls it with what its graph has as inputs."""
        for node in self.added_inputs:
            with self.graph.inserting_after(node):
                node.replace_all_uses_with(self.graph.call_function(_filled_in_by_a_pass, (node.name,)))
            self.graph.erase_node(node)

    def call_through(self, wrap: Callable[[Callable], Callable]) -> None:
        """Say how a compiled program is called that a pass has given more inputs or outputs.

        Args:
            wrap: Makes of the compiled program a function with the inputs and outputs that it had before.
        """
        self.calls.append(wrap)

    def snapshot(self, provenance: str) -> "Trace":
        """A record of the live program as it is now."""
        record = Trace(self.stage, provenance=provenance, outputs=self.outputs)
        record._emission = self._emit()
        record._inputs = self._describe_inputs(record._emission)
        return record

    @property
    def inputs(self) -> tuple[TraceInput, ...]:
        """The program's inputs, in order."""
        return self._inputs if self._inputs is not None else self._describe_inputs(self._emit())

    @property
    def outputs(self) -> tuple[TraceOutput, ...]:
        """The program's outputs, in order; empty if nothing is known of them."""
        if self.graph_module is None:
            return self._outputs
        returned = self.graph.output_node().args[0]
        known = isinstance(returned, (tuple, list)) and len(returned) == len(self._outputs)
        return self._outputs if known else ()

    def python(self) -> str:
        """The program as a self-contained Python module that defines ``program(*inputs)``."""
        heading = f"# {self.stage}{f': {self.provenance}' if self.provenance else ''}\n"
        return heading + self._emit().source

    def __str__(self) -> str:
        return self.python()

    def __repr__(self) -> str:
        return f"<Trace {self.stage!r} {self.provenance!r}, {len(self.inputs)} inputs>"

    def run(self, *args: Any) -> Any:
        """Call the printed program. It runs eagerly, whatever executor it was dispatched to.

        Args:
            args: One value for each of :attr:`inputs`.
        """
        return self.function()(*args)

    def function(self) -> Callable:
        """The printed program, compiled as Python."""
        emission = self._complete()
        filename = f"<trace {self.stage} {id(emission):x}>"
        linecache.cache[filename] = (len(emission.source), None, emission.source.splitlines(True), filename)
        namespace: dict[str, Any] = dict(emission.constants)
        exec(compile(emission.source, filename, "exec"), namespace)
        function = namespace["program"]
        weakref.finalize(function, linecache.cache.pop, filename, None)
        return function

    def save(self, path: Union[str, os.PathLike]) -> Path:
        """Write the program to ``path``; as a script, the file runs it on inputs of the recorded shapes.

        A saved trace is code: run it only if you trust where it came from. Constants too big to print are written
        beside it, as ``<path>.constants.pt``.

        Raises:
            ValueError: If the program holds an object that cannot be written to a file.
        """
        return saving.save(Path(path), self.python(), self.inputs, self._complete().constants)

    def to_dict(self) -> dict[str, Any]:
        """Plain data from which :meth:`from_dict` makes the trace again; constants are left out."""
        emission = self._emit()
        return {
            "stage": self.stage,
            "provenance": self.provenance,
            "source": emission.source,
            "constants": sorted(emission.constants),
            "inputs": [asdict(item) for item in self.inputs],
            "outputs": [asdict(item) for item in self.outputs],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Trace":
        trace = cls(data["stage"], provenance=data["provenance"])
        trace._emission = Emission(data["source"], missing=tuple(data["constants"]))
        trace._outputs = tuple(TraceOutput(**item) for item in data["outputs"])
        trace._inputs = tuple(
            TraceInput(**{key: tuple(value) if isinstance(value, list) else value for key, value in item.items()})
            for item in data["inputs"]
        )
        return trace

    # -------------------------------------------------------------------------------------------------- internals

    def _complete(self) -> Emission:
        emission = self._emit()
        if emission.missing:
            raise RuntimeError(
                f"Another process made this trace, and its constants {', '.join(emission.missing)} were not kept. "
                "Clear the compile cache (TORCHINDUCTOR_CACHE_DIR) and compile again."
            )
        return emission

    def _emit(self) -> Emission:
        if self._emission is not None:
            return self._emission
        assert self.graph_module is not None
        notes = Notes(
            names={node: origin.name for node, origin in self._origins.items()},
            inputs={n: f"{o.kind} {o.origin}" if o.origin else o.kind for n, o in self._origins.items()},
            operations=self._notes,
            outputs=[str(output) for output in self.outputs],
        )
        return emit(self.graph_module, notes)

    def _describe_inputs(self, emission: Emission) -> tuple[TraceInput, ...]:
        placeholders = self.graph.find_nodes(op="placeholder")
        origins = [self._origins.get(node, Origin(node.name, "argument")) for node in placeholders]
        return tuple(
            _describe(name, origin, node_value(node), self.stage == "acquired")
            for name, origin, node in zip(emission.inputs, origins, placeholders)
        )


def _filled_in_by_a_pass(name: str) -> None:
    raise AssertionError(f"{name!r} exists in the compiled program only")


def _describe(name: str, origin: Origin, value: Any, differentiable: bool) -> TraceInput:
    if isinstance(value, torch.Tensor):
        layout = None
        if isinstance(value, DTensor):
            placements = ", ".join(f"torch.distributed.tensor.{placement!r}" for placement in value.placements)
            layout = f"{mesh_expression(value.device_mesh)}, [{placements}]"
        return TraceInput(
            name,
            origin.kind,
            origin.origin,
            type_text(value),
            tuple(_torch_compat.size_hint(size) for size in value.shape),
            tuple(_torch_compat.size_hint(stride) for stride in value.stride())
            if value.layout == torch.strided
            else None,
            str(value.dtype),
            str(value.device),
            differentiable and value.requires_grad,
            layout=layout,
        )
    if isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
        number = _torch_compat.number_hint(value)
        return TraceInput(name, "integer", origin.origin, type_text(value), value=number)
    value = _torch_aot.real_object(value)
    expression = mesh_expression(value) if isinstance(value, DeviceMesh) else origin.origin
    return TraceInput(name, "object", expression, type(value).__name__)
