"""Refuses modules whose parameters cannot be spread over ranks, before anything is changed."""

from collections.abc import Iterator
from typing import Any, Optional

import torch
from torch import nn

from lightning_thunder_strategy.distributed.schemes import Scheme


def refuse_unsupported(modules: list[tuple[str, nn.Module]], scheme: Scheme) -> None:
    """Raise ``TypeError`` for a module whose parameters cannot be spread, with the reason and what to do."""
    for name, module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"The module `{name}` ({type(module).__name__}) is TorchScript, whose parameters cannot be spread over "
                "ranks: pass the module it was scripted from."
            )
        if scheme.copies and getattr(module, "max_norm", None) is not None and hasattr(module, "weight"):
            raise TypeError(
                f"The module `{name}` ({type(module).__name__}) has max_norm={module.max_norm!r}, with which its "
                "forward edits its weight, and the edit would be lost with the gathered copy: leave max_norm out and "
                "renormalize the weight in `on_train_batch_end`, or use ThunderDDPStrategy."
            )
        if getattr(module, "sparse", None) is True and hasattr(module, "weight"):
            raise TypeError(
                f"The module `{name}` ({type(module).__name__}) has sparse=True, and sparse gradients cannot be "
                "averaged over ranks in the program: make it with sparse=False."
            )
        for parameter_name, parameter in module._parameters.items():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise TypeError(
                    f"The parameter `{name}.{parameter_name}` has no shape yet (a lazy module): call the module once "
                    "on an example batch before `fit`."
                )


def refuse_stale_references(modules: list[tuple[str, nn.Module]], replaced: dict[nn.Parameter, nn.Parameter]) -> None:
    """A list or attribute that still holds an old parameter would silently be left out of training."""
    if not replaced:
        return
    for module_name, module in modules:
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules", "_flat_weights"):
                continue
            if any(item in replaced for item in _held_parameters(value)):
                raise ValueError(
                    f"The attribute `{name}` of `{module_name or type(module).__name__}` holds a parameter that the "
                    "strategy replaces by its shard. Look the parameter up by its own attribute instead of keeping a "
                    "second reference, or make the attribute an nn.ParameterList."
                )


def _held_parameters(value: Any, seen: Optional[set[int]] = None) -> Iterator[nn.Parameter]:
    """Parameters in a value, in containers and in an optimizer."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    if isinstance(value, nn.Parameter):
        yield value
        return
    if isinstance(value, torch.optim.Optimizer):
        value = value.param_groups
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _held_parameters(item, seen)
