"""From an acquired program to forward and backward: AOTAutograd, with our passes around the partition."""

from collections.abc import Callable, Collection, Sequence
from time import perf_counter  # by name: tests of users replace `time.perf_counter`
from typing import Any, Optional

import torch
from torch import fx

from lightning_thunder_strategy.compiler import _torch_aot, _torch_inductor
from lightning_thunder_strategy.compiler.collectives import count_collectives, sequence
from lightning_thunder_strategy.compiler.config import CompileConfig
from lightning_thunder_strategy.compiler.dispatch import Whole, dispatch
from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.fuel import Fuel
from lightning_thunder_strategy.compiler.gradients import separate_gradients
from lightning_thunder_strategy.compiler.report import Program
from lightning_thunder_strategy.compiler.saved_values import (
    Saved,
    computed_again,
    copy_saved_edits,
    kept,
    sort_saved_values,
)
from lightning_thunder_strategy.compiler.surgery import copy_program
from lightning_thunder_strategy.compiler.trace import Origin, Trace, TraceOutput
from lightning_thunder_strategy.compiler.transform import ProgramRefusedError, Transform, TransformError
from lightning_thunder_strategy.executors.base import Executor


class Differentiation:
    """Differentiates, partitions and dispatches one acquired program.

    Args:
        program: Receives traces and figures.
        origins: What is known of the acquired program's inputs, in order.
        executors: By priority.
        transforms: Passes, in order.
        config: Options.
        stored: Called whenever ``program`` has become more complete.
        fuel: How many more claims may be made.
    """

    def __init__(
        self,
        program: Program,
        origins: Sequence[Origin],
        executors: Sequence[Executor],
        transforms: Sequence[Transform],
        config: CompileConfig,
        stored: Callable[[], None],
        fuel: Optional[Fuel] = None,
    ) -> None:
        self._program = program
        self._origins = origins
        self._executors = executors
        self._transforms = transforms
        self._config = config
        self._stored = stored
        self._fuel = fuel
        self._partitioned: dict[str, dict[str, Origin]] = {}
        self.partitioned = False

    @property
    def uses_inductor(self) -> bool:
        return any(executor.name == "inductor" for executor in self._executors)

    def compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], cache_key: Optional[str], functions: dict[str, str]
    ) -> Callable:
        """Compile ``gm``, which may be edited.

        Args:
            gm: The acquired program after the torch-level passes.
            example_inputs: Its inputs.
            cache_key: What the cached program depends on besides the graph, or ``None`` to leave it out of the cache.
            functions: Importable functions in the graph that may be cached, with versions.
        """
        if not self.uses_inductor:
            backend = _torch_aot.aot_backend(
                self._aot_compiler("forward"),
                self._aot_compiler("backward"),
                self._aot_compiler("inference"),
                self._partition,
            )
            return backend(gm, example_inputs)
        backend = _torch_inductor.inductor_backend(
            self._partition, cache_key, self._inductor_dispatch, self._inductor_options(), functions
        )
        with _torch_inductor.aot_cache(_torch_inductor.aot_cache_enabled() and cache_key is not None):
            return backend(gm, example_inputs)

    def _inductor_options(self) -> dict[str, Any]:
        ours = {"triton.cudagraphs": self._config.cudagraphs, "fallback_random": self._config.eager_random}
        (executor,) = (executor for executor in self._executors if executor.name == "inductor")
        return {**executor.config_patches(), **ours}

    # --------------------------------------------------------------------------------------------------- partition

    def _partition(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.partitioned = True
        program = self._program
        trace = Trace("joint", joint, self._name_inputs(joint.graph), outputs=self._name_outputs(joint.graph))
        trace.trial = lambda without: self._would_keep(joint, inputs, kwargs, without)
        program.traces.append(trace.snapshot("forward and backward as one program"))
        for transform in self._transforms:
            if type(transform).joint is not Transform.joint:
                run_pass(self._program, transform, lambda t: t.joint(trace), [trace])
        edited = {index for kind, index in _torch_aot.output_descriptions(joint.graph) if kind == "edited"}
        forward, backward = _torch_aot.min_cut_partition(joint, inputs, **kwargs)
        copy_saved_edits(forward, kwargs["num_fwd_outputs"], edited)
        sort_saved_values(forward, backward, kwargs["num_fwd_outputs"])
        names = self._name_inputs(forward.graph)
        known = self._name_backward(forward.graph, backward.graph, names)
        forward_trace = Trace("forward", forward, names, outputs=self._name_outputs(forward.graph))
        backward_trace = Trace("backward", backward, known, outputs=self._name_outputs(backward.graph))
        program.traces.append(forward_trace.snapshot("after the partition"))
        program.traces.append(backward_trace.snapshot("after the partition"))
        self._partition_passes(forward_trace, backward_trace)
        program.saved = kept(forward, kwargs["num_fwd_outputs"])
        program.computed_again = computed_again(forward, backward)
        separate_gradients(backward)
        return forward, backward

    @staticmethod
    def _would_keep(joint: fx.GraphModule, inputs: Any, kwargs: dict[str, Any], without: Collection[fx.Node]) -> Saved:
        forward, _ = _torch_aot.min_cut_partition(copy_program(joint), inputs, **kwargs)
        return kept(forward, kwargs["num_fwd_outputs"], {node.name for node in without})

    def _partition_passes(self, forward: Trace, backward: Optional[Trace]) -> None:
        both = [trace for trace in (forward, backward) if trace is not None]
        for transform in self._transforms:
            if type(transform).partitioned is not Transform.partitioned:
                run_pass(self._program, transform, lambda t: t.partitioned(forward, backward), both)
        for trace in both:
            self._program.collectives[trace.stage] = count_collectives(trace.graph)
            self._partitioned[trace.stage] = {node.name: origin for node, origin in trace._origins.items()}
        self._program.sequence = sequence(trace.graph for trace in both)

    # ----------------------------------------------------------------------------------------------------- dispatch

    def _aot_compiler(self, kind: str) -> Callable[[fx.GraphModule, Sequence[Any]], Callable]:
        def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
            return self._dispatch(gm, kind == "backward", kind == "inference", None)

        return compiler

    def _inductor_dispatch(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable:
        whole = Whole("inductor", lambda program: _torch_inductor.inductor_compile(program, inputs, **kwargs))
        return self._dispatch(gm, kwargs.get("is_backward", False), kwargs.get("is_inference", False), whole)

    def _dispatch(self, gm: fx.GraphModule, backward: bool, inference: bool, whole: Optional[Whole]) -> Callable:
        started = perf_counter()
        stage = "backward" if backward else "forward"
        if inference:
            trace = Trace("forward", gm, self._name_inputs(gm.graph), outputs=self._name_outputs(gm.graph))
            self._program.traces.append(trace.snapshot("without gradients"))
            self._partition_passes(trace, None)
        known = self._partitioned.get(stage, {})
        origins = {n: known[n.name] for n in gm.graph.find_nodes(op="placeholder") if n.name in known}
        live = Trace(stage, gm, origins, outputs=self._name_outputs(gm.graph))
        compiled = dispatch(live, self._executors, self._program, self._config, whole, self._fuel)
        self._program.seconds["dispatch"] += perf_counter() - started
        self._stored()
        return compiled

    # -------------------------------------------------------------------------------------------------------- names

    def _name_inputs(self, graph: fx.Graph) -> dict[fx.Node, Origin]:
        """Names of the inputs of a joint or forward program, from the acquired program's."""
        result = {}
        placeholders = graph.find_nodes(op="placeholder")
        for node in placeholders:
            index = _torch_aot.aot_input_index(node)
            if _torch_aot.is_tangent(node):
                result[node] = Origin(node.name, "gradient")
            elif index is not None and index < len(self._origins):
                origin = self._origins[index]
                plain = isinstance(node_value(node), (torch.Tensor, torch.SymInt, int))
                result[node] = origin if plain else Origin(f"{origin.name}_mesh", "object")
        return result

    def _name_outputs(self, graph: fx.Graph) -> list[TraceOutput]:
        described = _torch_aot.output_descriptions(graph)
        known = {index: origin.origin or origin.name for index, origin in enumerate(self._origins)}
        return [TraceOutput(kind, known.get(index) if index is not None else None) for kind, index in described]

    def _name_backward(
        self, forward: fx.Graph, backward: fx.Graph, names: dict[fx.Node, Origin]
    ) -> dict[fx.Node, Origin]:
        by_name = {node.name: origin for node, origin in names.items()}
        result = {}
        for node in backward.find_nodes(op="placeholder"):
            if _torch_aot.is_tangent(node):
                result[node] = Origin(node.name, "gradient")
            elif _torch_aot.is_random_state(node):
                result[node] = Origin(node.name, "random state")
            else:
                result[node] = by_name.get(node.name, Origin(node.name, "saved"))
        return result


def run_pass(
    program: Program, transform: Transform, call: Callable[[Transform], None], traces: Sequence[Trace]
) -> None:
    """Run one hook of a pass and record what it made of each trace.

    Raises:
        TransformError: If the pass fails, or leaves a program that is not well formed.
    """
    started = perf_counter()
    try:
        call(transform)
        for trace in traces:
            trace.graph.lint()
            trace.graph_module.recompile()  # type: ignore[union-attr]
    except ProgramRefusedError:
        raise
    except Exception as error:
        raise TransformError(transform, traces[0].stage, error) from error
    seconds = perf_counter() - started
    program.seconds["transform"] += seconds
    for trace in traces:
        program.decisions += trace.decisions
        trace.decisions.clear()
    program.traces += [trace.snapshot(f"after {transform.name}, {1e3 * seconds:.1f} ms") for trace in traces]
