"""Makes a plain module's parameters appear gathered inside a step, and as they are stored everywhere else.

Each module gets a class of its own (same name, a subclass of the user's class) whose parameter attributes are
properties. Nothing else of the module changes: parameters, buffers, hooks and state-dict keys stay where they are.
"""

import copy
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_thunder_strategy.compiler import _torch_aot, _torch_dynamo
from lightning_thunder_strategy.distributed import edits
from lightning_thunder_strategy.distributed.accumulation import Accumulation
from lightning_thunder_strategy.distributed.edits import EditWatch
from lightning_thunder_strategy.distributed.schemes import Scheme, place_like, whole
from lightning_thunder_strategy.distributed.tensor_class import bound_schemes, listed_schemes, planned_attributes
from lightning_thunder_strategy.distributed.tensor_parallel import ModulePlan
from lightning_thunder_strategy.distributed.unsupported import refuse_stale_references, refuse_unsupported

_LISTED = "_lts_listed_"  # before the name of a parameter: the whole of it, where a module computes with less


class _Switch:
    """What parameter attributes yield. Plain attributes, so that Dynamo can guard on them."""

    on: bool = False  # attributes yield gathered tensors
    listed: bool = True  # and so does ``parameters()``
    watch: Optional[EditWatch] = None  # notices edits by code that runs uncompiled


_GATHERING = _Switch()


@contextmanager
def gathering(listed: bool = True) -> Iterator[None]:
    """While open, parameter attributes of parallelized modules yield the tensors to compute with.

    Args:
        listed: Whether ``parameters()`` yields them too (for weight penalties), or the stored parameters (for code that
            clips gradients or steps optimizers).

    Raises:
        LostEditError: At the end, if code that ran uncompiled has edited a gathered tensor in place.
    """
    before = _GATHERING.on, _GATHERING.listed, _GATHERING.watch
    watch = EditWatch()
    _GATHERING.on, _GATHERING.listed, _GATHERING.watch = True, listed, watch
    try:
        yield
        watch.check()
    finally:
        _GATHERING.on, _GATHERING.listed, _GATHERING.watch = before


_torch_dynamo.never_a_program(gathering.__wrapped__)  # type: ignore[attr-defined]


def _computing() -> bool:
    """Whether attributes yield tensors to compute with. Read by Dynamo."""
    return _GATHERING.on or _torch_aot.in_backward()


def watching_data() -> AbstractContextManager:
    """While open inside :func:`gathering`, edits of ``parameter.data`` are noticed too. Dynamo must not see it."""
    return edits.watching_data(_GATHERING.watch)


class ParameterReplacedError(RuntimeError):
    """A parameter was replaced by one that is not spread over the ranks."""


def parallelize(
    root: nn.Module, scheme: Scheme, plans: Mapping[nn.Module, ModulePlan] = MappingProxyType({})
) -> dict[nn.Parameter, nn.Parameter]:
    """Spread the parameters of ``root`` over the ranks.

    Parameters that are spread already stay; a parameter used under several names stays one.

    Args:
        root: The module.
        scheme: How.
        plans: What each module is in a step, with tensor parallelism.

    Returns:
        Old parameter to new, for those that were replaced (an optimizer that holds the old ones must be told).

    Raises:
        TypeError: If a module cannot be handled: TorchScript, or lazy parameters that have no shape yet.
        ValueError: If an attribute besides the parameters themselves refers to a parameter that must be replaced.
    """
    modules = list(root.named_modules())
    refuse_unsupported(modules, scheme)
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for _, module in modules:
        for name, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if parameter not in placed:
                placed[parameter] = scheme.place(parameter)
            module._parameters[name] = placed[parameter]
    replaced = {old: new for old, new in placed.items() if old is not new}
    refuse_stale_references(modules, replaced)
    classes: dict[tuple, type] = {}
    accumulation = accumulation_of(root) or Accumulation()
    for _, module in modules:
        if not is_parallelized(module):
            key = (type(module), tuple(module._parameters), plans.get(module))
            if key not in classes:
                classes[key] = _parallel_class(*key[:2], scheme, accumulation, key[2])
            module.__class__ = classes[key]
    return replaced


def has_sharded_parameters(root: nn.Module) -> bool:
    """Whether any parameter is a distributed tensor."""
    return any(isinstance(p, DTensor) for module in root.modules() for p in module._parameters.values())


def is_spread_otherwise(root: nn.Module, scheme: Scheme) -> bool:
    """Whether parameters are distributed, and not as ``scheme`` does it."""
    stored = [p for module in root.modules() for p in module._parameters.values() if isinstance(p, DTensor)]
    return any(not scheme.holds(parameter) for parameter in stored)


def move_to(root: nn.Module, device: torch.device) -> None:
    """Move what has storage to ``device``. Distributed and meta tensors stay where they are.

    ``Module.to`` cannot move distributed parameters once a program has been compiled over them.
    """
    tensors = [t for m in root.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    if not any(isinstance(tensor, DTensor) or tensor.is_meta for tensor in tensors):
        root.to(device)
        return
    with torch.no_grad():
        for module in root.modules():
            for parameter in module._parameters.values():
                if parameter is not None and not isinstance(parameter, DTensor) and not parameter.is_meta:
                    parameter.data = parameter.data.to(device)
            for name, buffer in module._buffers.items():
                if buffer is not None and not isinstance(buffer, DTensor) and not buffer.is_meta:
                    module._buffers[name] = buffer.to(device)


def is_parallelized(module: nn.Module) -> bool:
    return "_lts_scheme" in vars(type(module))


def scheme_of(module: nn.Module) -> Optional[Scheme]:
    """How the module's parameters are spread, or ``None``."""
    return getattr(type(module), "_lts_scheme", None)


def accumulation_of(module: nn.Module) -> Optional[Accumulation]:
    """How gradients of the module's parameters are treated now, or ``None`` if they are not spread."""
    return getattr(type(module), "_lts_accumulation", None)


def original_class(module: nn.Module) -> type:
    """The user's class of a module."""
    return getattr(type(module), "_lts_original", type(module))


def restore_classes(root: nn.Module) -> None:
    """Give every module the user's own class back; parameters stay as they are stored. Does not communicate."""
    for module in root.modules():
        module.__class__ = original_class(module)


def restore_parameters(root: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Replace distributed parameters by whole plain ones, on every rank (collectives).

    Returns:
        Old parameter to new.
    """
    plain: dict[nn.Parameter, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, DTensor):
                continue
            if parameter not in plain:
                with torch.no_grad():
                    plain[parameter] = nn.Parameter(whole(parameter.detach()).clone(), parameter.requires_grad)
                plain[parameter].__dict__.update({k: v for k, v in parameter.__dict__.items() if not k.startswith("_")})
            module._parameters[name] = plain[parameter]
        for name, buffer in module._buffers.items():
            if isinstance(buffer, DTensor):
                module._buffers[name] = whole(buffer)
    return plain


# ---------------------------------------------------------------------------------------------------- the class


def _parallel_class(
    original: type,
    names: tuple[str, ...],
    scheme: Scheme,
    accumulation: Accumulation,
    plan: Optional[ModulePlan] = None,
) -> type:
    plain_call = original.__call__  # Dynamo of torch 2.11 cannot look this up on a class

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _GATHERING.on:
            return plain_call(self, *args, **kwargs)
        with gathering():
            return plain_call(self, *args, **kwargs)

    def named_parameters(
        self: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        if not (_GATHERING.on and _GATHERING.listed):
            yield from original.named_parameters(self, prefix, recurse, remove_duplicate)  # type: ignore[attr-defined]
            return
        seen = set()
        modules = self.named_modules(prefix=prefix, remove_duplicate=remove_duplicate) if recurse else [(prefix, self)]
        for module_name, module in modules:
            for name, parameter in module._parameters.items():
                if parameter is None or (remove_duplicate and parameter in seen):
                    continue
                seen.add(parameter)
                attribute = f"{_LISTED}{name}" if hasattr(type(module), f"{_LISTED}{name}") else name
                yield f"{module_name}.{name}" if module_name else name, getattr(module, attribute)

    def get_parameter(self: nn.Module, target: str) -> Tensor:
        path, _, name = target.rpartition(".")
        owner = self.get_submodule(path)
        if owner._parameters.get(name) is None:
            raise AttributeError(f"{type(owner).__name__} has no parameter `{name}`")
        return getattr(owner, name)

    def load_from_state_dict(self: nn.Module, state_dict: dict, prefix: str, *args: Any) -> None:
        for name, parameter in self._parameters.items():
            if prefix + name in state_dict:
                state_dict[prefix + name] = place_like(state_dict[prefix + name], parameter)
        original._load_from_state_dict(self, state_dict, prefix, *args)  # type: ignore[attr-defined]

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return _rebuild, (original, names, scheme, plan), self.__getstate__()

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        for parameter in self._parameters.values():
            _copy_parameter(parameter, memo)
        if hasattr(original, "__deepcopy__"):
            return original.__deepcopy__(self, memo)
        made = memo[id(self)] = _rebuild(original, names, scheme, plan)
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    _torch_dynamo.never_a_program(call, named_parameters, get_parameter, load_from_state_dict)
    namespace: dict[str, Any] = {
        "__call__": call,
        "__reduce_ex__": reduce,
        "__deepcopy__": deepcopy,
        "_load_from_state_dict": load_from_state_dict,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "named_parameters": named_parameters,
        "get_parameter": get_parameter,
        "_lts_scheme": scheme,
        "_lts_accumulation": accumulation,
        "_lts_original": original,
        **{
            name: property(_getter(name, bound, accumulation), _refusal(name))
            for name, bound in bound_schemes(names, scheme, plan)
        },
        **{
            f"{_LISTED}{name}": property(_getter(name, bound, accumulation))
            for name, bound in listed_schemes(scheme, plan)
        },
        **(planned_attributes(original, plan, _computing) if plan is not None else {}),
    }
    if issubclass(original, nn.RNNBase):
        namespace["_flat_weights"] = property(_flat_weights, lambda self, value: None)
    return types.new_class(original.__name__, (original,), exec_body=lambda ns: ns.update(namespace))


def _getter(name: str, scheme: Scheme, accumulation: Accumulation) -> Callable[[nn.Module], Any]:
    def get(self: nn.Module) -> Any:
        if name not in self._parameters:
            raise AttributeError(f"{type(self).__name__} has no parameter `{name}`")
        parameter = self._parameters[name]
        if parameter is None or not (_GATHERING.on or _torch_aot.in_backward()):
            return parameter
        if not isinstance(parameter, nn.Parameter):
            return parameter  # put there for one call, as torch.func.functional_call does
        if not scheme.accepts(parameter):
            raise ParameterReplacedError(
                f"The parameter `{name}` of {type(self).__name__} was replaced after the strategy had set up the "
                "module, so it is not spread over the ranks. Replace parameters before `fit` or in `configure_model`, "
                "or change its values in place."
            )
        if torch.compiler.is_compiling() or _GATHERING.watch is None:
            return scheme.gather(parameter, accumulation.local)
        gather = lambda stored: scheme.gather(stored, accumulation.local)  # noqa: E731
        where = f"`{name}` of {type(self).__name__}"
        return edits.gather_watched(gather, parameter, _GATHERING.watch, where, scheme.copies)

    _torch_dynamo.never_a_program(get)
    return get


def _refusal(name: str) -> Callable[[nn.Module, Any], None]:
    """Called when something is assigned that is not a parameter; ``nn.Module`` takes parameters before."""

    def refuse(self: nn.Module, value: Any) -> None:
        raise ParameterReplacedError(
            f"A {type(value).__name__} was put in the place of the parameter `{name}` of {type(self).__name__} after "
            "the strategy had set up the module, as pruning does. Prune before `fit` or in `configure_model`, or train "
            "in one process (ThunderStrategy)."
        )

    return refuse


def _flat_weights(self: nn.RNNBase) -> list[Any]:
    """Recurrent layers keep a list of their weights: it must follow the attributes."""
    return [getattr(self, name, None) for name in self._flat_weights_names]


def _rebuild(original: type, names: tuple[str, ...], scheme: Scheme, plan: Optional[ModulePlan]) -> nn.Module:
    """Deepcopy and pickle make a parallelized module again."""
    return object.__new__(_parallel_class(original, names, scheme, Accumulation(), plan))


def _copy_parameter(parameter: Optional[nn.Parameter], memo: dict[int, Any]) -> None:
    """Copy a parameter and its gradient. Torch's own copy fails (2.13) on a sharded gradient that is a part of a larger
    tensor, as those of merged collectives are: it takes the part's offset for a pointer."""
    if parameter is None or id(parameter) in memo:
        return
    gradient, parameter.grad = parameter.grad, None
    try:
        made = copy.deepcopy(parameter, memo)
    finally:
        parameter.grad = gradient
    if gradient is not None:
        made.grad = gradient.detach().clone()
