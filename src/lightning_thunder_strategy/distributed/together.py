"""What ranks that compute one layer together must have in common: batches, random numbers, gradients of what each has
whole."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves

_TOLERANCE = 0.01  # relative; sums in another order differ by less, parts of a sum by more
_NOISE = 1e-5  # of the largest gradient: what is smaller may be nothing but rounding


class RanksDifferError(RuntimeError):
    """Ranks of one tensor-parallel group do not compute the same."""


def share_random_state(mesh: DeviceMesh) -> None:
    """Give the ranks of each tensor-parallel group the random numbers of its first, so that dropout is the same."""
    group = mesh.get_group("tensor")
    state = torch.get_rng_state().to(mesh.device_type)
    torch.distributed.broadcast(state, group=group, group_src=0)
    torch.set_rng_state(state.cpu())
    if mesh.device_type == "cuda":
        state = torch.cuda.get_rng_state().to(mesh.device_type)
        torch.distributed.broadcast(state, group=group, group_src=0)
        torch.cuda.set_rng_state(state.cpu())


def check_same_inputs(inputs: Any, mesh: DeviceMesh, what: str) -> None:
    """Raise unless all ranks of a tensor-parallel group were given equal tensors. Reads them from the device.

    Args:
        inputs: Arguments of a step.
        mesh: With the dimension ``tensor``.
        what: Their name in the message.

    Raises:
        RanksDifferError: If they differ, on all ranks of the group.
    """
    digest = hashlib.sha256()
    for value in tree_leaves(inputs):
        if isinstance(value, Tensor) and value.layout == torch.strided:
            digest.update(f"{tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes())
    group = mesh.get_group("tensor")
    digests: list[str] = [""] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(digests, digest.hexdigest(), group=group)
    if len(set(digests)) > 1:
        ranks = torch.distributed.get_process_group_ranks(group)
        raise RanksDifferError(
            f"{what}: the ranks {ranks} compute each layer together (tensor_parallel_size={len(ranks)}), and were "
            "given different batches. Leave the sampler to Lightning (use_distributed_sampler=True), or make it with "
            "`num_replicas` and `rank` of `strategy.distributed_sampler_kwargs`. If workers of the data loader draw "
            "random numbers, seed them alike on these ranks."
        )


def check_same_gradients(
    parameters: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str], mesh: DeviceMesh
) -> set[nn.Parameter]:
    """Raise if the gradient of a parameter that each rank has whole differs within a tensor-parallel group.

    Such a parameter belongs to a module that computes with a part of an activation, and that the plan does not name:
    each rank has a part of its gradient. Reads numbers from the device.

    Returns:
        Parameters that agree. Zero, infinite and missing gradients say nothing.

    Raises:
        RanksDifferError: Naming the parameters, on all ranks of the group.
    """
    whole = [p for p in parameters if isinstance(p, DTensor) and p.placements[0] == Replicate() and p.requires_grad]
    if not whole:
        return set()
    zero = torch.zeros((), device=mesh.device_type)
    norms = torch.stack([zero if p.grad is None else _norm(p.grad).to(zero) for p in whole])
    extremes = torch.cat([norms, -norms])
    torch.distributed.all_reduce(extremes, torch.distributed.ReduceOp.MAX, group=mesh.get_group("tensor"))
    largest, smallest = extremes.chunk(2)
    noise = torch.where(largest.isfinite(), largest, 0).max()
    differ = (largest + smallest > (_TOLERANCE * largest).clamp(min=_NOISE * noise)).tolist()
    found = [names.get(parameter, "?") for parameter, different in zip(whole, differ) if different]
    if found:
        raise RanksDifferError(
            f"The gradients of {', '.join(found[:5])} differ among the ranks that compute each layer together: each "
            "has only a part of them. The module computes with a part of an activation and is not in the plan: give it "
            "the entry 'replicated_with_grad_allreduce', or add what makes its input to the plan."
        )
    told = (largest.isfinite() & (largest > 0)).tolist()
    return {parameter for parameter, known in zip(whole, told) if known}


def _norm(gradient: Tensor) -> Tensor:
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local.detach().to(torch.float32).norm()
