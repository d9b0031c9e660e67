"""Gradient accumulation that communicates once for each optimizer step.

While micro-batches accumulate, gradients stay this rank's own, whole. The last micro-batch's program adds them to its
own gradient before it reduces; where a step is not one program they are reduced after its backward instead.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

_WAITING = "_lts_waiting"  # attribute of a parameter: the gradient that the next backward adds to its own
_HOOKED = "_lts_hooked"  # attribute of a parameter: it has hooks
_ADDED = "_lts_added"  # attribute of such a gradient: a backward that runs uncompiled has added it


class Accumulation:
    """How the gradients of the modules of one root are treated now. Plain attributes, so that Dynamo can guard on them.

    Attributes:
        local: Whether backwards leave gradients as they are on this rank.
        held: Whether the user has asked not to communicate.
        waiting: Whether micro-batches have left gradients on their ranks since the last optimizer step.
        unreduced: Whether they are still there.
    """

    def __init__(self) -> None:
        self.local = False
        self.held = False
        self.waiting = False
        self.unreduced = False

    @contextmanager
    def hold(self) -> Iterator[None]:
        """While open, programs do not reduce gradients, and backwards do not either."""
        before = self.held, self.local
        self.held = self.local = True
        try:
            yield
        finally:
            self.held, self.local = before

    def begin(self, root: nn.Module, add: bool) -> bool:
        """A step or call that may be differentiated begins.

        Args:
            root: The module.
            add: Whether it is one program whose one backward may take over the gradients that wait.

        Returns:
            Whether its backward takes them over.
        """
        parameters = stored_parameters(root)
        give_back(parameters)
        if self.waiting and not self.held and all(parameter.grad is None for parameter in parameters):
            self.waiting = False
        for parameter in parameters:
            if bool(parameter._backward_hooks) is not reduces_always(parameter):
                setattr(parameter, _HOOKED, bool(parameter._backward_hooks))
        add = add and self.waiting and not self.held
        self.local = self.held or (self.waiting and not add)
        if self.held:
            self.waiting = self.unreduced = True
        if add:
            for parameter in parameters:
                if parameter.grad is not None and not reduces_always(parameter):
                    setattr(parameter, _WAITING, local_gradient(parameter.grad))
                    parameter.grad = None
        return add

    def after_backward(self, root: nn.Module, mesh: DeviceMesh) -> None:
        """A backward has ended: reduce what its program has not (collectives), unless communication is held."""
        parameters = stored_parameters(root)
        added = [p for p in parameters if p.grad is not None and hasattr(p, _WAITING)]
        for parameter in added:
            delattr(parameter, _WAITING)
        give_back(parameters)
        if self.held:
            self.waiting = self.unreduced = True
        elif self.waiting:
            reduce_gradients(parameters, [id(parameter) for parameter in added], mesh)
            self.unreduced = False

    def settle(self, root: nn.Module, mesh: DeviceMesh) -> None:
        """An optimizer is about to take the gradients: reduce them, if no backward has (collectives)."""
        if self.unreduced:
            parameters = stored_parameters(root)
            give_back(parameters)
            reduce_gradients(parameters, [], mesh)
            self.unreduced = False

    def done(self, root: nn.Module) -> None:
        """An optimizer has taken the gradients."""
        give_back(stored_parameters(root))
        self.waiting = self.unreduced = False
        self.local = self.held


def stored_parameters(root: nn.Module) -> list[nn.Parameter]:
    """The parameters as they are stored, each once, in the order of the modules."""
    found: dict[nn.Parameter, None] = {}
    for module in root.modules():
        found.update((p, None) for p in module._parameters.values() if isinstance(p, nn.Parameter) and p.requires_grad)
    return list(found)


def reduces_always(parameter: Tensor) -> bool:
    """Whether the gradient is reduced in each backward, because hooks are to see it reduced. Traced by Dynamo."""
    return getattr(parameter, _HOOKED, False)


def waiting_gradient(parameter: Tensor) -> Any:
    """The gradient that the next backward is to add to its own, or ``None``. Traced by Dynamo."""
    return getattr(parameter, _WAITING, None)


def give_back(parameters: Iterable[nn.Parameter]) -> None:
    """Gradients that no backward has taken over are gradients again."""
    for parameter in parameters:
        gradient = parameter.__dict__.pop(_WAITING, None)
        if gradient is not None and parameter.grad is None:
            parameter.grad = _as_gradient(gradient, parameter)


def local_gradient(gradient: Tensor) -> Tensor:
    """A gradient as a plain tensor of full size, of which the mean over the ranks is the gradient."""
    if not isinstance(gradient, DTensor):
        return gradient
    if any(placement.is_partial() for placement in gradient.placements):
        return gradient.to_local()
    return gradient.full_tensor()


def _as_gradient(local: Tensor, parameter: nn.Parameter) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    mesh = parameter.device_mesh
    return DTensor.from_local(local, mesh, [Partial("avg")] * mesh.ndim, run_check=False)


# ------------------------------------------------------------------------------------------------------ reduction


def reduce_gradients(parameters: Sequence[nn.Parameter], done: Sequence[int], mesh: DeviceMesh) -> None:
    """Average gradients over the ranks. Every rank calls it; one without a gradient that others have gives zero.

    Args:
        parameters: The same on every rank.
        done: Identities of those whose gradients are averaged.
        mesh: The ranks.
    """
    with torch.no_grad():
        _reduce([p for p in parameters if id(p) not in done and not reduces_always(p)], mesh)


def _reduce(due: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
    have = torch.tensor([float(_is_local(p)) for p in due], device=mesh.device_type)
    for group in mesh.get_all_groups() if due else ():
        torch.distributed.all_reduce(have, torch.distributed.ReduceOp.MAX, group=group)
    due = [p for p, anywhere in zip(due, have.tolist()) if anywhere]
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in due:
        if parameter.grad is None:
            zero = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            parameter.grad = _as_gradient(zero, parameter)
        if isinstance(parameter, DTensor):
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)  # type: ignore[union-attr]
        else:
            groups.setdefault(parameter.grad.dtype, []).append(parameter)
    for group in groups.values():
        _average([parameter.grad for parameter in group], mesh)  # type: ignore[misc]


def _is_local(parameter: nn.Parameter) -> bool:
    gradient = parameter.grad
    if isinstance(parameter, DTensor):
        return isinstance(gradient, DTensor) and gradient.placements != parameter.placements
    return gradient is not None


def _average(gradients: Sequence[Tensor], mesh: DeviceMesh) -> None:
    """Average plain tensors of one element type over the ranks, in place, with one collective."""
    with torch.no_grad():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        for group in mesh.get_all_groups():
            torch.distributed.all_reduce(flat, group=group)
        flat /= mesh.size()
        for gradient, values in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
            gradient.copy_(values.view_as(gradient))


# ------------------------------------------------------------------------------------------ what programs consist of


class _Unreduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.mesh = parameter.device_mesh
        return parameter.redistribute(placements=[Replicate()] * ctx.mesh.ndim).to_local()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor:  # type: ignore[override]
        if type(gradient) is Tensor:  # not while a program is made, which separates the gradients that it returns
            gradient = gradient.clone()  # may be another parameter's too, and the next micro-batch's is added in place
        return DTensor.from_local(gradient, ctx.mesh, [Partial("avg")] * ctx.mesh.ndim, run_check=False)


class _Adding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gathered: Tensor, waiting: Tensor) -> Tensor:
        ctx.save_for_backward(waiting)
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (waiting,) = ctx.saved_tensors
        if type(waiting) is Tensor:  # not while a program is made, in which each parameter is gathered once
            if getattr(waiting, _ADDED, False):
                return gradient, None
            setattr(waiting, _ADDED, True)
        return gradient + waiting, None


@torch.compiler.allow_in_graph
def gather_unreduced(parameter: DTensor) -> Tensor:
    """The whole of a sharded parameter. Its gradient stays whole, and this rank's own."""
    return _Unreduced.apply(parameter)


@torch.compiler.allow_in_graph
def adding_gradient(gathered: Tensor, waiting: Tensor) -> Tensor:
    """``gathered``, to whose gradient ``waiting`` is added."""
    return _Adding.apply(gathered, waiting)
