"""What a plan of tensor parallelism changes in the class that a module has in a step."""

from collections.abc import Callable
from typing import Any, Optional

from torch import nn

from lightning_thunder_strategy.compiler import _torch_dynamo
from lightning_thunder_strategy.distributed.schemes import Scheme
from lightning_thunder_strategy.distributed.tensor_parallel import ModulePlan
from lightning_thunder_strategy.distributed.tensor_styles import Form


def bound_schemes(names: tuple[str, ...], scheme: Scheme, plan: Optional[ModulePlan]) -> list[tuple[str, Scheme]]:
    """The parameters of a module, and the scheme that gathers each in the form that the module computes with."""
    forms = dict(plan.forms) if plan is not None else {}
    return [(name, scheme.of_form(forms[name]) if name in forms else scheme) for name in names]


def listed_schemes(scheme: Scheme, plan: Optional[ModulePlan]) -> list[tuple[str, Scheme]]:
    """The parameters that a module does not compute with as they are on one process, and the scheme that gathers them
    so: for ``parameters()`` in a step, such as in a penalty, whose gradient every rank has."""
    forms = plan.forms if plan is not None else ()
    return [(name, scheme.of_form(Form(form.rest))) for name, form in forms if form != Form(form.rest)]


def planned_attributes(original: type, plan: ModulePlan, computing: Callable[[], bool]) -> dict[str, Any]:
    """The forward, and attributes that say how large a part is.

    Args:
        original: The user's class.
        plan: Of the module.
        computing: Whether a step is running; outside of one everything is the user's own.
    """
    namespace: dict[str, Any] = {}
    inside = plan.forward(original.forward)  # type: ignore[attr-defined]
    if inside is not None:

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if computing():
                return inside(self, *args, **kwargs)
            return original.forward(self, *args, **kwargs)  # type: ignore[attr-defined]

        _torch_dynamo.never_a_program(forward)
        namespace["forward"] = forward
    for name, local in plan.attributes:
        namespace[name] = _local_attribute(name, local.value, computing)
    return namespace


def _local_attribute(name: str, local: Any, computing: Callable[[], bool]) -> property:
    def get(self: nn.Module) -> Any:
        return local if computing() else self.__dict__[name]

    def put(self: nn.Module, value: Any) -> None:
        self.__dict__[name] = value

    _torch_dynamo.never_a_program(get)
    return property(get, put)
