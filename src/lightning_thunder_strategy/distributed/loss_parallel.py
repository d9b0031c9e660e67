"""Cross-entropy of logits that tensor-parallel ranks have parts of, without gathering them.

With parts ``z_r`` of one row's logits, their largest value ``m`` and target ``t``, the loss is
``m + log(sum_r sum(exp(z_r - m))) - z[t]``: each row takes a maximum and two sums over the ranks, in place of all
logits. See https://arxiv.org/abs/1909.08053, section 3.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lightning_thunder_strategy.compiler._torch_fakes import run_on_fakes
from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.events import first_line
from lightning_thunder_strategy.compiler.module_path import path_name
from lightning_thunder_strategy.compiler.pattern_parts import cast_source, change_between, is_op, tensor_of
from lightning_thunder_strategy.compiler.trace import Decision, Trace
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.distributed.tensor_collectives import join_logits, largest_of_ranks, sum_over_ranks

_SIGNATURE = inspect.signature(F.cross_entropy)


def cross_entropy_of_parts(
    part: Tensor, target: Tensor, ignore_index: int, reduction: str, label_smoothing: float, dtype: torch.dtype,
    size: int, rank: int, group: str,
) -> Tensor:  # fmt: skip
    """``F.cross_entropy`` of logits whose columns are spread over ranks. Computed in float32, or float64 for such.

    Args:
        part: ``[rows, classes / size]``, this rank's columns.
        target: ``[rows]``, class numbers among all. One that is no class gives NaN.
        ignore_index: Rows with this target count for nothing.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: How much of the target is spread over all classes.
        dtype: The type of the result.
        size: How many ranks.
        rank: Which of them this one is.
        group: Their process group.
    """
    wide = part if part.dtype == torch.float64 else part.float()
    columns = wide.shape[-1]
    largest = largest_of_ranks(wide.detach().amax(-1), group)
    own = torch.arange(columns, device=part.device) == (target - rank * columns).unsqueeze(-1)
    sums = [(wide - largest.unsqueeze(-1)).exp().sum(-1), torch.where(own, wide, 0).sum(-1)]
    sums += [wide.sum(-1)] if label_smoothing else []
    total, chosen, *rest = sum_over_ranks(torch.stack(sums), group).unbind(0)
    logarithm = largest + total.log()
    losses = logarithm - chosen
    if rest:
        losses = (1 - label_smoothing) * losses + label_smoothing * (logarithm - rest[0] / (columns * size))
    counts = target != ignore_index
    losses = torch.where((target >= 0) & (target < columns * size), losses, torch.nan)
    losses = torch.where(counts, losses, 0)
    if reduction == "none":
        return losses.to(dtype)
    return (losses.sum() / counts.sum() if reduction == "mean" else losses.sum()).to(dtype)


@dataclass(frozen=True)
class LossParallel(Transform):
    """Computes losses from this rank's part of the logits, where a plan says ``colwise_loss_parallel``.

    The entry's linear gathers its output. Where what follows leads to ``F.cross_entropy`` row by row, that is done on
    the part instead, and nothing is gathered unless something else reads the logits.
    """

    @property
    def functions(self) -> dict[str, str]:
        return {f"{cross_entropy_of_parts.__module__}.{cross_entropy_of_parts.__qualname__}": "1"}

    def acquired(self, trace: Trace) -> None:
        assert trace.graph_module is not None
        for program in _programs(trace.graph_module):
            joined = program.graph.find_nodes(op="call_function", target=join_logits)
            reasons = dict.fromkeys(joined, "no call of F.cross_entropy in this program reads them")
            split: set[fx.Node] = set()
            behind = _behind(joined)
            for loss in program.graph.find_nodes(op="call_function", target=F.cross_entropy) if joined else ():
                path, reason = _path(loss, behind)
                reason = reason or (_split(loss, path) if path else None)
                if path and reason is None:
                    split.add(path[-1])
                elif path:
                    reasons[path[-1]] = reason or ""
            for node in joined:
                trace.decisions.append(_decision(node, node in split, reasons[node]))
                if node in split and not node.users:
                    program.graph.erase_node(node)
            if split and program is not trace.graph_module:
                program.recompile()


def _decision(node: fx.Node, split: bool, reason: str) -> Decision:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    name = path_name(stack[-1][0]) if stack else node.name
    what = f"{node_value(node).shape[-1]} logits on {node.args[2]} ranks"
    if not split:
        return Decision(name, what, "gathered", reason)
    others = sorted({getattr(user.target, "__name__", str(user.target)) for user in node.users})
    also = f"and gathered for others that read them ({', '.join(others)})" if others else ""
    return Decision(name, what, "loss of the parts", also)


# ------------------------------------------------------------------------------------------------- finds what to split


def _behind(joined: list[fx.Node]) -> set[fx.Node]:
    """What is computed from logits, and they."""
    found: set[fx.Node] = set()
    pending = [*joined]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.users
    return found


def _path(loss: fx.Node, behind: set[fx.Node]) -> tuple[list[fx.Node], Optional[str]]:
    """From the loss's input back to where logits are joined, and why the loss cannot be computed of parts, if so.

    Nothing, if the loss does not read logits. Of several ways back the first is taken.
    """
    path: list[fx.Node] = []
    reason = _options(loss)
    current = _arguments(loss)["input"]
    while current in behind:
        path.append(current)
        if current.target is join_logits:
            return path, reason or change_between(loss, path, modes=False)
        source = next(value for value in current.all_input_nodes if value in behind)
        reason = reason or _step(current, source)
        current = source
    return [], None


def _arguments(loss: fx.Node) -> dict[str, Any]:
    given = _SIGNATURE.bind(*loss.args, **loss.kwargs)
    given.apply_defaults()
    return given.arguments


def _options(loss: fx.Node) -> Optional[str]:
    given = _arguments(loss)
    logits, target = tensor_of(given["input"]), tensor_of(given["target"])
    if logits is None or target is None:
        return "the loss's logits or targets are no tensors of the program"
    if logits.dim() != 2:
        return f"the loss's logits have {logits.dim()} dimensions: flatten all but the last"
    if target.is_floating_point():
        return "the loss's targets are probabilities"
    if given["weight"] is not None:
        return "the loss weighs the classes"
    if given["size_average"] is not None or given["reduce"] is not None:
        return "the loss uses the deprecated size_average or reduce"
    return None


def _step(node: fx.Node, source: fx.Node) -> Optional[str]:
    """Why an operation between logits and loss does not treat each row of logits by itself, class by class."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    if is_op(node, "split") or is_op(node, "chunk"):
        return None if _dim_is_first(node) else f"the logits are cut along another dimension than rows ({name})"
    if name == "getitem":
        return _taken(node)
    before, after = tensor_of(source), tensor_of(node)
    if before is None or after is None or before.dim() == 0 or after.dim() == 0:
        return f"the logits go through {name}"
    classes = before.shape[-1]
    if any(is_op(node, op) for op in ("view", "reshape", "flatten", "contiguous")):
        kept = isinstance(classes, int) and after.shape[-1] == classes
        return None if kept else f"the logits are reshaped across rows ({name})"
    numbers = all(value is source or isinstance(value, (int, float)) for value in node.args)
    if cast_source(node) is not None or is_op(node, "tanh"):
        return None
    return None if numbers and (is_op(node, "mul") or is_op(node, "div")) else f"the logits go through {name}"


def _dim_is_first(node: fx.Node) -> bool:
    dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
    return dim == 0 and all(not isinstance(value, fx.Node) for value in node.args[1:])


def _taken(node: fx.Node) -> Optional[str]:
    """Why an index takes more than some rows."""
    source, index = node.args
    before = tensor_of(source)
    if before is None:
        return None if isinstance(index, int) else "a part of the logits is taken by an index that is no number"
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [item for item in items if not isinstance(item, fx.Node)]:
        at = next(place for place, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (before.dim() - len(items) + 1)
    rows, last = items[: before.dim() - 1], items[before.dim() - 1 :]
    whole = last in ([], [slice(None)])
    known = all(isinstance(item, (int, slice)) for item in rows)
    return None if whole and known and before.dim() > 1 else "a part of each row of logits is taken"


# ----------------------------------------------------------------------------------------------------------- splits it


def _split(loss: fx.Node, path: list[fx.Node]) -> Optional[str]:
    """Compute the loss of this rank's part: what leads to it once more, on the part. Why not, if that fails."""
    joined = path[-1]
    part, _, size, rank, group = joined.args
    local: dict[fx.Node, fx.Node] = {joined: part}  # type: ignore[dict-item]
    for node, source in zip(reversed(path[:-1]), reversed(path)):
        with loss.graph.inserting_after(node):
            local[node] = made = _on_part(node, source, local[source], size)
        error = _compute(made)
        if error is not None:
            for other in [local[node] for node in path[:-1] if node in local]:
                loss.graph.erase_node(other)
            return f"{node.target} fails on a part of them: {first_line(error)}"
    given = _arguments(loss)
    loss.args = (local[path[0]], given["target"], given["ignore_index"], given["reduction"], given["label_smoothing"])
    loss.args += (node_value(loss).dtype, size, rank, group)
    loss.kwargs, loss.target = {}, cross_entropy_of_parts
    for node in path[:-1]:
        if not node.users:
            loss.graph.erase_node(node)
    return None


def _on_part(node: fx.Node, source: fx.Node, part: fx.Node, size: Any) -> fx.Node:
    args, kwargs = [part if value is source else value for value in node.args], dict(node.kwargs)
    if any(is_op(node, op) for op in ("view", "reshape")):
        columns = node_value(source).shape[-1] // size
        args = [*args[:-1], _with_columns(args[-1], columns)] if len(args) > 1 else args
        kwargs = {key: _with_columns(item, columns) for key, item in kwargs.items()}
    made = node.graph.create_node(node.op, node.target, tuple(args), kwargs)
    made.meta = {key: value for key, value in node.meta.items() if key not in ("example_value", "val")}
    return made


def _compute(node: fx.Node) -> Optional[Exception]:
    """Note an operation's value; or what goes wrong."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return getattr(args[0], node.target)(*args[1:], **kwargs)  # type: ignore[arg-type]

    values, options = fx.node.map_arg((node.args, node.kwargs), node_value)
    try:
        node.meta["example_value"] = run_on_fakes(run if node.op == "call_method" else node.target, values, options)  # type: ignore[arg-type]
    except Exception as error:
        return error
    return None


def _with_columns(shape: Any, columns: int) -> Any:
    """The last size of a shape, as the part's number of columns; -1 finds it by itself."""
    if isinstance(shape, (tuple, list, torch.Size)):
        return (*shape[:-1], _with_columns(shape[-1], columns))
    return columns if isinstance(shape, int) and shape != -1 else shape


def _programs(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """A program and those inside it, such as regions that are checkpointed."""
    seen: set[int] = set()
    for module in gm.modules():
        if isinstance(module, fx.GraphModule) and id(module.graph) not in seen:
            seen.add(id(module.graph))
            yield module
