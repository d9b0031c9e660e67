"""Brings a model into being without ever holding the whole of it on a rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from lightning_thunder_strategy.distributed.schemes import Scheme, place_like, whole

Place = Callable[[nn.Parameter], nn.Parameter]


def materialize(root: nn.Module, device: torch.device, place: Optional[Place]) -> dict[nn.Parameter, nn.Parameter]:
    """Give parameters and buffers on the meta device storage and initial values, one module at a time.

    The values come from the module's ``reset_parameters``, or from the ``_init_weights`` of a parent (the convention
    of Hugging Face models). Parameters are made whole, initialised, and spread by ``place`` before the next module's.

    Returns:
        Old parameter to new.

    Raises:
        TypeError: If a module has neither; the message names it.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    modules = dict(root.named_modules())
    for name, module in modules.items():
        pending = [key for key, value in module._parameters.items() if value is not None and value.is_meta]
        buffers = [key for key, value in module._buffers.items() if value is not None and value.is_meta]
        fresh = [key for key in pending if module._parameters[key] not in made]
        for key in pending:
            if key not in fresh:
                module._parameters[key] = made[module._parameters[key]]  # tied to one that is done
        if not fresh and not buffers:
            continue
        olds = {key: module._parameters[key] for key in fresh}
        for key in fresh:
            old = olds[key]
            new = nn.Parameter(torch.empty_like(old, device=device), old.requires_grad)
            new.__dict__.update(old.__dict__)
            module._parameters[key] = new
        for key in buffers:
            module._buffers[key] = torch.empty_like(module._buffers[key], device=device)
        with torch.no_grad(), torch.device(device):
            _initializer(name, module, modules)()
        for key in fresh:
            new = module._parameters[key]
            made[olds[key]] = module._parameters[key] = place(new) if place is not None else new
    return made


def _initializer(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> Callable[[], Any]:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        return reset
    parents = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)] + [""]
    for parent in parents:
        initialize = getattr(modules.get(parent), "_init_weights", None)
        if callable(initialize):
            return lambda: initialize(module)
    raise TypeError(
        f"The module `{name or type(module).__name__}` ({type(module).__name__}) has parameters or buffers on the meta "
        "device and no `reset_parameters` method that could give them values: add one, or create the model without "
        "`empty_init=True` and without `torch.device('meta')`."
    )


@contextmanager
def sharded_construction(scheme: Scheme) -> Iterator[None]:
    """While open, each submodule's parameters are spread as soon as the submodule is assigned to its parent.

    A module runs its own initialisation in full before that, so values are those of ordinary construction. Edits that
    come later (``model.apply(init)``) are made on the whole parameter, one parameter at a time.
    """
    edits = _WholeParameterEdits()

    def place(parent: nn.Module, name: str, child: Optional[nn.Module]) -> Optional[nn.Module]:
        if child is not None:
            placed: dict[nn.Parameter, nn.Parameter] = {}
            with edits.paused():
                for module in child.modules():
                    for key, parameter in module._parameters.items():
                        if parameter is None or isinstance(parameter, DTensor) or parameter.is_meta:
                            continue
                        if parameter not in placed:
                            placed[parameter] = scheme.place(parameter)
                        module._parameters[key] = placed[parameter]
        return child

    hook = register_module_module_registration_hook(place)
    try:
        with edits:
            yield
        edits.flush()
    finally:
        hook.remove()


class _WholeParameterEdits(TorchFunctionMode):
    """Runs functions on distributed parameters on their whole values, and writes the shards back afterwards.

    Only one function's parameters are held whole at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._whole: dict[nn.Parameter, Tensor] = {}
        self._paused = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.flush()
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Optional[dict] = None) -> Any:
        kwargs = kwargs or {}
        used = [
            value
            for value in (*args, *kwargs.values())
            if isinstance(value, DTensor) and isinstance(value, nn.Parameter)
        ]
        if self._paused or not used or _is_about_the_parameter(func):
            return func(*args, **kwargs)
        self._paused += 1
        try:
            if not all(parameter in self._whole for parameter in used):
                self.flush()
                for parameter in used:
                    with torch.no_grad():
                        value = whole(parameter.detach()).clone()
                    self._whole[parameter] = value.requires_grad_(parameter.requires_grad)
            replaced = [self._swap(value) for value in args]
            result = func(*replaced, **{key: self._swap(value) for key, value in kwargs.items()})
            for parameter, value in self._whole.items():
                if result is value:
                    return parameter
            return result
        finally:
            self._paused -= 1

    def _swap(self, value: Any) -> Any:
        return self._whole.get(value, value) if isinstance(value, nn.Parameter) else value

    def flush(self) -> None:
        """Write the shards of the parameters that were held whole."""
        with torch.no_grad():
            for parameter, value in self._whole.items():
                placed = place_like(value.detach(), parameter)
                parameter.to_local().copy_(placed.to_local())
        self._whole.clear()


_ABOUT = ("requires_grad", "requires_grad_", "shape", "size", "numel", "dtype", "device", "ndim", "dim", "grad", "is_meta",
          "layout", "__hash__", "__repr__", "is_leaf", "grad_fn", "register_hook", "names", "is_cuda", "stride")  # fmt: skip


def _is_about_the_parameter(func: Callable) -> bool:
    """Functions that read or set what is not a value."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(func, "__self__", None)
        name = getattr(owner, "__name__", "")
    return name in _ABOUT
