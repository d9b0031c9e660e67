"""Modules whose parameters have shapes and no values, so that models of any size can be planned in little memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_thunder_strategy.compiler._torch_hollow import hollow_like


def make_meta(root: nn.Module) -> None:
    """Put every parameter of ``root`` on the meta device. Tied parameters stay tied, attributes and hooks stay."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if parameter not in made:
                made[parameter] = _meta(parameter)
            module._parameters[name] = made[parameter]


def make_hollow(root: nn.Module) -> None:
    """Give every meta parameter of ``root``, or its shard, pages on the CPU that take no memory."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in made:
                made[parameter] = _filled(parameter)
            module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = hollow_like(buffer)


@contextmanager
def meta_parameters() -> Iterator[None]:
    """While open, parameters of modules go to the meta device as they are registered; initialising them is free."""
    register = nn.Module.register_parameter

    def register_parameter(self: nn.Module, name: str, param: Optional[nn.Parameter]) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta and not isinstance(param, DTensor):
            if "_lts_meta" not in param.__dict__:
                param._lts_meta = _meta(param)  # type: ignore[attr-defined] - one for all modules that share it
            self._parameters[name] = param._lts_meta  # type: ignore[attr-defined]

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _meta(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.is_meta:
        return parameter
    meta = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    return _like(parameter, meta)


def _filled(parameter: nn.Parameter) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return _like(parameter, hollow_like(parameter))
    local = DTensor.from_local(
        hollow_like(parameter.to_local().detach()),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return _like(parameter, local)


def _like(parameter: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
    made = nn.Parameter(value, parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def local(tensor: Any) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
