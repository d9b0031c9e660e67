"""Names of AOTAutograd and its partitioner which torch does not document. Checked on torch 2.11 and 2.13."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
import torch.distributed
from torch import fx


def aot_backend(
    forward: Callable, backward: Callable, inference: Callable, partition: Callable
) -> Callable[[fx.GraphModule, Sequence[Any]], Callable]:
    """AOTAutograd without decompositions: operators stay as eager PyTorch runs them."""
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=forward, bw_compiler=backward, inference_compiler=inference, partition_fn=partition
    )

    def compile_program(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        with backward_without_autocast():
            return backend(gm, example_inputs)

    return compile_program


def backward_without_autocast() -> contextlib.AbstractContextManager:
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


def mark_save(node: fx.Node) -> None:
    """Ask the partitioner not to compute ``node`` again in the backward."""
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def unmark(node: fx.Node) -> None:
    """Leave it to the partitioner again whether ``node`` is computed again."""
    node.meta.pop("recompute", None)
    node.meta.pop("ac_graph_id", None)


def is_marked_recompute(node: fx.Node) -> bool:
    """Whether the partitioner has been asked to compute ``node`` again."""
    from torch.utils.checkpoint import CheckpointPolicy

    return node.meta.get("recompute") == CheckpointPolicy.MUST_RECOMPUTE


def has_policy(node: fx.Node) -> bool:
    """Whether the partitioner has been told whether to compute ``node`` again."""
    return node.meta.get("recompute") is not None


def is_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd made ``node`` of a joint program while it derived the backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


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
