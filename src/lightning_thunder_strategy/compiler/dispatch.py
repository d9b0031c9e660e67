"""Gives the parts of an ATen program to executors: the whole program to one, or regions by priority."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Optional

import torch
from torch import fx, nn

from lightning_thunder_strategy.compiler import _torch_aot, _torch_compat, grouping
from lightning_thunder_strategy.compiler.claims import claimed_by, operation_name, runs_in_region
from lightning_thunder_strategy.compiler.config import CompileConfig
from lightning_thunder_strategy.compiler.emit import node_value, source_line
from lightning_thunder_strategy.compiler.events import first_line
from lightning_thunder_strategy.compiler.failures import reported
from lightning_thunder_strategy.compiler.fuel import Fuel
from lightning_thunder_strategy.compiler.report import Fallback, Program, warn
from lightning_thunder_strategy.compiler.strides import allow_other_strides
from lightning_thunder_strategy.compiler.surgery import (
    CompiledRegion,
    assemble,
    copy_program,
    extract,
    is_operation,
    keep_parts_together,
    parts,
    region_inputs,
    region_outputs,
)
from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.executors.base import Claim, Executor, FusionExecutor, declined_as_nondeterministic

_EAGER = "eager"


@dataclass(frozen=True)
class Whole:
    """An executor that can take a program whole, and how."""

    executor: str
    compile: Callable[[fx.GraphModule], Callable]


def dispatch(
    trace: Trace,
    executors: Sequence[Executor],
    program: Program,
    config: CompileConfig,
    whole: Optional[Whole],
    fuel: Optional[Fuel] = None,
) -> Callable:
    """Compile one ATen program.

    Args:
        trace: The program; an executor may edit it.
        executors: By priority.
        program: Receives the operation counts, claims, fallbacks and the final trace.
        config: Options.
        whole: If an executor can take the program whole.
        fuel: How many more operations may be given to executors other than eager.

    Returns:
        A function of one list.
    """
    return _Dispatch(trace, executors, program, config, fuel).run(whole)


@dataclass(eq=False)
class _Part:
    """One operation with what takes parts of its result, and the executors that could not take it."""

    operation: fx.Node
    nodes: list[fx.Node]
    executor: int = 0  # index by priority; one more than the last is eager
    starts_region: bool = False


@dataclass(eq=False)
class _Region:
    executor: int
    parts: list[_Part] = field(default_factory=list)

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return tuple(node for part in self.parts for node in part.nodes)


class _Dispatch:
    def __init__(
        self, trace: Trace, executors: Sequence[Executor], program: Program, config: CompileConfig, fuel: Optional[Fuel]
    ) -> None:
        self._trace = trace
        self._stage = trace.stage
        self._origins = [trace.origin(node) for node in trace.graph.find_nodes(op="placeholder")]
        self._outputs = trace.outputs
        self._program = program
        self._config = config
        self._fuel = fuel
        self._fusers = [executor for executor in executors if isinstance(executor, FusionExecutor)]
        self._failures: dict[tuple[str, str], list[str]] = {}  # operation and executor to errors
        self._halved: dict[str, Fallback] = {}  # by executor, the first region that it could not compile at once
        self._compiled: dict[tuple[int, tuple[fx.Node, ...]], Callable] = {}

    def run(self, whole: Optional[Whole]) -> Callable:
        gm = self._trace.graph_module
        assert gm is not None
        spare = copy_program(gm) if self._fusers else gm
        keep_parts_together(spare.graph)
        program = self._grouped(spare.graph, self._plan(spare.graph))
        self._leave_small(program)
        failure: Optional[BaseException] = None
        if whole is not None and {self._name(part.executor) for part in program} <= {whole.executor}:
            region = _Region(self._names().index(whole.executor), program)
            record = self._record(spare, [region])
            try:
                compiled = whole.compile(gm)
            except Exception as error:
                if self._config.on_error == "raise":
                    raise
                failure = error
            else:
                for part in program:
                    self._program.executors[runs_in_region(part.operation, whole.executor)] += 1
                self._program.traces.append(record)
                return compiled
        return self._run_regions(spare, program, failure)

    # -------------------------------------------------------------------------------------------------------- plan

    def _names(self) -> list[str]:
        return [executor.name for executor in self._fusers]

    def _name(self, index: int) -> str:
        return self._fusers[index].name if index < len(self._fusers) else _EAGER

    def _plan(self, graph: fx.Graph) -> list[_Part]:
        """Each operation goes to the first executor that supports it."""
        result = []
        for node in filter(is_operation, graph.nodes):
            part = _Part(node, [node, *parts(node)])
            self._choose(part)
            if part.executor < len(self._fusers) and not self._has_fuel(part):
                part.executor = len(self._fusers)
            result.append(part)
        return result

    def _has_fuel(self, part: _Part) -> bool:
        if self._fuel is None or _edits(part.operation):
            return True
        name = operation_name(part.operation)
        return self._fuel.take(self._name(part.executor), name, self._stage, source_line(part.operation))

    def _choose(self, part: _Part) -> None:
        while part.executor < len(self._fusers):
            executor = self._fusers[part.executor]
            reason = executor.supports(part.operation) or declined_as_nondeterministic(executor, part.operation)
            if reason is None:
                return
            self._program.claims.append(Claim(operation_name(part.operation), executor.name, False, reason))
            part.executor += 1

    def _regions(self, program: Sequence[_Part]) -> list[_Region]:
        """Runs of consecutive operations of one executor: their calls cannot form a cycle."""
        result: list[_Region] = []
        current = -1
        for part in program:
            if part.executor != current or part.starts_region:
                result.append(_Region(part.executor))
            result[-1].parts.append(part)
            current = part.executor
        return [region for region in result if region.executor < len(self._fusers)]

    def _grouped(self, graph: fx.Graph, program: list[_Part]) -> list[_Part]:
        """Operations of executors whose regions may take them from elsewhere, together where their data allows it."""

        def movable(part: _Part) -> bool:
            return (
                part.executor < len(self._fusers) and self._fusers[part.executor].gathers and not _edits(part.operation)
            )

        if not any(movable(part) for part in program):
            return program
        result = grouping.grouped(program, movable, lambda part: _edits(part.operation))
        grouping.reorder(graph, result)
        return result

    def _leave_small(self, program: Sequence[_Part]) -> None:
        """Regions that are not worth it for their executor go to the next one, whose regions may grow by that."""
        left = True
        while left:
            left = False
            for region in self._regions(program):
                executor = self._fusers[region.executor]
                reason = executor.worthwhile(region.nodes)
                if reason is None:
                    continue
                left = True
                for part in region.parts:
                    self._program.claims.append(Claim(operation_name(part.operation), executor.name, False, reason))
                    part.executor += 1
                    self._choose(part)

    # ----------------------------------------------------------------------------------------------------- regions

    def _run_regions(self, gm: fx.GraphModule, program: list[_Part], whole: Optional[BaseException]) -> Callable:
        """Compile region by region. What an executor fails on is halved until the failing operation is found; that
        one goes to the next executor."""
        for part in program:
            if _edits(part.operation):
                part.executor = len(self._fusers)
        if whole is not None:
            self._halve(_Region(0, program), whole)
            self._blame_attention(gm, program)
        while self._compile_regions(gm, self._regions(program)):
            self._leave_small(program)
        regions = self._regions(program)
        inside = {part for region in regions for part in region.parts}
        eager = [node for part in program if part not in inside for node in part.nodes]
        saved = [index for index, output in enumerate(self._outputs) if output.kind == "saved"]
        allow_other_strides(gm.graph, eager, saved)
        self._program.traces.append(self._record(gm, regions))
        for part in program:
            name = claimed_by(part.operation)
            if part in inside:
                name = runs_in_region(part.operation, self._name(part.executor))
            self._program.executors[name] += 1
        self._warn()
        compiled = {region.nodes: region for region in regions}

        def call_of(label: str, nodes: Sequence[fx.Node]) -> nn.Module:
            inputs, outputs = ([node_value(node) for node in found(nodes)] for found in (region_inputs, region_outputs))
            region = compiled[tuple(nodes)]
            function = self._compiled[region.executor, region.nodes]
            program = lambda: extract(gm, nodes)[0]  # noqa: E731
            return CompiledRegion(reported(function, self._name(region.executor), label, program), inputs, outputs)

        runnable, copies = assemble(gm, self._labelled(regions), call_of)
        for node in filter(is_operation, gm.graph.nodes):
            if node in copies and runs_in_region(node, _EAGER) != _EAGER:
                program = lambda node=node: extract(gm, [node, *parts(node)])[0]  # noqa: E731
                copies[node].target = reported(node.target, claimed_by(node), node.name, program)
        return _torch_aot.boxed(runnable)

    def _compile_regions(self, gm: fx.GraphModule, regions: Sequence[_Region]) -> int:
        """How many could not be compiled as they are: the plan has changed."""
        return sum(not self._compile(gm, region) for region in regions)

    def _compile(self, gm: fx.GraphModule, region: _Region) -> bool:
        """Compile a region, or change the plan so that it is compiled otherwise."""
        key = (region.executor, region.nodes)
        if key in self._compiled:
            return True
        try:
            self._compiled[key] = self._fuse(gm, region)
        except Exception as error:
            if self._config.on_error == "raise":
                raise
            if len(region.parts) > 1:
                self._halve(region, error)
                region.parts[len(region.parts) // 2].starts_region = True
            else:
                self._pass_on(region.parts[0], error)
            return False
        return True

    def _fuse(self, gm: fx.GraphModule, region: _Region) -> Callable:
        extracted, inputs = extract(gm, region.nodes)
        with _torch_compat.no_node_metadata():
            return self._fusers[region.executor].fuse(extracted, inputs)

    def _halve(self, region: _Region, error: BaseException) -> None:
        executor, count = self._name(region.executor), len(region.parts)
        found = Fallback(f"{count} operations of the {self._stage} at once", executor, first_line(error))
        self._halved.setdefault(executor, found)

    def _pass_on(self, part: _Part, error: Exception) -> None:
        """Let the next executor have an operation."""
        key = (operation_name(part.operation), self._name(part.executor))
        self._failures.setdefault(key, []).append(first_line(error))
        part.executor += 1
        self._choose(part)

    def _blame_attention(self, gm: fx.GraphModule, program: Sequence[_Part]) -> None:
        """Executors fail on attention most. Trying it alone first is cheaper than halving the program."""
        outcomes: dict[tuple, Optional[Exception]] = {}
        for part in program:
            if "attention" not in str(part.operation.target) or part.executor == len(self._fusers):
                continue
            values = [node_value(node) for node in part.operation.all_input_nodes]
            key = (part.executor, part.operation.target, *map(str, values), str(part.operation.kwargs))
            if key not in outcomes:
                try:
                    self._fuse(gm, _Region(part.executor, [part]))
                except Exception as error:
                    outcomes[key] = error
                else:
                    outcomes[key] = None
            error = outcomes[key]
            if error is not None:
                self._pass_on(part, error)

    # ------------------------------------------------------------------------------------------------------ record

    def _warn(self) -> None:
        """One warning for each program: the operations that failed, or what compiles only in smaller pieces."""
        messages = []
        for (name, executor), errors in self._failures.items():
            times = f" ({len(errors)} times)" if len(errors) > 1 else ""
            fallback = Fallback(f"{name}{times} in the {self._stage}", executor, errors[0])
            self._program.fallbacks.append(fallback)
            if (name, executor) not in self._program.warned:
                messages.append(
                    f"{executor} could not compile {fallback.region}, which the next executor runs: {errors[0]}"
                )
            self._program.warned.add((name, executor))
        explained = {executor for _, executor in self._failures}
        for executor, fallback in self._halved.items():
            if executor not in explained:
                self._program.fallbacks.append(fallback)
                messages.append(
                    f"{executor} could not compile {fallback.region} and does it in pieces: {fallback.error}"
                )
        if messages:
            warn(". ".join(messages), every_rank=True)  # the ranks' machines may differ

    def _labelled(self, regions: Sequence[_Region]) -> list[tuple[str, tuple[fx.Node, ...]]]:
        alone = len(regions) == 1
        return [
            (f"{self._name(region.executor)}_{self._stage}{'' if alone else f'_{index}'}", region.nodes)
            for index, region in enumerate(regions)
        ]

    def _record(self, gm: fx.GraphModule, regions: Sequence[_Region]) -> Trace:
        """The final trace: who runs each statement."""
        inputs = zip(gm.graph.find_nodes(op="placeholder"), self._origins)
        origins = {node: origin for node, origin in inputs if origin is not None}
        names = {node: origin.name for node, origin in origins.items()}
        executors = {region.nodes: self._name(region.executor) for region in regions}
        if not regions:
            notes = {node: claimed_by(node) for node in gm.graph.nodes if is_operation(node)}
            made = Trace(f"final {self._stage}", gm, origins, notes=notes, outputs=self._outputs)
            return made.snapshot("after dispatch")

        def program_of(label: str, nodes: Sequence[fx.Node]) -> nn.Module:
            extracted, _ = extract(gm, nodes, names)
            runner = executors[tuple(nodes)]
            operations = filter(is_operation, extracted.graph.nodes)
            extracted.meta["lts_executors"] = {node: runs_in_region(node, runner) for node in operations}
            return extracted

        final, copies = assemble(gm, self._labelled(regions), program_of)
        known = {copies[node]: origin for node, origin in origins.items()}
        inside = {node for region in regions for node in region.nodes}
        outside = (node for node in gm.graph.nodes if is_operation(node) and node not in inside)
        notes = {copies[node]: claimed_by(node) for node in outside}
        made = Trace(f"final {self._stage}", final, known, notes=notes, outputs=self._outputs)
        return made.snapshot("after dispatch")


def _edits(node: fx.Node) -> bool:
    """Whether an operation edits its inputs. Regions are free of such effects."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
