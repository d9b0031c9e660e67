"""Compiles a step on an example batch before training, and leaves everything as it was."""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_thunder_strategy.steps.step import CompiledStep


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Afterwards buffers, gradients, training mode, other attributes and random numbers are what they were before."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    attributes = [(vars(child), dict(vars(child))) for child in module.modules()]
    containers = [
        (value, copy.copy(value))
        for _, held in attributes
        for value in held.values()
        if isinstance(value, (list, dict, set, deque))
    ]
    with isolate_rng():
        try:
            yield
        finally:
            for held, before in [*containers, *attributes]:
                _restore(held, before)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _restore(container: Any, before: Any) -> None:
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(before)
    else:
        container.update(before)


def compile_early(
    module: nn.Module,
    step: CompiledStep,
    args: tuple,
    environment: Callable[[], AbstractContextManager],
    gradients: AbstractContextManager,
) -> None:
    """Run one forward (and backward, of a training step) of a step on example arguments, so that they are compiled.

    Args:
        module: The module whose step it is.
        step: The step.
        args: Its arguments; the first is the forward's inputs if only the forward is compiled.
        environment: Opened around the step.
        gradients: Whether gradients are recorded: ``torch.enable_grad()`` or as the loop of the step has it.
    """
    with unchanged(module):
        for parameter in module.parameters():
            parameter.grad = None
        if step.record.name != "training_step":
            module.eval()
        with gradients:
            args = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, args)  # as loaded under ``gradients``
            if step.unit == "forward":
                step.compile_forward(args[0], environment)
                return
            output = step.dry_run(args, environment)
        loss = output.get("loss") if isinstance(output, dict) else output
        if step.record.name == "training_step" and isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()
