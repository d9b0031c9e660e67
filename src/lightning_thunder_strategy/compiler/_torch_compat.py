"""The only file that uses names which torch does not document. Checked on torch 2.11 and 2.13.

Each function says what it stands for; the rest of the package calls these.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional
from unittest import mock

import torch
import torch.distributed
from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])

# ---------------------------------------------------------------------------------------------------------- Dynamo


def dynamo_errors() -> tuple[type[BaseException], ...]:
    """The errors with which Dynamo says that it could not compile a function (before any of it has run)."""
    from torch._dynamo import exc

    return (exc.TorchDynamoException, exc.FailOnRecompileLimitHit)


def is_dynamo_error(error: BaseException) -> bool:
    """Whether Dynamo raised this while it read a function: one of its own errors, or one from a fault in it, to which
    it has added where in the function it was."""
    return isinstance(error, dynamo_errors()) or hasattr(error, "innermost_user_frame_summary")


def control_flow_errors() -> tuple[type[BaseException], ...]:
    """Exceptions by which a backend asks Dynamo to read the function again: never to be caught."""
    from torch._dynamo import exc

    return (exc.RestartAnalysis, exc.SkipFrame)


def is_recompile_limit(error: BaseException) -> bool:
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return isinstance(error, FailOnRecompileLimitHit)


def unsupported_stack(error: BaseException) -> list[tuple[str, int]]:
    """File and line of each call, outermost first, at which Dynamo gave up."""
    return [(frame.filename, frame.lineno or 0) for frame in getattr(error, "real_stack", None) or ()]


class CompileListeners:
    """Calls ``start`` and ``end`` with the compile id around each frame that Dynamo compiles."""

    def __init__(self, start: Callable[[str], None], end: Callable[[str], None]) -> None:
        self._start, self._end = self._of_dynamo(start), self._of_dynamo(end)

    def attach(self) -> None:
        """Listen from now on. Called before each call of a program: ``torch.compiler.reset`` detaches all listeners."""
        from torch._dynamo.callback import callback_handler

        if self._start not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._start)
            callback_handler.register_end_callback(self._end)

    @staticmethod
    def _of_dynamo(function: Callable[[str], None]) -> Callable[[Any], None]:
        from torch._dynamo.callback import CallbackTrigger

        def call(args: Any) -> None:
            if args.callback_trigger == CallbackTrigger.DYNAMO:
                function(args.compile_id)

        return call


def recompile_reasons() -> dict[str, str]:
    """Compile id to the reason of the recompilation, for the frames that Dynamo still remembers."""
    from torch._dynamo.utils import get_compilation_metrics

    return {
        str(metric.compile_id): metric.recompile_reason
        for metric in get_compilation_metrics()
        if metric.recompile_reason is not None
    }


def artifact_loggers() -> list[logging.Logger]:
    """The loggers on which Dynamo writes graph breaks."""
    names = ("symbolic_convert", "convert_frame", "exc")
    return [logging.getLogger(f"torch._dynamo.{name}.__graph_breaks") for name in names]


def convert_frame_logger() -> logging.Logger:
    """The logger on which Dynamo writes that it hit the recompile limit or skips a frame."""
    return logging.getLogger("torch._dynamo.convert_frame")


def compile_settings(sources: Sequence[str]) -> contextlib.AbstractContextManager:
    """How Dynamo reads programs while this is open.

    Integers reached through modules are symbolic, those named by ``sources`` (regular expressions) from the first value
    on. Hooks that are put on a module after it was compiled make a new program. Recurrent layers are never part of one:
    torch's decomposition leaves out the dropout between their layers. Optimizers that a program looks at stay as they
    are: Dynamo would set their ``capturable``. ``torch.autograd.grad`` is part of programs (torch 2.13), because it
    could not be differentiated again if it were applied to a compiled one; ``backward`` never is.
    """
    from torch._dynamo.variables.optimizer import OptimizerVariable

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(OptimizerVariable, "_set_capturable", lambda self, tx: None))
    settings = {"allow_unspec_int_on_nn_module": True, "skip_nnmodule_hook_guards": False, "allow_rnn": False}
    if TORCH_VERSION < (2, 12):  # it would miss that a parameter was frozen or unfrozen
        settings["skip_tensor_guards_with_matching_dict_tags"] = False
    if hasattr(torch._dynamo.config, "trace_autograd_ops"):
        settings["trace_autograd_ops"] = True
        stack.enter_context(_backward_not_traced())
    stack.enter_context(torch._dynamo.config.patch(settings))
    if sources:
        known = [source for source in torch.compiler.config.dynamic_sources.split(",") if source]
        stack.enter_context(torch.compiler.config.patch(dynamic_sources=",".join([*known, *sources])))
    return stack


def _backward_not_traced() -> contextlib.AbstractContextManager:
    """While open, Dynamo cuts programs at ``Tensor.backward``, as it does by default."""
    from torch._dynamo.variables.tensor import TensorVariable

    original = TensorVariable.method_backward

    def method_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(trace_autograd_ops=False):
            return original(self, *args, **kwargs)

    return mock.patch.object(TensorVariable, "method_backward", method_backward)


class suppress_dynamo_errors(contextlib.AbstractContextManager):
    """While open, a frame that Dynamo cannot compile runs eagerly instead of raising.

    Opened for each call, so it does not use ``config.patch``, which costs 0.2 ms.
    """

    def __enter__(self) -> None:
        self._before = torch._dynamo.config.suppress_errors
        torch._dynamo.config.suppress_errors = True

    def __exit__(self, *_: object) -> None:
        torch._dynamo.config.suppress_errors = self._before


def placeholder_source(node: fx.Node) -> Optional[str]:
    """Where the program found this input, as a Python expression (``L['x']``), or ``None`` if it is not known."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return None
    name = source.name
    return name() if callable(name) else name


@contextlib.contextmanager
def compiled_calls(entries: Mapping[torch.nn.Module, Optional[Callable]]) -> Iterator[None]:
    """While open, each module's ``__call__`` goes to its entry, or is plain where that is ``None``. Uses the attribute
    that ``nn.Module.compile`` sets, which pickle and deepcopy leave out."""
    before = [(module, module.__dict__.get("_compiled_call_impl")) for module in entries]
    try:
        for module, entry in entries.items():
            _set_compiled_call(module, entry)
        yield
    finally:
        for module, entry in before:
            _set_compiled_call(module, entry)


def _set_compiled_call(module: torch.nn.Module, entry: Optional[Callable]) -> None:
    if entry is None:
        module.__dict__.pop("_compiled_call_impl", None)
    else:
        module.__dict__["_compiled_call_impl"] = entry


def never_a_program(*functions: Callable) -> None:
    """Dynamo does not make programs of these functions themselves. It reads them as part of others, and makes programs
    of what they call."""
    from torch._dynamo.eval_frame import skip_code

    for function in functions:
        skip_code(function.__code__)


def plain_call(module: torch.nn.Module) -> Callable:
    """The module's own ``__call__`` with hooks, never a compiled one."""
    return module._call_impl


# ------------------------------------------------------------------------------------------- AOTAutograd, partition


def aot_backend(
    forward: Callable, backward: Callable, inference: Callable, partition: Callable
) -> Callable[[fx.GraphModule, Sequence[Any]], Callable]:
    """AOTAutograd without decompositions: operators stay as eager PyTorch runs them."""
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions={torch.ops.aten.bernoulli.p: _bernoulli_in_memory_order},
    )

    def compile_program(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        with _backward_without_autocast():
            return backend(gm, example_inputs)

    return compile_program


def _bernoulli_in_memory_order(x: torch.Tensor, p: float, *, generator: Optional[torch.Generator] = None) -> Any:
    """``bernoulli_``, as in ``F.alpha_dropout``, fills a permuted tensor in the order of its memory; the operator that
    stands for it in a program without edits does not."""
    order = sorted(range(x.dim()), key=lambda dim: (-x.stride(dim), dim)) if not x.is_contiguous() else []
    if not order or not x.permute(order).is_contiguous():
        return NotImplemented
    drawn = torch.ops.aten.bernoulli.p(x.permute(order), p, generator=generator)
    return drawn.permute([order.index(dim) for dim in range(x.dim())]).contiguous()


def _backward_without_autocast() -> contextlib.AbstractContextManager:
    """While open, AOTAutograd traces backwards as if they were called outside of autocast regions, as users call them.

    Its default casts every operation of a backward again, also those whose forward a user took out of autocast.
    """
    import torch._functorch.config as config

    if not hasattr(config, "backward_pass_autocast"):
        return contextlib.nullcontext()
    return config.patch(backward_pass_autocast="off")


def min_cut_partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint program; recompute in the backward what is cheaper to compute again than to save."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def mark_recompute(node: fx.Node, region: int) -> None:
    """Ask the partitioner to compute ``node`` again in the backward."""
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = region


def move_to_front(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Put ``nodes`` first in ``graph``, in the order given."""
    for node in reversed(nodes):
        graph._root.append(node)


def aot_input_index(node: fx.Node) -> Optional[int]:
    """Which input of the acquired program a placeholder of the forward or joint program comes from."""
    return _plain_input_index(node.meta.get("desc"))


def output_descriptions(graph: fx.Graph) -> list[tuple[str, Optional[int]]]:
    """What each output of a joint, forward or backward program is, and which acquired input it belongs to.

    ``"result"``, ``"saved"``, ``"gradient"`` or ``"edited"`` (the new value of an input), or ``""`` if it is not known.
    """
    descriptions = next(iter(reversed(graph.nodes))).meta.get("desc") or []
    return [_output_description(_unwrap_subclass(desc)) for desc in descriptions]


def _output_description(desc: Any) -> tuple[str, Optional[int]]:
    kinds = {
        "PlainAOTOutput": ("result", None), "SavedForBackwardsAOTOutput": ("saved", None),
        "SavedForBackwardsNoVcCheckAOTOutput": ("saved", None),
        "GradAOTOutput": ("gradient", "grad_of"), "InputMutationAOTOutput": ("edited", "mutated_input"),
    }  # fmt: skip
    kind, attribute = kinds.get(type(desc).__name__, ("", None))
    return kind, _plain_input_index(getattr(desc, attribute, None)) if attribute else None


def is_tangent(node: fx.Node) -> bool:
    return type(_unwrap_subclass(node.meta.get("desc"))).__name__ == "TangentAOTInput"


def _unwrap_subclass(desc: Any) -> Any:
    while desc is not None and type(desc).__name__.startswith("Subclass"):
        desc = desc.base
    return desc


def _plain_input_index(desc: Any) -> Optional[int]:
    desc = _unwrap_subclass(desc)
    return desc.idx if type(desc).__name__ == "PlainAOTInput" else None


def is_random_state(node: fx.Node) -> bool:
    """Whether a placeholder of a backward is the state of a random generator, saved by the forward."""
    return any(
        isinstance(user.target, torch._ops.HigherOrderOperator)
        and user.target.name() == "run_with_rng_state"
        and user.args[0] is node
        for user in node.users
    )


def eager_checkpoints(gm: fx.GraphModule) -> None:
    """Make activation checkpoints in an acquired program real ones, so that it may run without AOTAutograd.

    What Dynamo puts there only marks a region: run eagerly it would draw other random numbers when it computes again.
    """
    from torch.utils.checkpoint import checkpoint

    for child in gm.children():
        if isinstance(child, fx.GraphModule):
            eager_checkpoints(child)
    for node in gm.graph.nodes:
        if is_checkpoint(node):
            region = getattr(gm, str(node.args[0].target))  # type: ignore[union-attr]
            policy = region.meta.get("_checkpoint_context_fn")
            node.target, node.kwargs = checkpoint, {"use_reentrant": False}
            if policy is not None:
                name = f"{node.args[0].target}_policy"  # type: ignore[union-attr]
                setattr(gm, name, policy)
                with gm.graph.inserting_before(node):
                    node.kwargs = {**node.kwargs, "context_fn": gm.graph.create_node("get_attr", name)}
    gm.recompile()


def is_checkpoint(node: fx.Node) -> bool:
    """Whether a node of an acquired program calls a region of ``torch.utils.checkpoint``."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() == "tag_activation_checkpoint"


def real_object(value: Any) -> Any:
    """The object behind the stand-in that a traced program has for it, such as a device mesh."""
    return getattr(value, "real_obj", value) if type(value).__name__ == "FakeScriptObject" else value


def boxed(gm: fx.GraphModule) -> Callable[[list], Any]:
    """The program as a function of one list, which it empties so that inputs can be freed early."""
    from torch.fx.graph import _BoxedCodeGen

    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.set_codegen(_BoxedCodeGen())
    module = fx.GraphModule(gm, graph)
    forward = module.forward

    def call(args: list) -> Any:
        return forward(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    call.graph_module = module  # type: ignore[attr-defined]
    return call


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call ``function`` when the backward pass that is running on this thread has accumulated all gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------------------------- Inductor


class _Partitioner(CustomPartitionerFn):
    """Our partitioner, as Inductor's caches want to see it: a key."""

    def __init__(self, partition: Callable, key: Optional[str]) -> None:
        self._partition = partition
        self._key = key

    def __call__(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        return self._partition(joint, inputs, **kwargs)

    def uuid(self) -> Optional[str]:
        return self._key

    def __reduce__(self) -> Any:
        return (str, (self._key or "",))


def inductor_backend(
    partitioner: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    cache_key: Optional[str],
    dispatch: Callable[..., Callable],
    config_patches: dict[str, Any],
    cacheable: dict[str, str],
) -> Callable[[fx.GraphModule, Sequence[Any]], Callable]:
    """Inductor's whole pipeline (its decompositions, joint passes and caches) with our partitioner and dispatch."""
    from torch._inductor.compile_fx import compile_fx

    patches = {**config_patches, **_deterministic(), "custom_partitioner_fn": _Partitioner(partitioner, cache_key)}
    if cacheable:
        known = torch._inductor.config.unsafe_marked_cacheable_functions
        patches["unsafe_marked_cacheable_functions"] = {**known, **cacheable}

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        with _backward_without_autocast():
            return compile_fx(gm, example_inputs, inner_compile=dispatch, config_patches=patches)

    return backend


def inductor_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable:
    """Inductor on one ATen program that AOTAutograd has made."""
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner(gm, example_inputs, **kwargs)


def inductor_compile_region(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
    """Inductor on a part of an ATen program, as a function of one list. Without CUDA graphs."""
    from torch._guards import TracingContext, detect_fake_mode, tracing

    patches = {"triton.cudagraphs": False, **_deterministic()}
    with tracing(TracingContext(detect_fake_mode(example_inputs))), torch._inductor.config.patch(patches):
        return inductor_compile(gm, example_inputs)


def _deterministic() -> dict[str, bool]:
    """Inductor's option for kernels that are the same in every run, where deterministic algorithms are asked for: it
    does not choose them by timing. Torch 2.13 sets it with ``use_deterministic_algorithms``; earlier ones may not."""
    wanted = torch.are_deterministic_algorithms_enabled() and hasattr(torch._inductor.config, "deterministic")
    return {"deterministic": True} if wanted else {}


def size_hint(size: Any) -> int:
    """The value a size had when it was compiled, also where it is symbolic."""
    return int(number_hint(size))


def number_hint(number: Any) -> Any:
    """The value a number had when it was compiled, also where it is symbolic."""
    if isinstance(number, (int, float, bool)):
        return number
    hint = getattr(getattr(number, "node", None), "hint", None)
    kind = {torch.SymFloat: float, torch.SymBool: bool}.get(type(number), int)
    return kind(hint) if hint is not None else kind(1)


def aot_cache(enabled: bool) -> contextlib.AbstractContextManager:
    import torch._functorch.config

    return torch._functorch.config.patch(enable_autograd_cache=enabled)


def aot_cache_enabled() -> bool:
    import torch._functorch.config

    return bool(torch._functorch.config.enable_autograd_cache) and not torch._inductor.config.force_disable_caches


def compile_cache_dir() -> str:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def default_compile_cache_dir() -> str:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()


def outside_fake_mode() -> contextlib.AbstractContextManager:
    """While open, operations on real tensors run for real, also in the middle of a trace."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def defining_module(op: torch._ops.OpOverload) -> Optional[str]:
    """The module that must be imported for ``torch.ops`` to have this operator, or ``None`` if importing torch does."""
    from torch._library.custom_ops import OPDEFS

    if op.namespace == "prims" and op._schema.name.startswith("prims::inductor_"):
        return "torch._inductor.inductor_prims"
    definition = OPDEFS.get(op._schema.name)
    module = getattr(getattr(definition, "_init_fn", None), "__module__", None)
    return None if module == "__main__" else module


def no_node_metadata() -> contextlib.AbstractContextManager:
    from torch.fx.traceback import preserve_node_meta

    return preserve_node_meta(enable=False)


def cpp_compiler_problem() -> Optional[str]:
    """Why Inductor finds no C++ compiler on this machine, or ``None`` if it finds one."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return f"TorchInductor finds no C++ compiler: {str(error).splitlines()[0].rstrip('.')}."
    return None


# ----------------------------------------------------------------------------------------------------- distributed


def default_store() -> torch.distributed.Store:
    """The key-value store through which the ranks of the default process group found each other, on a connection of
    its own where torch can make one: waiting on it holds up nobody else."""
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def group_name(group: torch.distributed.ProcessGroup) -> str:
    return group.group_name


def group_text(name: str) -> str:
    """The members of a group, counted from its first: the same on all ranks for the groups of one mesh dimension."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        ranks = sorted(torch.distributed.get_process_group_ranks(_resolve_process_group(name)))  # type: ignore[arg-type]
    except (RuntimeError, ValueError, KeyError):
        return name
    steps = {b - a for a, b in zip(ranks, ranks[1:])}
    return f"{len(ranks)}x{steps.pop()}" if len(steps) == 1 else ",".join(str(rank - ranks[0]) for rank in ranks)
