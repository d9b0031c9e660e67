"""Brings a model into being without ever holding the whole of it on a rank."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_thunder_strategy.distributed.schemes import Scheme, place_like, whole

Place = Callable[[nn.Parameter], nn.Parameter]


def materialize(root: nn.Module, device: torch.device, place: Optional[Place]) -> dict[nn.Parameter, nn.Parameter]:
    """Give parameters and buffers on the meta device storage and initial values, one module at a time.

    The values come from the module's ``reset_parameters``, and then from the ``_init_weights`` of the nearest module
    around it that has one (the convention of Hugging Face and GPT models). Parameters are made whole, initialised, and
    spread by ``place`` before the next module's.

    Returns:
        Old parameter to new.

    Raises:
        TypeError: If a parameter or buffer is left without a value; the message names the module.
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
            new = nn.Parameter(_without_values(old, device), old.requires_grad)
            new.__dict__.update(old.__dict__)
            module._parameters[key] = new
        for key in buffers:
            module._buffers[key] = _without_values(module._buffers[key], device)
        with torch.no_grad(), torch.device(device):
            _initialize(name, module, modules)
        for key in fresh:
            new = module._parameters[key]
            made[olds[key]] = module._parameters[key] = place(new) if place is not None else new
    return made


def _without_values(like: Tensor, device: torch.device) -> Tensor:
    """An uninitialised tensor; NaN where it can be, to see what stays uninitialised."""
    with torch.no_grad():
        tensor = torch.empty_like(like, device=device, requires_grad=False)
        return tensor.fill_(float("nan")) if _can_be_nan(tensor) else tensor


def _can_be_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


def _initialize(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    around = [name, *(name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)), ""]
    shared = next((f for f in (getattr(modules[key], "_init_weights", None) for key in around) if callable(f)), None)
    if callable(reset):
        reset()
    if shared is not None:
        shared(module)
    tensors = [*module._parameters.items(), *module._buffers.items()]
    left = [key for key, value in tensors if value is not None and _can_be_nan(value) and bool(value.isnan().any())]
    if not (callable(reset) or shared is not None) or left:
        what = f"its `{left[0]}` stays without values" if left else "it has parameters or buffers without values"
        raise TypeError(
            f"The module `{name or type(module).__name__}` ({type(module).__name__}) was made on the meta device, and "
            f"{what}: give it a `reset_parameters` method that fills them, or create the model without "
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


class _Whole:
    """A distributed parameter that is held whole while something may edit it."""

    def __init__(self, parameter: nn.Parameter) -> None:
        with torch.no_grad():
            value = whole(parameter.detach()).clone()
        self.parameter = parameter
        self.value = value.requires_grad_(parameter.requires_grad)
        self.storage = value.untyped_storage().data_ptr()
        self.aliases: list[weakref.ref] = []  # tensors that share its memory

    def write_back(self) -> None:
        with torch.no_grad():
            self.parameter.to_local().copy_(place_like(self.value.detach(), self.parameter).to_local())

    def is_shared(self) -> bool:
        """Whether someone holds a tensor that shares its memory, such as ``parameter.data``, and may edit it yet."""
        return any(alias() is not None for alias in self.aliases)


class _WholeParameterEdits(TorchFunctionMode):
    """Runs functions on distributed parameters on their whole values, and writes the shards back afterwards.

    Only the parameters of one function are held whole at a time, and those of which somebody holds an alias.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[nn.Parameter, _Whole] = {}
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
        if self._paused or _is_about_the_parameter(func):
            return func(*args, **kwargs)
        used = [p for p in tree_leaves((args, kwargs)) if isinstance(p, DTensor) and isinstance(p, nn.Parameter)]
        self._paused += 1
        try:
            if not all(parameter in self._held for parameter in used):
                self.flush()
                for parameter in used:
                    if parameter not in self._held:
                        self._held[parameter] = _Whole(parameter)
            if used:
                args, kwargs = tree_map(self._swap, (args, kwargs))
            return self._noted(func(*args, **kwargs))
        finally:
            self._paused -= 1

    def _swap(self, value: Any) -> Any:
        held = self._held.get(value) if isinstance(value, nn.Parameter) else None
        return value if held is None else held.value

    def _noted(self, result: Any) -> Any:
        """The result of a function: the parameter in place of its whole value, and a note of what shares its memory."""
        if not self._held:
            return result
        for held in self._held.values():
            if result is held.value:
                return held.parameter
        for tensor in tree_leaves(result):
            if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage().data_ptr()
                for held in self._held.values():
                    if held.storage == storage:
                        held.aliases.append(weakref.ref(tensor))
        return result

    def flush(self) -> None:
        """Write the shards of the parameters that were held whole, and let go of those that nobody can edit."""
        for held in self._held.values():
            held.write_back()
        self._held = {parameter: held for parameter, held in self._held.items() if held.is_shared()}


_ABOUT = (
    "requires_grad", "requires_grad_", "shape", "size", "numel", "dtype", "device", "ndim", "dim", "grad", "is_meta",
    "layout", "__hash__", "__repr__", "is_leaf", "grad_fn", "register_hook", "names", "is_cuda", "stride",
    "__deepcopy__",
)  # fmt: skip


def _is_about_the_parameter(func: Callable) -> bool:
    """Functions that read or set what is not a value, or copy the parameter as it is."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(func, "__self__", None)
        name = getattr(owner, "__name__", "")
    return name in _ABOUT
