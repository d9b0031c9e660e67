"""Routes the parts of a program to executors."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import fx, nn

from lightning_thunder_strategy.compiler import _torch_compat
from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.events import first_line
from lightning_thunder_strategy.compiler.report import Fallback, Program, warn
from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.executors.base import Claim, Executor, FusionExecutor, OperatorExecutor

_EAGER = "eager"


# ------------------------------------------------------------------------------------------- operators, before autograd


def claim_operators(trace: Trace, executors: Sequence[Executor], claims: list[Claim]) -> dict[str, str]:
    """Give each torch-level operation to the first operator executor that takes it.

    Returns:
        Module and qualified name to a version, for the functions that were put into the program.
    """
    functions: dict[str, str] = {}
    candidates = [executor for executor in executors if isinstance(executor, OperatorExecutor)]
    for node in list(trace.graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        for executor in candidates:
            if not executor.considers(node):
                continue
            function = executor.replacement(node)
            name = operation_name(node)
            if isinstance(function, str):
                claims.append(Claim(name, executor.name, False, function))
                continue
            claims.append(Claim(name, executor.name, True))
            node.op, node.target = "call_function", function
            node.meta["lts_executor"] = executor.name
            functions[f"{function.__module__}.{function.__qualname__}"] = executor.cache_key() or ""
            break
    return functions


def operation_name(node: fx.Node) -> str:
    """An operation as the trace prints it."""
    if isinstance(node.target, str):
        return node.target
    return (
        str(node.target)
        if isinstance(node.target, torch._ops.OpOverload)
        else getattr(node.target, "__name__", str(node.target))
    )


# --------------------------------------------------------------------------------------------- regions, after autograd


@dataclass
class _Plan:
    """Who runs what: for each operation an index into ``executors``, and where regions must start anew."""

    executors: list[FusionExecutor]
    choice: dict[fx.Node, int]
    cuts: set[fx.Node] = field(default_factory=set)
    pushed: bool = False

    def executor(self, node: fx.Node) -> Optional[FusionExecutor]:
        index = self.choice.get(node, len(self.executors))
        return self.executors[index] if index < len(self.executors) else None

    def regions(self, graph: fx.Graph) -> list[tuple[FusionExecutor, list[fx.Node]]]:
        """Runs of consecutive operations of one executor: their calls cannot form a cycle."""
        result: list[tuple[FusionExecutor, list[fx.Node]]] = []
        current: Optional[FusionExecutor] = None
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            executor = self.executor(node)
            if executor is not None and (executor is not current or node in self.cuts):
                result.append((executor, []))
            if executor is not None:
                result[-1][1].append(node)
            current = executor
        return result


def dispatch(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    stage: str,
    executors: Sequence[Executor],
    program: Program,
    on_error: str,
    whole: Optional[tuple[str, Callable[[fx.GraphModule], Callable]]],
    trace: Trace,
) -> Callable:
    """Compile one ATen program.

    Args:
        gm: The program; an executor may edit it.
        inputs: Fake inputs.
        stage: ``"forward"`` or ``"backward"``.
        executors: By priority.
        program: Receives the operation counts, claims, fallbacks and the final trace.
        on_error: See :class:`~lightning_thunder_strategy.compiler.config.CompileConfig`.
        whole: The executor that can take the program whole, and how.
        trace: The live trace of ``gm``.

    Returns:
        A function of one list.
    """
    plan = _plan(gm.graph, executors, program.claims)
    operations = [node for node in gm.graph.nodes if _is_operation(node)]
    if not plan.executors:
        program.executors[_EAGER] += len(operations)
        final = Trace(
            f"final {stage}", gm, trace._origins, notes=dict.fromkeys(operations, _EAGER), outputs=trace.outputs
        )
        program.traces.append(final.snapshot("after dispatch"))
        return _torch_compat.boxed(gm)

    original = _copy(gm)
    takers = {plan.executor(node) for node in gm.graph.nodes if node.op == "call_function"}
    if whole is not None and {executor.name if executor else None for executor in takers} <= {whole[0]}:
        everything = [node for node in original.graph.nodes if node.op == "call_function"]
        final, _ = _assemble(original, [(f"{whole[0]}_{stage}", everything)], None)
        record = _final_record(stage, final, trace, {})
        try:
            compiled = whole[1](gm)
        except Exception as error:
            if on_error == "raise":
                raise
            program.fallbacks.append(Fallback(f"the whole {stage}", whole[0], first_line(error)))
        else:
            program.executors[whole[0]] += len(operations)
            program.traces.append(record)
            return compiled
        plan = _plan(original.graph, executors, [])
        _push_suspects(plan, list(original.graph.nodes))
    return _dispatch_regions(original, stage, plan, program, on_error, trace)


def _plan(graph: fx.Graph, executors: Sequence[Executor], claims: list[Claim]) -> _Plan:
    fusers = [executor for executor in executors if isinstance(executor, FusionExecutor)]
    plan = _Plan(fusers, {})
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            plan.choice[node] = plan.choice.get(node.args[0], len(fusers))
            continue
        index = 0
        while index < len(fusers) and (reason := fusers[index].supports(node)) is not None:
            claims.append(Claim(operation_name(node), fusers[index].name, False, reason))
            index += 1
        plan.choice[node] = index
    return plan


def _dispatch_regions(
    gm: fx.GraphModule, stage: str, plan: _Plan, program: Program, on_error: str, trace: Trace
) -> Callable:
    """Compile region by region. What an executor fails on is halved until the failing operation is found; that one
    goes to the next executor."""
    compiled: dict[tuple[FusionExecutor, tuple[fx.Node, ...]], Callable] = {}
    errors: list[Fallback] = []
    while True:
        failed = False
        for executor, nodes in plan.regions(gm.graph):
            key = (executor, tuple(nodes))
            if key in compiled:
                continue
            region, inputs = _extract(gm, nodes)
            try:
                with _torch_compat.no_node_metadata():
                    compiled[key] = executor.fuse(_copy(region), inputs)
            except Exception as error:
                if on_error == "raise":
                    raise
                failed = True
                _after_failure(plan, executor, nodes, error, errors, stage)
        if not failed:
            break
    regions = plan.regions(gm.graph)
    labelled = [(f"{executor.name}_{stage}_{index}", nodes) for index, (executor, nodes) in enumerate(regions)]
    notes = {}
    for executor, nodes in regions:
        program.executors[executor.name] += sum(map(_is_operation, nodes))
    inside = {node for _, nodes in regions for node in nodes}
    eager = [node for node in gm.graph.nodes if _is_operation(node) and node not in inside]
    program.executors[_EAGER] += len(eager)
    final, copies = _assemble(gm, labelled, None)
    notes = {copies[node]: node.meta.get("lts_executor", _EAGER) for node in eager}
    program.traces.append(_final_record(stage, final, trace, notes))
    if errors:
        program.fallbacks.extend(errors)
        described = "; ".join(f"{item.executor} on {item.region}: {item.error}" for item in errors)
        warn(f"Some of the {stage} could not be compiled and runs with the next executor. {described}")
    elif program.fallbacks:
        first = program.fallbacks[-1]
        warn(f"{first.executor} could not compile {first.region} at once ({first.error}); it runs in regions.")
    calls = {label: compiled[(executor, tuple(nodes))] for (label, _), (executor, nodes) in zip(labelled, regions)}
    runnable, _ = _assemble(gm, labelled, calls)
    return _restrided_outputs(_torch_compat.boxed(runnable), gm.graph)


def _after_failure(
    plan: _Plan, executor: FusionExecutor, nodes: list[fx.Node], error: Exception, errors: list[Fallback], stage: str
) -> None:
    if _push_suspects(plan, nodes):
        return
    if len(nodes) > 1:
        plan.cuts.add(nodes[len(nodes) // 2])
        return
    errors.append(Fallback(f"{operation_name(nodes[0])} in the {stage}", executor.name, first_line(error)))
    plan.choice[nodes[0]] += 1


def _push_suspects(plan: _Plan, nodes: Sequence[fx.Node]) -> bool:
    """Attention is what fusers fail on most: let the next executor have it before halving regions. Only once."""
    if plan.pushed:
        return False
    plan.pushed = True
    suspects = [node for node in nodes if "attention" in str(node.target) and node in plan.choice]
    for node in suspects:
        plan.choice[node] += 1
        for user in node.users:
            if user.target is operator.getitem:
                plan.choice[user] = plan.choice[node]
    return bool(suspects)


# ------------------------------------------------------------------------------------------------------ graph surgery


def _is_operation(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(gm.graph, values)
    made = graph.output(output)
    made.meta = dict(next(iter(reversed(gm.graph.nodes))).meta)
    copy = fx.GraphModule(gm, graph)
    copy.meta = dict(gm.meta)
    return copy


copy_program = _copy


def _extract(gm: fx.GraphModule, nodes: list[fx.Node]) -> tuple[fx.GraphModule, list[Any]]:
    """Some consecutive operations as a program of their own, and the fake values of its inputs."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    inside = set(nodes)
    inputs = _region_inputs(nodes)
    for node in inputs:
        values[node] = graph.placeholder(node.name)
        values[node].meta = dict(node.meta)
    for node in nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
    outputs = _region_outputs(nodes, inside)
    made = graph.output(tuple(values[node] for node in outputs))
    made.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    return fx.GraphModule(gm, graph), [node_value(node) for node in inputs]


def _region_inputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    inside = set(nodes)
    return list(dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in inside))


def _region_outputs(nodes: Sequence[fx.Node], inside: set[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if any(user not in inside for user in node.users)]


class _CompiledRegion(nn.Module):
    """Calls a compiled region; inputs whose strides are not the traced ones are copied into those first."""

    def __init__(self, function: Callable[[list], Sequence[Any]], inputs: Sequence[Any]) -> None:
        super().__init__()
        self.function = function
        self.strides = [_static_stride(value) for value in inputs]

    def forward(self, *args: Any) -> Any:
        return self.function([_restride(value, stride) for value, stride in zip(args, self.strides)])


def _assemble(
    gm: fx.GraphModule, regions: Sequence[tuple[str, list[fx.Node]]], calls: Optional[dict[str, Callable]]
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """The program with each region as one call: of its compiled function, or without ``calls`` of its own program."""
    starts = {nodes[0]: (label, nodes) for label, nodes in regions if nodes}
    inside = {node for _, nodes in regions for node in nodes}
    graph, values, modules = fx.Graph(), {}, {}
    for node in gm.graph.nodes:
        if node in starts:
            label, nodes = starts[node]
            program, fakes = _extract(gm, nodes)
            modules[label] = program if calls is None else _CompiledRegion(calls[label], fakes)
            outputs = _region_outputs(nodes, set(nodes))
            call = graph.call_module(label, tuple(values[used] for used in _region_inputs(nodes)))
            call.meta["val"] = tuple(node_value(output) for output in outputs)
            for index, output in enumerate(outputs):
                values[output] = graph.call_function(operator.getitem, (call, index))
                values[output].meta = dict(output.meta)
                values[output].name = output.name
        if node not in inside:
            values[node] = graph.node_copy(node, values.__getitem__)
            if node.op == "output":
                values[node].meta = dict(node.meta)
    attributes = {node.target: _get(gm, node.target) for node in gm.graph.find_nodes(op="get_attr")}
    return fx.GraphModule({**attributes, **modules}, graph), values


def _get(gm: fx.GraphModule, target: Any) -> Any:
    value: Any = gm
    for part in str(target).split("."):
        value = getattr(value, part)
    return value


def _static_stride(value: Any) -> Optional[tuple[int, ...]]:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    stride = tuple(value.stride())
    return stride if all(isinstance(item, int) for item in stride) else None


def _restride(value: Any, stride: Optional[tuple[int, ...]]) -> Any:
    if stride is None or value.stride() == stride:
        return value
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def _restrided_outputs(function: Callable, graph: fx.Graph) -> Callable:
    """Give every output the traced strides: the backward was compiled for those."""
    outputs = next(iter(reversed(graph.nodes))).args[0]
    strides = [_static_stride(node_value(node)) if isinstance(node, fx.Node) else None for node in outputs]

    def call(args: list) -> list:
        results = function(args)
        return [
            _restride(value, stride) if isinstance(value, torch.Tensor) else value
            for value, stride in zip(results, strides)
        ]

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _final_record(stage: str, final: fx.GraphModule, trace: Trace, notes: dict[fx.Node, str]) -> Trace:
    """The final trace: who runs each statement. Its inputs are those of ``trace``."""
    before = trace.graph.find_nodes(op="placeholder")
    after = final.graph.find_nodes(op="placeholder")
    origins = {new: origin for old, new in zip(before, after) if (origin := trace.origin(old)) is not None}
    return Trace(f"final {stage}", final, origins, notes=notes, outputs=trace.outputs).snapshot("after dispatch")
