"""Breaks ATen operations down into torch's primitive ones (``prims``). Checked on torch 2.11 and 2.13."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from lightning_thunder_strategy.compiler import _torch_compat


def decomposed(
    function: Callable, inputs: Sequence[Any], keep: Collection[torch._ops.OpOverload] = ()
) -> fx.GraphModule:
    """``function`` as a program of primitive operations, in which casts and broadcasts are operations of their own.

    Args:
        function: Calls ATen operations, without side effects.
        inputs: A fake tensor or integer for each argument, fixed or symbolic.
        keep: Operations that stay as they are.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    fakes = [value for value in tree_leaves(list(inputs)) if isinstance(value, FakeTensor)]
    mode = fakes[0].fake_mode if fakes else FakeTensorMode()
    with mode, torch.no_grad():
        return make_fx(function, decomposition_table=_table(frozenset(keep)))(*inputs)


@lru_cache(maxsize=8)
def _table(keep: frozenset) -> Mapping[torch._ops.OpOverload, Callable]:
    from torch._decomp import decomposition_table

    return {op: function for op, function in decomposition_table.items() if op not in keep}


def at_hints(values: Any) -> Any:
    """The same fake tensors and numbers with the sizes that they had when the program was compiled, none symbolic.

    What is learnt about these adds no guard to the program.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()

    def fixed(value: Any) -> Any:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return _torch_compat.number_hint(value)
        if not isinstance(value, torch.Tensor):
            return value
        sizes, strides = ([_torch_compat.size_hint(n) for n in found] for found in (value.shape, value.stride()))
        with mode:
            return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)

    return tree_map(fixed, values)
