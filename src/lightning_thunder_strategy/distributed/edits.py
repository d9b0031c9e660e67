"""Notices edits of gathered parameters in code that runs uncompiled: they would be lost with the gathered copy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_thunder_strategy.transforms.refuse_lost_edits import LostEditError


class EditWatch:
    """Remembers gathered tensors by their version counters, without keeping their memory."""

    def __init__(self) -> None:
        self._counters: list[tuple[Tensor, int, str]] = []

    def add(self, gathered: Tensor, name: str) -> None:
        """From now on, an edit of ``gathered`` or a view of it is an error of :meth:`check`."""
        counter = gathered.detach()
        counter.data = counter.new_empty(0)  # shares the version counter, not the memory
        self._counters.append((counter, counter._version, name))

    @torch.compiler.disable
    def check(self) -> None:
        """Raise if a tensor was edited since it was added.

        Raises:
            LostEditError: Naming the parameter.
        """
        for counter, version, name in self._counters:
            if counter._version != version:
                raise LostEditError(name)
        self._counters.clear()


class _WatchData(TorchFunctionMode):
    """``parameter.data`` counts versions of its own: watch it too."""

    def __init__(self, watch: EditWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Optional[dict] = None) -> Any:
        if func == _SET_DATA and hasattr(args[0], _GATHERED):
            raise LostEditError(getattr(args[0], _GATHERED))
        result = func(*args, **(kwargs or {}))
        if func == _GET_DATA:
            tensor = next((t for t in (args[0], args[0]._base) if hasattr(t, _GATHERED)), None)
            if tensor is not None and getattr(tensor, _COPIED):
                self._watch.add(result, getattr(tensor, _GATHERED))
        return result


_GET_DATA, _SET_DATA = Tensor.data.__get__, Tensor.data.__set__
_GATHERED = "_lts_gathered"  # attribute of a gathered tensor: the name of the parameter
_COPIED = "_lts_copied"  # and whether it has memory of its own


@contextmanager
def watching_data(watch: Optional[EditWatch]) -> Iterator[None]:
    """While open, edits of ``parameter.data`` are noticed as well. Not for code that Dynamo reads."""
    if watch is None:
        yield
        return
    with _WatchData(watch):
        yield


@torch.compiler.disable
def gather_watched(
    gather: Callable[[Tensor], Tensor], parameter: Tensor, watch: EditWatch, name: str, copied: bool
) -> Tensor:
    """Gather a parameter in code that runs uncompiled, and watch the result.

    Args:
        gather: How.
        parameter: As it is stored.
        watch: Learns of edits.
        name: For the error.
        copied: Whether the result has memory of its own; else edits of values are kept, and only new ``data`` is lost.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode do not count versions
            gathered = gather(parameter)
    else:
        gathered = gather(parameter)
    for tensor in (gathered, gathered._base):  # a view has the base of what it views
        if tensor is not None:
            setattr(tensor, _GATHERED, name)
            setattr(tensor, _COPIED, copied)
    if copied:
        watch.add(gathered, name)
    return gathered
