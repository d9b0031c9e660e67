"""What a step of torch's Adam, AdamW and SGD does to a param group, by one kernel for many parameters.

Torch's optimizers keep everything else: they make the state, and run closures and hooks. Formulas are those of
``torch.optim.Adam``, ``AdamW`` and ``SGD``.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor
from torch.optim import SGD as TorchSgd
from torch.optim import Adam as TorchAdam
from torch.optim import Optimizer

from lightning_thunder_strategy.optimizers.launch import launch
from lightning_thunder_strategy.optimizers.partition import local

Lists = Sequence[list[Any]]  # what an optimizer collects, one entry a parameter; some are empty
aten = torch.ops.aten


class Update:
    """The step of one class of optimizers.

    Attributes:
        optimizer: The class; its subclasses that change only options are taken too.
        fused_types: Types in which torch's fused kernel gives right values on a CPU.
    """

    optimizer: ClassVar[type[Optimizer]]
    fused_types: ClassVar[tuple[torch.dtype, ...]]

    def refuses(self, optimizer: Optimizer, group: dict[str, Any]) -> Optional[str]:
        """Why the options of a param group are left to torch, or ``None``."""
        for option in ("foreach", "fused"):
            if group.get(option) is not None:
                return f"{option}={group[option]!r} asks for an implementation of torch"
        for option in ("differentiable", "capturable"):
            if group.get(option):
                return f"{option}=True needs an implementation of torch"
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            return "a gradient scaler hands its scale to the optimizer"
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured"
        return None

    def columns(self, lists: Lists, group: dict[str, Any]) -> list[list[Tensor]]:
        """Parameters, gradients and states, as equally long lists, some of which are made here."""
        raise NotImplementedError

    def marks(self, lists: Lists) -> list[Any]:
        """For each parameter what those of one launch must have in common, if there is anything."""
        return []

    def triton(self, lists: Lists, columns: list[list[Tensor]], group: dict[str, Any]) -> None:
        """Update tensors of one kind by our kernel. Until it is launched nothing is changed."""
        raise NotImplementedError

    def fused(self, lists: Lists, columns: list[list[Tensor]], group: dict[str, Any]) -> None:
        """Update tensors of one kind by torch's fused kernel."""
        raise NotImplementedError

    def keep(self, optimizer: Optimizer, lists: Lists, columns: list[list[Tensor]]) -> None:
        """After the update: give the optimizer states that were made here."""


class Adam(Update):
    """``Adam`` and ``AdamW``."""

    optimizer = TorchAdam
    fused_types = (torch.float64, torch.float32, torch.bfloat16)  # torch's own step divides by 0 in float16

    def refuses(self, optimizer: Optimizer, group: dict[str, Any]) -> Optional[str]:
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            return "its betas are tensors"
        return super().refuses(optimizer, group)

    def columns(self, lists: Lists, group: dict[str, Any]) -> list[list[Tensor]]:
        parameters, gradients, averages, squares, highest, _ = lists
        return [parameters, gradients, averages, squares, *([highest] if group["amsgrad"] else [])]

    def triton(self, lists: Lists, columns: list[list[Tensor]], group: dict[str, Any]) -> None:
        counts = [local(step) for step in lists[-1]]
        steps = torch.stack(counts).double() + 1
        lr = _as_factor(group["lr"], steps)
        (beta1, beta2), weight_decay = group["betas"], group["weight_decay"]
        decoupled = group["decoupled_weight_decay"]
        factors = _table(steps, [
            -1.0 if group["maximize"] else 1.0,
            0.0 if decoupled else weight_decay,
            1 - lr * weight_decay if decoupled else 1.0,
            1 - beta1,
            beta2,
            1 - beta2,
            group["eps"],
            lr / (1 - beta1**steps),
            (1 - beta2**steps).sqrt(),
        ])  # fmt: skip
        launch("adam", columns, factors, AMSGRAD=group["amsgrad"])
        aten._foreach_add_.Scalar(counts, 1)

    def fused(self, lists: Lists, columns: list[list[Tensor]], group: dict[str, Any]) -> None:
        counts = [local(step) for step in lists[-1]]
        aten._foreach_add_.Scalar(counts, 1)
        function = aten._fused_adamw_ if group["decoupled_weight_decay"] else aten._fused_adam_
        states = columns if group["amsgrad"] else [*columns, []]
        beta1, beta2 = group["betas"]
        function(
            *states, [count.float() for count in counts], lr=float(group["lr"]), beta1=beta1, beta2=beta2,
            weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=group["amsgrad"], maximize=group["maximize"],
        )  # fmt: skip


class Sgd(Update):
    """``SGD``."""

    optimizer = TorchSgd
    fused_types = (
        torch.float64,
        torch.float32,
    )  # it does not update others, https://github.com/pytorch/pytorch/issues/191763

    def columns(self, lists: Lists, group: dict[str, Any]) -> list[list[Tensor]]:
        parameters, gradients, buffers = lists
        if group["momentum"] == 0:
            return [parameters, gradients]
        made = [torch.zeros_like(p) if held is None else held for p, held in zip(parameters, buffers)]
        return [parameters, gradients, made]

    def marks(self, lists: Lists) -> list[Any]:
        return [held is None for held in lists[2]]  # at its first step a buffer becomes the gradient

    def triton(self, lists: Lists, columns: list[list[Tensor]], group: dict[str, Any]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        like = torch.zeros(len(columns[0]), dtype=torch.float64, device=lr.device if isinstance(lr, Tensor) else "cpu")
        rows: list[Any] = [
            -1.0 if group["maximize"] else 1.0,
            _as_factor(group["weight_decay"], like),
            _as_factor(lr, like),
        ]
        if momentum != 0:
            new = like.new_tensor([float(held is None) for held in lists[2]])
            rows += [momentum * (1 - new), 1 - group["dampening"] * (1 - new), momentum]
        nesterov = bool(group["nesterov"])
        launch("sgd", columns, _table(like, rows), MOMENTUM=momentum != 0, NESTEROV=nesterov)

    def fused(self, lists: Lists, columns: list[list[Tensor]], group: dict[str, Any]) -> None:
        parameters, gradients, buffers = columns if group["momentum"] != 0 else [*columns, []]
        aten._fused_sgd_(
            parameters, gradients, buffers, weight_decay=float(group["weight_decay"]), momentum=group["momentum"],
            lr=float(group["lr"]), dampening=group["dampening"], nesterov=bool(group["nesterov"]),
            maximize=group["maximize"], is_first_step=bool(buffers) and lists[2][0] is None,
        )  # fmt: skip

    def keep(self, optimizer: Optimizer, lists: Lists, columns: list[list[Tensor]]) -> None:
        for parameter, buffer in zip(columns[0], columns[2] if len(columns) > 2 else ()):
            optimizer.state[parameter]["momentum_buffer"] = buffer


def _as_factor(value: Any, like: Tensor) -> Any:
    """A number that may be a tensor of one element."""
    if isinstance(value, Tensor):
        return local(value).detach().reshape(()).to(device=like.device, dtype=torch.float64)
    return value


def _table(like: Tensor, rows: Sequence[Any]) -> Tensor:
    """``[tensors, factors]`` from numbers and tensors of ``[tensors]``."""
    made = [row.expand_as(like) if isinstance(row, Tensor) else torch.full_like(like, row) for row in rows]
    return torch.stack(made, dim=1)
