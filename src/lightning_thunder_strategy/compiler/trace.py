"""A trace: one stage of one compiled program, as Python that can be read, saved and run."""

import linecache
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional, Union

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_thunder_strategy.compiler import _torch_compat
from lightning_thunder_strategy.compiler.emit import Emission, emit, identifier, mesh_expression, node_value, type_text


@dataclass(frozen=True)
class TraceInput:
    """One input of a trace.

    Attributes:
        name: Its name in the printed function.
        kind: ``"parameter"``, ``"buffer"``, ``"argument"``, ``"saved"`` (from the forward), ``"gradient"`` (of an
            output), ``"integer"`` or ``"object"``.
        origin: Its qualified name (parameters and buffers) or the expression that finds it, where known.
        type: Such as ``f32[4, 8]``.
        shape: Sizes; symbolic sizes appear with the value they had when compiled. ``None`` if it is not a tensor.
        stride: Strides, in elements.
        dtype: Such as ``torch.float32``.
        device: Such as ``cuda:0``.
        requires_grad: Whether it had a gradient in the acquired program.
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


@dataclass
class Origin:
    """What is known of a program's input besides its type: see :class:`TraceInput`."""

    name: str
    kind: str
    origin: Optional[str] = None


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
    """

    def __init__(
        self,
        stage: str,
        graph_module: Optional[fx.GraphModule] = None,
        origins: Optional[Mapping[fx.Node, Origin]] = None,
        provenance: str = "",
        notes: Optional[Mapping[fx.Node, str]] = None,
    ) -> None:
        self.stage = stage
        self.provenance = provenance
        self.graph_module = graph_module
        self._origins = dict(origins or {})
        self._notes = dict(notes or {})
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

    def origin(self, node: fx.Node) -> Optional[Origin]:
        """What is known of an input of the live program."""
        return self._origins.get(node)

    def snapshot(self, provenance: str) -> "Trace":
        """A record of the live program as it is now."""
        record = Trace(self.stage, provenance=provenance)
        record._emission = self._emit()
        record._inputs = self._describe_inputs()
        return record

    @property
    def inputs(self) -> tuple[TraceInput, ...]:
        """The program's inputs, in order."""
        return self._inputs if self._inputs is not None else self._describe_inputs()

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
        source = self.python()
        filename = f"<trace {self.stage} {id(self):x}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        namespace: dict[str, Any] = dict(self._emit().constants)
        exec(compile(source, filename, "exec"), namespace)
        return namespace["program"]

    def save(self, path: Union[str, os.PathLike]) -> Path:
        """Write the program to ``path``; as a script, the file runs it on inputs of the recorded shapes.

        A saved trace is code: run it only if you trust where it came from. Constants too big to print are written
        beside it, as ``<path>.constants.pt``.

        Raises:
            ValueError: If the program holds an object that cannot be written to a file.
        """
        path = Path(path)
        emission = self._emit()
        unsaved = {name: value for name, value in emission.constants.items() if not isinstance(value, torch.Tensor)}
        if unsaved:
            names = ", ".join(f"{name} ({type(value).__name__})" for name, value in unsaved.items())
            raise ValueError(
                f"This trace holds objects that have no Python expression: {names}. Use Trace.run instead."
            )
        source = self.python()
        if emission.constants:
            beside = path.with_name(path.name + ".constants.pt")
            torch.save({name: value.detach() for name, value in emission.constants.items()}, beside)
            load = 'torch.load(__file__ + ".constants.pt", weights_only=True)'
            source = source.replace("import torch\n", f"import torch\n\nglobals().update({load})\n", 1)
        path.write_text(source + self._script())
        return path

    def to_dict(self) -> dict[str, Any]:
        """Plain data from which :meth:`from_dict` makes the trace again; constants are left out."""
        emission = self._emit()
        return {
            "stage": self.stage,
            "provenance": self.provenance,
            "source": emission.source,
            "constants": sorted(emission.constants),
            "inputs": [asdict(item) for item in self.inputs],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Trace":
        trace = cls(data["stage"], provenance=data["provenance"])
        trace._emission = Emission(data["source"])
        trace._inputs = tuple(
            TraceInput(**{key: tuple(value) if isinstance(value, list) else value for key, value in item.items()})
            for item in data["inputs"]
        )
        return trace

    # -------------------------------------------------------------------------------------------------- internals

    def _emit(self) -> Emission:
        if self._emission is not None:
            return self._emission
        assert self.graph_module is not None
        names = {node: origin.name for node, origin in self._origins.items()}
        kinds = {node: f"{o.kind} {o.origin}" if o.origin else o.kind for node, o in self._origins.items()}
        return emit(self.graph_module, names, self._notes, kinds)

    def _describe_inputs(self) -> tuple[TraceInput, ...]:
        result, taken = [], {"torch", "program"}
        for node in self.graph.find_nodes(op="placeholder"):
            origin = self._origins.get(node, Origin(node.name, "argument"))
            name = wanted = identifier(origin.name)
            number = 0
            while name in taken:
                number += 1
                name = f"{wanted}_{number}"
            taken.add(name)
            result.append(_describe(name, origin, node_value(node)))
        return tuple(result)

    def _script(self) -> str:
        """What the saved file does when it is run as a script."""
        values, distributed = [], False
        for item in self.inputs:
            if item.layout is not None:
                distributed = True
                full = f"torch.randn({item.shape}, dtype={item.dtype})"
                values.append(f"torch.distributed.tensor.distribute_tensor({full}, {item.layout})")
            elif item.shape is not None:
                values.append(f"tensor({item.shape}, {item.stride}, {item.dtype}, {item.device!r})")
            elif item.kind == "object" and item.origin:
                distributed = True
                values.append(item.origin)
            else:
                values.append(repr(item.value))
        lines = ["", "", *_TENSOR_HELPER, "", 'if __name__ == "__main__":']
        if distributed or "torch.ops._c10d_functional" in self.python():
            device = next((item.device for item in self.inputs if item.device), "cpu")
            backend = "gloo" if (device or "cpu").startswith("cpu") else "nccl"
            lines += [
                "    import torch.distributed.tensor  # this program has collectives: start it with torchrun",
                f'    torch.distributed.init_process_group("{backend}")',
            ]
        lines += ["    torch.manual_seed(0)", "    inputs = ["]
        lines += [f"        {value},  # {item.name}: {item.type}" for value, item in zip(values, self.inputs)]
        lines += [
            "    ]",
            "    for output in torch.utils._pytree.tree_leaves(program(*inputs)):",
            "        print(output)",
        ]
        return "\n".join(lines) + "\n"


_TENSOR_HELPER = (
    "def tensor(shape, stride, dtype, device):",
    "    result = torch.empty_strided(shape, stride, dtype=dtype, device=device)",
    "    return result.normal_() if dtype.is_floating_point or dtype.is_complex else result.zero_()",
    "",
)


def _hint(size: Any) -> int:
    """The value a symbolic size had when it was compiled."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if hint is not None else 1


def _describe(name: str, origin: Origin, value: Any) -> TraceInput:
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
            tuple(_hint(size) for size in value.shape),
            tuple(_hint(stride) for stride in value.stride()) if value.layout == torch.strided else None,
            str(value.dtype),
            str(value.device),
            value.requires_grad,
            layout=layout,
        )
    if isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
        number = value if isinstance(value, (int, float, bool)) else _hint(value)
        return TraceInput(name, "integer", origin.origin, type_text(value), value=number)
    value = _torch_compat.real_object(value)
    expression = mesh_expression(value) if isinstance(value, DeviceMesh) else origin.origin
    return TraceInput(name, "object", expression, type(value).__name__)


@dataclass
class TraceLog:
    """The records of one compiled program, in stage order."""

    traces: list[Trace] = field(default_factory=list)

    def add(self, trace: Trace, provenance: str) -> None:
        self.traces.append(trace.snapshot(provenance))
