"""Prints an FX program as a plain Python function that runs on its own."""

import enum
import importlib
import keyword
import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from lightning_thunder_strategy.compiler import _torch_compat

_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
}  # fmt: skip
_OWN_FILES = str(Path(__file__).parent.parent)  # a line of the user's says more than one of ours
_SMALL_CONSTANT = 16  # tensor elements that are printed inline


@dataclass
class Emission:
    """What :func:`emit` returns.

    Attributes:
        source: The text: imports, constants that have an expression, one function for each nested program, and
            ``def program(...)``.
        constants: Objects that have no expression; ``source`` uses these names freely.
    """

    source: str
    constants: dict[str, Any] = field(default_factory=dict)


def type_text(value: Any) -> str:
    """``f32[4, 8]`` for a tensor, else the type's name."""
    if isinstance(value, torch.Tensor):
        shape = ", ".join(str(size) for size in value.shape)
        return f"{_DTYPES.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{shape}]"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(type_text(item) for item in value) + ")"
    return type(_torch_compat.real_object(value)).__name__


def mesh_expression(mesh: DeviceMesh) -> str:
    """The call that makes an equal mesh."""
    names = f", mesh_dim_names={mesh.mesh_dim_names!r}" if mesh.mesh_dim_names else ""
    return f"torch.distributed.device_mesh.init_device_mesh({mesh.device_type!r}, {tuple(mesh.shape)}{names})"


def node_value(node: fx.Node) -> Any:
    """The example (usually fake) value of a node, or ``None``."""
    return node.meta.get("val", node.meta.get("example_value"))


def identifier(text: str) -> str:
    """``text`` as a Python name."""
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    if name[0].isdigit():
        name = f"_{name}"
    return f"{name}_" if keyword.iskeyword(name) else name


def emit(
    gm: fx.GraphModule,
    names: Optional[Mapping[fx.Node, str]] = None,
    notes: Optional[Mapping[fx.Node, str]] = None,
    input_notes: Optional[Mapping[fx.Node, str]] = None,
) -> Emission:
    """Print ``gm`` as Python.

    Args:
        gm: The program.
        names: Names for some of its inputs; others keep the name of their node.
        notes: A word for the end of a statement, such as the executor that runs it.
        input_notes: A word for an input, such as ``parameter net.weight``.
    """
    return _Emitter().program(gm, names or {}, notes or {}, input_notes or {})


class _Emitter:
    def __init__(self) -> None:
        self.imports: set[str] = {"torch"}
        self.definitions: dict[str, str] = {}  # name -> expression
        self.constants: dict[str, Any] = {}
        self._constant_names: dict[int, str] = {}
        self.functions: list[str] = []
        self._function_names: dict[int, str] = {}
        self._taken: set[str] = {"program", "torch"}

    def program(
        self, gm: fx.GraphModule, names: Mapping[fx.Node, str], notes: Mapping, input_notes: Mapping
    ) -> Emission:
        body = self._function("program", gm, names, notes, input_notes)
        lines = [f"import {name}" for name in sorted(self.imports)]
        if self.definitions:
            lines += ["", *(f"{name} = {value}" for name, value in self.definitions.items())]
        for function in [*self.functions, body]:
            lines += ["", "", function]
        return Emission("\n".join(lines) + "\n", self.constants)

    # ------------------------------------------------------------------------------------------------- functions

    def _function(
        self, name: str, gm: fx.GraphModule, names: Mapping[fx.Node, str], notes: Mapping, input_notes: Mapping
    ) -> str:
        scope = _Scope(gm.graph, names)
        last_use = _last_uses(gm.graph)
        inputs = [scope[node] for node in gm.graph.find_nodes(op="placeholder")]
        lines = []
        where = None
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                note = input_notes.get(node)
                lines.append(f"# {scope[node]}: {_described(node)}{f', {note}' if note else ''}")
                continue
            source = _source_line(node)
            if source is not None and source != where:
                lines.append(f"# {source}")
                where = source
            if node.op == "output":
                lines.append(f"return {self._argument(node.args[0], scope)}")
            else:
                note = notes.get(node)
                target, expression = scope[node], self._expression(node, gm, scope)
                lines.append(f"{target} = {expression}  # {_described(node)}{f', {note}' if note else ''}")
            dead = [scope[used] for used in last_use.get(node, ()) if used is not node]
            if dead and node.op != "output":
                lines.append(f"del {', '.join(dead)}")
        return "\n    ".join([f"def {name}({', '.join(inputs)}):", *lines])

    def _subprogram(self, gm: fx.GraphModule, name: str, notes: Optional[Mapping] = None) -> str:
        """The name of the function that a nested program is printed as."""
        if id(gm) not in self._function_names:
            self._function_names[id(gm)] = unique = self._unique(identifier(name))
            self.functions.append(self._function(unique, gm, {}, notes or {}, {}))
        return self._function_names[id(gm)]

    def _unique(self, name: str) -> str:
        candidate, number = name, 0
        while candidate in self._taken:
            number += 1
            candidate = f"{name}_{number}"
        self._taken.add(candidate)
        return candidate

    # ----------------------------------------------------------------------------------------------- expressions

    def _expression(self, node: fx.Node, gm: fx.GraphModule, scope: "_Scope") -> str:
        if node.op == "get_attr":
            value = _attribute(gm, node.target)
            return (
                self._subprogram(value, node.target)
                if isinstance(value, fx.GraphModule)
                else self._constant(value, node.target)
            )
        args = [self._argument(arg, scope) for arg in node.args]
        kwargs = [f"{key}={self._argument(value, scope)}" for key, value in node.kwargs.items()]
        if node.op == "call_method":
            return f"{_parenthesised(args[0])}.{node.target}({', '.join([*args[1:], *kwargs])})"
        if node.op == "call_module":
            value = _attribute(gm, node.target)
            function = (
                self._subprogram(value, node.target)
                if isinstance(value, fx.GraphModule)
                else self._constant(value, node.target)
            )
            return f"{function}({', '.join([*args, *kwargs])})"
        if node.target is operator.getitem:
            return f"{_parenthesised(args[0])}[{args[1]}]"
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            special = self._higher_order(node, args, kwargs)
            if special is not None:
                return special
        return f"{self._callable(node.target)}({', '.join([*args, *kwargs])})"

    def _higher_order(self, node: fx.Node, args: list[str], kwargs: list[str]) -> Optional[str]:
        """Operators that take programs: printed as the direct call of those programs."""
        name = node.target.name()
        if name == "invoke_subgraph":
            return f"{args[0]}({', '.join(args[2:])})"
        if name == "tag_activation_checkpoint":
            return f"{args[0]}({', '.join(args[1:])})"
        if name == "autograd_function_apply":
            return self._autograd_function(node, args, dict(zip(node.kwargs, kwargs)))
        return None

    def _autograd_function(self, node: fx.Node, args: list[str], kwargs: Mapping[str, str]) -> str:
        forward, backward, *inputs = args
        name = self._unique("Function")
        mask = tuple(node.kwargs.get("args_tensor_mask", ()))
        # The backward program takes the saved values after the gradients and gives one gradient a tensor input.
        self.functions.append(
            f"class {name}(torch.autograd.Function):\n"
            f"    @staticmethod\n"
            f"    def forward(ctx, *args):\n"
            f"        outputs, saved = {forward}(None, *args)\n"
            f"        ctx.saved = saved\n"
            f"        return outputs\n\n"
            f"    @staticmethod\n"
            f"    def backward(ctx, *gradients):\n"
            f"        results = {backward}(None, *gradients, *ctx.saved)\n"
            f"        results = iter(results if isinstance(results, (tuple, list)) else (results,))\n"
            f"        return tuple(next(results) if tensor else None for tensor in {mask!r})"
        )
        return f"{name}.apply({', '.join(inputs)})"

    def _argument(self, value: Any, scope: "_Scope") -> str:
        if isinstance(value, fx.Node):
            return scope[value]
        if isinstance(value, tuple) and hasattr(value, "_fields") and type(value) is not tuple:
            return f"{self._callable(type(value))}({', '.join(self._argument(item, scope) for item in value)})"
        if isinstance(value, torch.Size):
            return f"torch.Size({self._argument(list(value), scope)})"
        if isinstance(value, (tuple, list)):
            inner = ", ".join(self._argument(item, scope) for item in value)
            if isinstance(value, list):
                return f"[{inner}]"
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        if isinstance(value, dict):
            inner = ", ".join(f"{self._argument(k, scope)}: {self._argument(v, scope)}" for k, v in value.items())
            return f"{{{inner}}}"
        if isinstance(value, slice):
            return f"slice({', '.join(self._argument(part, scope) for part in (value.start, value.stop, value.step))})"
        literal = _literal(value)
        if literal is not None:
            return literal
        if isinstance(value, torch.distributed.tensor.placement_types.Placement) and type(value).__module__.startswith(
            "torch."
        ):
            self.imports.add("torch.distributed.tensor")
            return f"torch.distributed.tensor.{_placement(value)}"
        if callable(value) or isinstance(value, enum.Enum):
            return self._callable(value)
        return self._constant(value, type(value).__name__)

    def _callable(self, target: Any) -> str:
        """The importable path of a function, class or enum member, or a constant."""
        if isinstance(target, torch._ops.OpOverload):
            return f"torch.ops.{target}"
        if isinstance(target, enum.Enum):
            return f"{self._callable(type(target))}.{target.name}"
        for module, name in _candidate_paths(target):
            if _resolves(module, name, target):
                self.imports.add(module)
                return f"{module}.{name}"
        return self._constant(target, getattr(target, "__name__", type(target).__name__))

    def _constant(self, value: Any, hint: str) -> str:
        if id(value) in self._constant_names:
            return self._constant_names[id(value)]
        name = self._constant_names[id(value)] = self._unique(f"{identifier(hint.lower())}_constant".lstrip("_"))
        expression = self._constant_expression(value)
        if expression is not None:
            self.definitions[name] = expression
        else:
            self.constants[name] = value
        return name

    def _constant_expression(self, value: Any) -> Optional[str]:
        if isinstance(value, DeviceMesh):
            self.imports.add("torch.distributed.device_mesh")
            return mesh_expression(value)
        plain = type(value) is torch.Tensor and value.device.type == "cpu" and not value.requires_grad
        if plain and value.numel() <= _SMALL_CONSTANT and value.layout == torch.strided:
            with _torch_compat.outside_fake_mode():
                return f"torch.tensor({_numbers(value.tolist())}, dtype={value.dtype})"
        return None


class _Scope:
    """Names of the values of one function."""

    def __init__(self, graph: fx.Graph, names: Mapping[fx.Node, str]) -> None:
        self._names: dict[fx.Node, str] = {}
        taken: set[str] = {"torch", "program"}
        for node in graph.nodes:
            wanted = identifier(names.get(node, node.name))
            name, number = wanted, 0
            while name in taken:
                number += 1
                name = f"{wanted}_{number}"
            taken.add(name)
            self._names[node] = name

    def __getitem__(self, node: fx.Node) -> str:
        return self._names[node]


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that nothing after it reads."""
    seen: set[fx.Node] = set()
    result: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        if node.op not in ("placeholder", "output") and node not in seen:
            seen.add(node)  # its own value is never read
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                result.setdefault(node, []).append(used)
    return result


def _described(node: fx.Node) -> str:
    return type_text(node_value(node)) if node_value(node) is not None else "object"


def _source_line(node: fx.Node) -> Optional[str]:
    """``file.py:12 in forward: code`` for the innermost user line a node came from."""
    matches = re.findall(
        r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)', node.meta.get("stack_trace") or node.stack_trace or ""
    )
    if not matches:
        return None
    users = [match for match in matches if not match[0].startswith(_OWN_FILES)]
    file, line, function, code = (users or matches)[-1]
    return f"{file}:{line} in {function.partition('#')[0]}: {code.strip()}"


def _literal(value: Any) -> Optional[str]:
    if value is None or value is Ellipsis or isinstance(value, (bool, str, bytes)):
        return "..." if value is Ellipsis else repr(value)
    if type(value) is int:
        return repr(value)
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if type(value) is complex:
        return repr(value) if math.isfinite(value.real) and math.isfinite(value.imag) else f"complex({str(value)!r})"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if type(value) is range:
        return repr(value)
    return None


def _numbers(value: Any) -> str:
    """A nested list of numbers, infinite ones included."""
    return f"[{', '.join(map(_numbers, value))}]" if isinstance(value, list) else str(_literal(value))


def _placement(value: Any) -> str:
    if value.is_shard():
        return f"Shard({value.dim})"
    return f"Partial({value.reduce_op!r})" if value.is_partial() else "Replicate()"


def _parenthesised(text: str) -> str:
    return text if text.isidentifier() else f"({text})"


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _candidate_paths(target: Any) -> Iterable[tuple[str, str]]:
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is None:
        return
    module = getattr(target, "__module__", None)
    short = name.split(".")[-1]
    if module == "_operator":
        module = "operator"
    if module in ("builtins",) or (module is None and hasattr(__import__("builtins"), name)):
        yield "builtins", name
    if module:
        yield module, name
    for parent in ("torch", "torch._C._nn", "torch.nn.functional", "torch._C", "torch.Tensor", "torch._VF"):
        yield parent, short


def _resolves(module: str, name: str, target: Any) -> bool:
    if "<" in name:
        return False
    try:
        value: Any = importlib.import_module(module)
    except ImportError:
        head, _, tail = module.rpartition(".")
        try:
            value = getattr(importlib.import_module(head), tail) if head else None
        except ImportError:
            return False
    for part in name.split("."):
        value = getattr(value, part, None)
        if value is None:
            return False
    return value is target or (not isinstance(target, type) and value == target)
