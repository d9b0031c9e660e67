"""Adds the gradient that waits for a parameter once, however often the parameter is gathered."""

from dataclasses import dataclass
from typing import Any

from torch import fx

from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.compiler.transform import Transform


@dataclass(frozen=True)
class AddOnce(Transform):
    """Leaves one ``adding_gradient`` for each gradient that waits, also where checkpointed regions gather it again."""

    def acquired(self, trace: Trace) -> None:
        module = trace.graph_module
        assert module is not None
        _visit(module, {node: node for node in trace.graph.find_nodes(op="placeholder")}, set())


def _visit(module: fx.GraphModule, known: dict[fx.Node, Any], seen: set[Any]) -> None:
    """Walk through a program and the regions that it calls; ``known`` names inputs as the whole program does."""
    for node in list(module.graph.nodes):
        if getattr(node.target, "__name__", "") == "adding_gradient":
            gathered, waiting = node.args
            name = known.get(waiting)
            if name in seen:
                node.replace_all_uses_with(gathered)
                module.graph.erase_node(node)
            seen.add(name)
        bodies = [arg for arg in node.args if isinstance(arg, fx.Node) and arg.op == "get_attr"]
        for body in bodies if node.op == "call_function" else ():
            region = getattr(module, str(body.target), None)
            if isinstance(region, fx.GraphModule):
                passed = node.args[node.args.index(body) + 1 :]
                inputs = region.graph.find_nodes(op="placeholder")
                _visit(region, {inner: known.get(outer, outer) for inner, outer in zip(inputs, passed)}, seen)
    module.recompile()
