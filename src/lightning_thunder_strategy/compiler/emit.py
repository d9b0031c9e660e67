"""Prints an FX program as a plain Python function that runs on its own."""

import builtins
import keyword
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
from torch import fx

from lightning_thunder_strategy.compiler import _torch_aot
from lightning_thunder_strategy.compiler._torch_dtensor import written_out
from lightning_thunder_strategy.compiler.expressions import Expressions, identifier

_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
}  # fmt: skip
_OWN_FILES = str(Path(__file__).parent.parent)  # a line of the user's says more than one of ours
_RESERVED = frozenset([*dir(builtins), *keyword.kwlist, "program", "torch", "operator", "tensor", "inputs"])
_SYMBOLS = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.mod: "%", operator.pow: "**", operator.matmul: "@", operator.eq: "==", operator.ne: "!=",
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.and_: "&", operator.or_: "|",
}  # fmt: skip


@dataclass
class Notes:
    """What is printed besides the program itself.

    Attributes:
        names: Names for some inputs; others keep the name of their node.
        inputs: A word for an input, such as ``parameter net.weight``.
        operations: A word for the end of a statement, such as the executor that runs it.
        outputs: A word for each output, such as ``gradient of net.weight``.
    """

    names: Mapping[fx.Node, str] = field(default_factory=dict)
    inputs: Mapping[fx.Node, str] = field(default_factory=dict)
    operations: Mapping[fx.Node, str] = field(default_factory=dict)
    outputs: Sequence[str] = ()


@dataclass
class Emission:
    """What :func:`emit` returns.

    Attributes:
        source: The text: imports, constants that have an expression, one function for each nested program, and
            ``def program(...)``.
        inputs: The names of the program's inputs.
        constants: Objects that have no expression; ``source`` uses these names freely.
        missing: Names of such objects that another process had.
    """

    source: str
    inputs: list[str] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


def type_text(value: Any) -> str:
    """``f32[4, 8]`` for a tensor, else the type's name."""
    if isinstance(value, torch.Tensor):
        shape = ", ".join(str(size) for size in value.shape)
        return f"{_DTYPES.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{shape}]"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(type_text(item) for item in value) + ")"
    return type(_torch_aot.real_object(value)).__name__


def node_value(node: fx.Node) -> Any:
    """The example (usually fake) value of a node, or ``None``."""
    return node.meta.get("val", node.meta.get("example_value"))


def emit(gm: fx.GraphModule, notes: Optional[Notes] = None) -> Emission:
    """Print ``gm`` as Python.

    Args:
        gm: The program.
        notes: What is known of it.
    """
    reserved: set[str] = set(_RESERVED)
    while True:
        emitter = _Emitter(reserved)
        emission = emitter.program(gm, notes or Notes())
        clashes = emitter.local_names & emitter.global_names()
        if not clashes - reserved:
            return emission
        reserved |= clashes  # a value has the name of a module or function that another statement uses


class _Emitter:
    def __init__(self, reserved: Iterable[str]) -> None:
        self.reserved = frozenset(reserved)
        self.local_names: set[str] = set()
        self.expressions = Expressions()
        self.functions: list[str] = []
        self._function_names: dict[int, str] = {}

    def program(self, gm: fx.GraphModule, notes: Notes) -> Emission:
        body, inputs = self._function("program", gm, notes)
        lines = [f"import {name}" for name in sorted(self.expressions.imports)]
        if self.expressions.definitions:
            lines += ["", *(f"{name} = {value}" for name, value in self.expressions.definitions.items())]
        for function in [*self.functions, body]:
            lines += ["", "", function]
        return Emission("\n".join(lines) + "\n", inputs, self.expressions.constants)

    def global_names(self) -> set[str]:
        return {name.partition(".")[0] for name in self.expressions.imports} | self.expressions.taken

    # ------------------------------------------------------------------------------------------------- functions

    def _function(self, name: str, gm: fx.GraphModule, notes: Notes) -> tuple[str, list[str]]:
        """A program as the text of a function, and the names of its inputs."""
        names = self._names(gm.graph, notes.names)
        last_use = _last_uses(gm.graph)
        inputs, signature, lines = [], [f"def {name}("], []
        where = None
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                note = notes.inputs.get(node)
                inputs.append(names[node])
                signature.append(f"    {names[node]},  # {_described(node)}{f', {note}' if note else ''}")
                continue
            if node.op == "output":
                lines += self._return(node.args[0], names, notes.outputs)
                continue
            source = source_line(node)
            if source is not None and source != where:
                lines.append(f"# {source}")
                where = source
            note = notes.operations.get(node)
            expression = self._expression(node, gm, names)
            target = f"{names[node]} = " if node.users else ""
            lines.append(f"{target}{expression}  # {_described(node)}{f', {note}' if note else ''}")
            dead = [names[used] for used in last_use.get(node, ())]
            if dead:
                lines.append(f"del {', '.join(dead)}")
        signature = [*signature, "):"] if inputs else [f"def {name}():"]
        return "\n".join([*signature, *(f"    {line}" for line in lines)]), inputs

    def _return(self, value: Any, names: Mapping[fx.Node, str], notes: Sequence[str]) -> list[str]:
        if not notes or not isinstance(value, (tuple, list)) or len(notes) != len(value):
            return [f"return {self.expressions.argument(value, names)}"]
        items = [f"    {self.expressions.argument(item, names)}," for item in value]
        return ["return (", *(f"{item}  # {note}" if note else item for item, note in zip(items, notes)), ")"]

    def _names(self, graph: fx.Graph, wanted: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
        names: dict[fx.Node, str] = {}
        taken = set(self.reserved)
        for node in graph.nodes:
            base = name = identifier(wanted.get(node, node.name))
            number = 0
            while name in taken:
                number += 1
                name = f"{base}_{number}"
            taken.add(name)
            names[node] = name
        self.local_names.update(names.values())
        return names

    def _subprogram(self, gm: fx.GraphModule, name: str) -> str:
        """The name of the function that a nested program is printed as."""
        if id(gm) not in self._function_names:
            self._function_names[id(gm)] = unique = self.expressions.unique(identifier(name))
            notes = Notes(operations=gm.meta.get("lts_executors", {}))
            self.functions.append(self._function(unique, gm, notes)[0])
        return self._function_names[id(gm)]

    # ----------------------------------------------------------------------------------------------- expressions

    def _expression(self, node: fx.Node, gm: fx.GraphModule, names: Mapping[fx.Node, str]) -> str:
        if node.op == "get_attr":
            return self._attribute(gm, str(node.target))
        hidden = written_out(node)
        owner, method, values, keywords = hidden or (None, str(node.target), node.args, node.kwargs)
        args = [self.expressions.argument(arg, names) for arg in values]
        kwargs = [f"{key}={self.expressions.argument(value, names)}" for key, value in keywords.items()]
        arguments = ", ".join([*args, *kwargs])
        if owner is not None:
            return f"{self.expressions.argument(owner, names)}.{method}({arguments})"
        if node.op == "call_method" or hidden is not None:
            return f"{_parenthesised(args[0])}.{method}({', '.join([*args[1:], *kwargs])})"
        if node.op == "call_module":
            return f"{self._attribute(gm, str(node.target))}({arguments})"
        if node.target is operator.getitem:
            return f"{_parenthesised(args[0])}[{args[1]}]"
        if node.target is getattr and len(args) == 2 and str(node.args[1]).isidentifier():
            return f"{_parenthesised(args[0])}.{node.args[1]}"
        if node.target in _SYMBOLS and len(args) == 2 and not kwargs:
            left, right = (arg if _is_number(arg) else _parenthesised(arg) for arg in args)
            return f"{left} {_SYMBOLS[node.target]} {right}"
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            special = self._higher_order(node, gm, args)
            if special is not None:
                return special
        return f"{self.expressions.callable(node.target)}({arguments})"

    def _attribute(self, gm: fx.GraphModule, target: str) -> str:
        value = _attribute(gm, target)
        if isinstance(value, fx.GraphModule):
            return self._subprogram(value, target)
        return self.expressions.constant(value, target)

    def _higher_order(self, node: fx.Node, gm: fx.GraphModule, args: list[str]) -> Optional[str]:
        """Operators that take programs: printed as the direct call of those programs."""
        name = node.target.name()  # type: ignore[union-attr]
        if name == "invoke_subgraph":
            return f"{args[0]}({', '.join(args[2:])})"
        if name == "tag_activation_checkpoint":
            self.expressions.imports.add("torch.utils.checkpoint")
            return f"torch.utils.checkpoint.checkpoint({', '.join(args)}, use_reentrant=False)"
        if name == "autograd_function_apply":
            return f"{self._autograd_function(node, gm)}.apply({', '.join(args[2:])})"
        return None

    def _autograd_function(self, node: fx.Node, gm: fx.GraphModule) -> str:
        """The name of a printed class over the forward and backward program of a user's ``autograd.Function``."""
        forward, backward = (
            self._subprogram(part, str(part_node.target))
            for part_node in node.args[:2]
            if isinstance(part := _attribute(gm, str(part_node.target)), fx.GraphModule)  # type: ignore[union-attr]
        )
        # Up to torch 2.10 both programs take a first input that is never used.
        first = "None, " if "args_tensor_mask" in node.kwargs else ""
        marks = [
            f"        ctx.{mark}(*(outputs[index] for index in {list(node.kwargs[key])!r}))"  # type: ignore[arg-type]
            for key, mark in (("dirty_idx", "mark_dirty"), ("non_differentiable_idx", "mark_non_differentiable"))
            if node.kwargs.get(key)
        ]
        name = self.expressions.unique("Function")
        body = [
            f"class {name}(torch.autograd.Function):",
            "    @staticmethod",
            "    def forward(ctx, *args):",
            f"        results, ctx.saved = {forward}({first}*args)",
            "        outputs = results if isinstance(results, (tuple, list)) else (results,)",
            *marks,
            "        return results",
            "",
            "    @staticmethod",
            "    def backward(ctx, *gradients):",
            f"        results = {backward}({first}*gradients, *ctx.saved)",
            "        results = results if isinstance(results, (tuple, list)) else (results,)",
            f"        return (*results, *[None] * ({len(node.args) - 2} - len(results)))",
        ]
        self.functions.append("\n".join(body))
        return name


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


def source_line(node: fx.Node) -> Optional[str]:
    """``file.py:12 in forward: code`` for the innermost user line a node came from."""
    matches = re.findall(
        r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)', node.meta.get("stack_trace") or node.stack_trace or ""
    )
    if not matches:
        return None
    users = [match for match in matches if not match[0].startswith(_OWN_FILES)]
    file, line, function, code = (users or matches)[-1]
    return f"{file}:{line} in {function.partition('#')[0]}: {code.strip()}"


def _parenthesised(text: str) -> str:
    return text if text.isidentifier() else f"({text})"


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value
