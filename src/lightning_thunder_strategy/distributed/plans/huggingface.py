"""The plans that Hugging Face models bring along."""

from typing import Optional

from torch import nn

_HEADS = {"colwise_rep": "colwise_loss_parallel", "colwise_gather_output": "colwise_loss_parallel"}


def plan_of(module: nn.Module) -> Optional[dict[str, str]]:
    """The ``tp_plan`` of a whole model; ``None`` for anything else, also for a model inside of a model.

    The outermost one has the entries of those inside of it. What its head gathers may go into a loss without that.
    """
    if not any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__):
        return None
    own = getattr(type(module), "_tp_plan", None) or {}  # of the head; some releases leave it out of the instance's
    body = getattr(module, "_tp_plan", None) or {}
    return {**{glob: _HEADS.get(style, style) for glob, style in own.items()}, **body} or None
