"""Compiles a step on an example batch before training, and leaves everything as it was."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_thunder_strategy.steps.step import CompiledStep


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Afterwards buffers, gradients, training mode and random numbers are what they were before."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    modes = [(child, child.training) for child in module.modules()]
    devices = sorted(
        {p.device.index for p in module.parameters() if p.device.type == "cuda" and p.device.index is not None}
    )
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for child, training in modes:
                child.training = training


def compile_early(module: nn.Module, step: CompiledStep, args: tuple, environment: Callable) -> None:
    """Run one forward (and backward, of a training step) of a step on example arguments, so that they are compiled.

    Args:
        module: The module whose step it is.
        step: The step.
        args: Its arguments.
        environment: Opened around the step.
    """
    training = step.record.name == "training_step"
    with unchanged(module), torch.set_grad_enabled(training):
        module.train(training)
        for parameter in module.parameters():
            parameter.grad = None
        output = step.dry_run(args, environment)
        loss = output.get("loss") if isinstance(output, dict) else output
        if training and isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()
