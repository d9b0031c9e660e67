"""``lts.executors.register``: a user's own operator or executor, under a name."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Optional, TypeVar, Union

import torch

from lightning_thunder_strategy.executors.base import Executor
from lightning_thunder_strategy.executors.registered import Implementation, RegisteredExecutor, check_operation
from lightning_thunder_strategy.executors.registry import add

F = TypeVar("F", bound=Callable)


def register(
    executor: Union[str, type[Executor]],
    *,
    replaces: Optional[Union[Callable, Sequence[Callable]]] = None,
    when: Optional[Callable[..., Optional[str]]] = None,
    fake: Optional[Callable] = None,
    backward: Optional[Callable] = None,
) -> Any:
    """Make an executor known by a name, to use in ``executors=[...]``.

    Above a class, ``@register`` makes a subclass of :class:`~lightning_thunder_strategy.executors.OperatorExecutor` or
    :class:`~lightning_thunder_strategy.executors.FusionExecutor` known by its ``name``. Above a function,
    ``@register("name", replaces=operation)`` makes an executor that runs ``operation`` with that function; several
    functions may share a name. The function takes the operation's arguments. It is differentiable (plain torch
    operations, an ``autograd.Function``, or a ``torch.library`` operator with its backward), or it is opaque (such as
    one that starts a Triton kernel) and ``fake`` and ``backward`` say what cannot be seen.

    Args:
        executor: The name, or the class.
        replaces: The operation or operations that the function runs.
        when: Called with the operation's arguments, tensors as fake tensors: why the function cannot take them, in
            words for the report, or ``None`` if it can.
        fake: For an opaque function, whose arguments need type annotations: called with the same arguments, it returns
            an empty tensor of the result's shape, dtype and device.
        backward: For an opaque function: called with the result's gradient and the same arguments, it returns the
            gradient of each tensor argument that is a ``torch.Tensor`` by its annotation, as one tensor or a tuple. It
            may be opaque too. Without it, the function cannot be used where gradients are needed.

    Returns:
        The class as it is; or the function that programs call.

    Raises:
        ValueError: If the name is one of ours, or an argument is not allowed.
    """
    if isinstance(executor, type) and issubclass(executor, Executor):
        if not executor.name:
            raise ValueError(f"{executor.__qualname__} has no name: set the class attribute 'name'.")
        add(executor.name, executor)
        return executor
    if not isinstance(executor, str) or not executor:
        raise ValueError(f"register({executor!r}) is not allowed: give a name, or a subclass of Executor.")
    if replaces is None:
        raise ValueError(f"register({executor!r}) needs replaces=: the operation that the function runs.")
    if backward is not None and fake is None:
        raise ValueError("backward= is for an opaque function, which needs fake= too.")
    operations = tuple(replaces) if isinstance(replaces, Sequence) else (replaces,)
    for operation in operations:
        check_operation(operation)

    def decorate(function: F) -> F:
        called = function if fake is None else _opaque(executor, function, fake, backward)
        made = [Implementation(operation, called, when, function) for operation in operations]
        _implementations.setdefault(executor, [])
        kept = [item for item in _implementations[executor] if item.operation not in operations]
        _implementations[executor] = [*kept, *made]
        add(executor, _factory(executor))
        return called  # type: ignore[return-value]

    return decorate


_implementations: dict[str, list[Implementation]] = {}


def _factory(name: str) -> Callable[[], Executor]:
    def make() -> Executor:
        items = tuple(_implementations[name])
        texts = (f"{getattr(item.operation, '__name__', item.operation)} with {item.source.__name__}" for item in items)
        return RegisteredExecutor(name, items, f"Runs {', '.join(texts)}.")

    return make


def _opaque(name: str, function: Callable, fake: Callable, backward: Optional[Callable]) -> Callable:
    """The function as an operator of ``torch.library``, and its backward as another."""
    space = f"lts_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"
    operator = torch.library.custom_op(f"{space}::{function.__name__}", function, mutates_args=())
    operator.register_fake(fake)
    if backward is not None:
        _register_backward(f"{space}::{function.__name__}_backward", operator, backward)
    return operator._opoverload


def _register_backward(name: str, operator: Any, backward: Callable) -> None:
    arguments = operator._opoverload._schema.arguments
    places = [place for place, argument in enumerate(arguments) if str(argument.type) == "Tensor"]

    def compute(*values: Any) -> list[torch.Tensor]:
        found = backward(*values)
        found = (found,) if isinstance(found, torch.Tensor) else tuple(found)
        if len(found) != len(places):
            raise ValueError(f"{name} returns {len(found)} gradients for {len(places)} tensors.")
        return [value.clone() if any(value is other for other in values) else value for value in found]

    inputs = ", ".join(f"{argument.type} {argument.name}" for argument in arguments)
    opaque = torch.library.custom_op(name, compute, mutates_args=(), schema=f"(Tensor gradient, {inputs}) -> Tensor[]")
    opaque.register_fake(lambda gradient, *values: [torch.empty_like(values[place]) for place in places])

    def setup(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, torch.Tensor)))
        ctx.others = [None if isinstance(value, torch.Tensor) else value for value in inputs]
        ctx.tensors = [isinstance(value, torch.Tensor) for value in inputs]

    def differentiate(ctx: Any, gradient: torch.Tensor) -> Any:
        saved = iter(ctx.saved_tensors)
        values = [next(saved) if is_tensor else other for is_tensor, other in zip(ctx.tensors, ctx.others)]
        found = dict(zip(places, opaque(gradient.contiguous(), *values)))
        result = tuple(found.get(place) for place in range(len(arguments)))
        return result[0] if len(result) == 1 else result

    operator.register_autograd(differentiate, setup_context=setup)
