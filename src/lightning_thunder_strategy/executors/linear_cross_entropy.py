"""Finds a linear layer whose only use is a cross-entropy loss, and computes the two in chunks of rows.

With logits ``z = x W^T + b`` of one row, target ``t`` and softmax ``p``, the loss is ``logsumexp(z) - z[t]`` and its
gradient with respect to ``z`` is ``p - onehot(t)``. Rows are independent, so the loss and the gradients of ``x``, ``W``
and ``b`` can be added up chunk by chunk: all logits are never held at once. The gradients are computed in the forward,
for a gradient of one of the loss, and scaled in the backward.
"""

import inspect
from collections.abc import Callable
from typing import Any, Optional, Union

import torch
import torch.nn.functional as F
from torch import fx

from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.pattern_parts import change_between
from lightning_thunder_strategy.executors.base import Replacement
from lightning_thunder_strategy.executors.registered import is_call_of

_SIGNATURE = inspect.signature(F.cross_entropy)
_KEEP_ROWS = ("view", "reshape", "flatten", "contiguous", "float", "to")

Rows = Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor, bool], torch.Tensor]
"""Takes the logits of some rows (which it may overwrite), targets, the ignored target, the factor of the gradient and
whether to compute that. Returns the sum of the losses, and has put the gradient of the logits in their place."""


def find(node: fx.Node, function: Callable, *options: Any) -> Union[Replacement, str]:
    """How ``function`` can stand for a loss and the linear layer before it, or why not.

    Args:
        node: A call of ``F.cross_entropy``.
        function: Called with ``x``, ``weight``, ``bias``, the index that is taken of the logits or ``None``, targets,
            ``ignore_index``, ``reduction``, the type of the logits, the type of the loss, whether gradients are wanted,
            and ``options``.
        options: Further arguments.
    """
    given = _SIGNATURE.bind(*node.args, **node.kwargs)
    given.apply_defaults()
    loss = given.arguments
    reason = _options(loss) or _target(loss["target"], node_value(node))
    if reason is not None:
        return reason
    path: list[fx.Node] = []
    index: Any = None
    current = loss["input"]
    if not isinstance(current, fx.Node) or node_value(current) is None or node_value(current).dim() != 2:
        return "its logits are not a matrix of rows: flatten all dimensions but the last"
    classes = node_value(current).shape[-1]
    while not is_call_of(current, F.linear):
        reason = _step(current, classes)
        if reason is not None:
            return reason
        if is_call_of_getitem(current):
            if index is not None:
                return "a part of a part of its logits is taken"
            index = current.args[1]
        elif index is not None:
            return "its logits are reshaped before a part of them is taken"
        path.append(current)
        current = current.args[0]  # type: ignore[assignment]
    path.append(current)
    used = next((item for item in path if len(item.users) > 1), None)
    if used is not None:
        others = sorted({str(user.target) for user in used.users if user not in (*path, node)})
        return f"the logits are used elsewhere too ({', '.join(others)})"
    edited = change_between(node, path, modes=False)
    if edited is not None:
        return edited
    x, weight, bias = (*current.args, *([None] * (3 - len(current.args))))
    weight, bias = current.kwargs.get("weight", weight), current.kwargs.get("bias", bias)
    logits = node_value(current)
    if logits.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        return f"its logits are {logits.dtype}: gradients would underflow before the loss is scaled"
    wanted = bool(logits.requires_grad and node_value(node).requires_grad)
    values = (x, weight, bias, index, loss["target"], loss["ignore_index"], loss["reduction"], logits.dtype)
    return Replacement(function, (*values, node_value(node).dtype, wanted, *options), covers=tuple(reversed(path)))


def find_loss(node: fx.Node, function: Callable) -> Union[Replacement, str]:
    """How ``function`` can stand for a loss alone, or why not.

    Args:
        node: A call of ``F.cross_entropy``.
        function: Called with logits, targets, ``ignore_index``, ``reduction``, the type of the loss and whether
            gradients are wanted.
    """
    given = _SIGNATURE.bind(*node.args, **node.kwargs)
    given.apply_defaults()
    loss = given.arguments
    reason = _options(loss) or _target(loss["target"], node_value(node))
    if reason is not None:
        return reason
    logits = node_value(loss["input"]) if isinstance(loss["input"], fx.Node) else None
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2:
        return "its logits are not a matrix of rows: flatten all dimensions but the last"
    if logits.dtype == torch.float16:
        return "its logits are torch.float16: gradients would underflow before the loss is scaled"
    if not isinstance(logits.shape[1], int) or logits.shape[1] == 0:
        return f"it has {logits.shape[1]} classes, and the kernel takes 1 or more, known in advance"
    wanted = bool(logits.requires_grad and node_value(node).requires_grad)
    values = (loss["input"], loss["target"], loss["ignore_index"], loss["reduction"], node_value(node).dtype, wanted)
    return Replacement(function, values)


def is_call_of_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _options(loss: dict[str, Any]) -> Optional[str]:
    if loss["weight"] is not None:
        return "it weighs the classes"
    if loss["label_smoothing"] != 0.0:
        return f"label_smoothing={loss['label_smoothing']}, and it takes none"
    if loss["size_average"] is not None or loss["reduce"] is not None:
        return "it uses the deprecated size_average or reduce"
    return (
        None if loss["reduction"] in ("mean", "sum") else f"reduction={loss['reduction']!r}, and it takes mean and sum"
    )


def _target(target: Any, loss: Any) -> Optional[str]:
    value = node_value(target) if isinstance(target, fx.Node) else None
    if value is None or loss is None:
        return "the types of its arguments are not known"
    return "its targets are probabilities" if value.is_floating_point() else None


def _step(node: fx.Node, classes: Any) -> Optional[str]:
    """Why an operation between the linear layer and the loss is not one that leaves each row of logits as it is."""
    value = node_value(node)
    known = node.op == "call_method" and node.target in _KEEP_ROWS
    if is_call_of_getitem(node):
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        source = node_value(node.args[0])  # type: ignore[arg-type]
        dims = source.dim() if isinstance(source, torch.Tensor) else 0
        known = len(index) < dims and all(isinstance(item, slice) for item in index)
    if not known or not isinstance(node.args[0], fx.Node) or not isinstance(value, torch.Tensor):
        name = getattr(node.target, "__name__", str(node.target))
        return f"its logits do not come straight from a linear layer, but from {name}"
    if value.dim() == 0 or value.shape[-1] != classes or not value.is_floating_point():
        return "its logits are reshaped across rows"
    if value.device != node_value(node.args[0]).device:
        return "its logits are moved to another device"
    return None


def arguments(
    x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], index: Any, target: torch.Tensor,
    logits: torch.dtype, wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor], torch.Tensor]:  # fmt: skip
    """The rows, parameters and targets that a chunked loss works on: as the linear layer would have cast them."""
    x, weight, bias = (value if value is None else value.to(logits) for value in (x, weight, bias))
    if not wanted:
        x, weight, bias = (value if value is None else value.detach() for value in (x, weight, bias))
    x = x if index is None else x[index]
    return x.reshape(-1, x.shape[-1]), weight, bias, target


def loss_and_gradients(
    rows: Rows, x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], target: torch.Tensor,
    ignore_index: int, mean: bool, chunk_rows: int, needs: list[bool],
) -> list[torch.Tensor]:  # fmt: skip
    """The loss in float32 (float64 for such), and the gradients of ``x``, ``weight`` and ``bias`` that are needed.

    Args:
        rows: Computes one chunk.
        x: ``[rows, features]``.
        weight: ``[classes, features]``.
        bias: ``[classes]``.
        target: ``[rows]``, class numbers.
        ignore_index: Rows with this target count for nothing.
        mean: Whether to divide by the number of other rows.
        chunk_rows: How many rows of logits exist at once.
        needs: Which gradients. Others are empty.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    count, factor = count_and_factor(target, ignore_index, mean, wide)
    loss = torch.zeros((), dtype=wide, device=x.device)
    shapes = [shape if need else (0,) for shape, need in zip((x.shape, weight.shape, weight.shape[:1]), needs)]
    grad_x = torch.empty(shapes[0], dtype=x.dtype, device=x.device)
    grad_weight, grad_bias = (torch.zeros(shape, dtype=wide, device=x.device) for shape in shapes[1:])
    for start in range(0, x.shape[0], chunk_rows):
        part = x[start : start + chunk_rows]
        logits = F.linear(part, weight, bias)
        loss += rows(logits, target[start : start + chunk_rows], ignore_index, factor, any(needs))
        if needs[0]:
            torch.mm(logits, weight, out=grad_x[start : start + chunk_rows])
        if needs[1]:
            _add_product(grad_weight, logits.t(), part)
        if needs[2]:
            grad_bias += logits.sum(0, dtype=wide)
    return [loss / count if mean else loss, grad_x, grad_weight.to(x.dtype), grad_bias.to(x.dtype)]


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``total += a @ b``, on a GPU in one kernel: a product of its own would be as large as the weight."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def count_and_factor(
    target: torch.Tensor, ignore_index: int, mean: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many rows count, and what the gradient of the sum of their losses is multiplied with."""
    count = (target != ignore_index).sum().to(dtype)
    return count, 1 / count.clamp(min=1) if mean else torch.ones_like(count)


def refuse_second_derivative(name: str) -> None:
    """Raise in a backward whose own gradient is asked for: what it has saved does not depend on the inputs any more.

    Raises:
        NotImplementedError: If so.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name} has no second derivative, and the program takes a gradient of a gradient "
            "(torch.autograd.grad with create_graph=True): leave its executor out of `executors`."
        )


def define(name: str, rows: Rows) -> Callable[..., list[torch.Tensor]]:
    """The chunked loss with these rows as an operator of ``torch.library``, with its backward.

    Opaque, because passes that see the chunks could hold them all at once.
    """

    def compute(
        x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], target: torch.Tensor, ignore_index: int,
        mean: bool, chunk_rows: int, needs: list[bool],
    ) -> list[torch.Tensor]:  # fmt: skip
        return loss_and_gradients(rows, x, weight, bias, target, ignore_index, mean, chunk_rows, needs)

    operator = torch.library.custom_op(f"lts::{name}", compute, mutates_args=())

    @operator.register_fake
    def _(x, weight, bias, target, ignore_index, mean, chunk_rows, needs):  # type: ignore[no-untyped-def]
        torch._check(x.shape[0] == target.shape[0], lambda: f"{x.shape[0]} rows and {target.shape[0]} targets")
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        shapes = (x.shape, weight.shape, weight.shape[:1])
        gradients = [x.new_empty(shape if need else (0,)) for shape, need in zip(shapes, needs)]
        return [x.new_empty((), dtype=wide), *gradients]

    def setup(ctx: Any, inputs: tuple, output: list[torch.Tensor]) -> None:
        ctx.needs = inputs[-1]
        ctx.save_for_backward(*output[1:])

    def backward(ctx: Any, gradients: list[torch.Tensor]) -> tuple:
        refuse_second_derivative(name)
        scaled = [
            (value * gradients[0]).to(value.dtype) if need else None
            for value, need in zip(ctx.saved_tensors, ctx.needs)
        ]
        return (*scaled, None, None, None, None, None)

    operator.register_autograd(backward, setup_context=setup)
    return operator
