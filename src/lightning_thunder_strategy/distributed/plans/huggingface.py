"""The plans that Hugging Face models bring along."""

from typing import Optional

from torch import nn


def plan_of(module: nn.Module) -> Optional[dict[str, str]]:
    """The ``tp_plan`` of a whole model; ``None`` for anything else, also for a model inside of a model.

    The outermost one has the entries of those inside of it.
    """
    if not any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__):
        return None
    own = getattr(type(module), "_tp_plan", None) or {}  # of the head; some releases leave it out of the instance's
    body = getattr(module, "_tp_plan", None) or {}
    return {**own, **body} or None
