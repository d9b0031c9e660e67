"""A copy of a state on the CPU, which later training steps do not change."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_thunder_strategy.compiler._torch_dtensor import with_local


class SnapshotError(TypeError):
    """A state holds something that cannot be copied."""


def snapshot(state: Any) -> Any:
    """A copy of ``state`` with all tensors on the CPU; tensors that share memory do so in the copy too.

    Args:
        state: Nested dictionaries, lists and tuples of tensors, of which distributed ones stay distributed, and of
            other objects.

    Raises:
        SnapshotError: If an object in it cannot be copied.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    known: dict[int, Any] = {}  # as copy.deepcopy keeps it: the copy by the number of the original
    try:
        for value in tree_leaves(state):
            if isinstance(value, Tensor) and id(value) not in known:
                known[id(value)] = _copied(value.detach(), storages)
        return copy.deepcopy(state, known)
    except Exception as error:
        raise SnapshotError(f"Something in the checkpoint cannot be copied: {type(error).__name__}: {error}") from error


def _copied(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    if isinstance(tensor, DTensor):
        return with_local(tensor, _copied(tensor.to_local(), storages))
    lazy = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized  # their memory is not what they are
    if type(tensor) is not Tensor or lazy or tensor.layout != torch.strided or tensor.device.type == "meta":
        return tensor.clone() if tensor.device.type in ("cpu", "meta") else tensor.cpu()
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = torch.UntypedStorage(storage.nbytes()).copy_(storage)
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(storages[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
