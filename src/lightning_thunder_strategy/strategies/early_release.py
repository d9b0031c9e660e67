"""Gradients of the last step go before the next forward, not after it: they need not fit beside its activations."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import Optimizer


class EarlyRelease:
    """Calls ``zero_grad`` when a compiled training step begins, where the Trainer would call it right after the step.

    Only where nobody can tell the difference: the step is one program that looks at no gradient, and neither the module
    nor a callback nor the optimizer has code of its own around ``zero_grad``.
    """

    def __init__(self) -> None:
        self._optimizer: Optional[Optimizer] = None

    @property
    def applies(self) -> bool:
        """Whether gradients go before the program that is about to run, if it looks at none."""
        return self._optimizer is not None

    @contextmanager
    def within(self, module: LightningModule) -> Iterator[None]:
        """Opened around a training step that the Trainer's loop calls."""
        trainer = module.trainer
        loop = trainer.fit_loop.epoch_loop
        first = loop.batch_idx % trainer.accumulate_grad_batches == 0
        if first and len(trainer.optimizers) == 1 and _unobserved(module, trainer.callbacks, trainer.optimizers[0]):  # type: ignore[attr-defined]
            self._optimizer = trainer.optimizers[0]
        try:
            yield
        finally:
            self._optimizer = None

    def __call__(self) -> None:
        """Before a program that looks at no gradient."""
        if self._optimizer is not None:
            self._optimizer.zero_grad()


def _unobserved(module: LightningModule, callbacks: list[Callback], optimizer: Any) -> bool:
    return (
        module.automatic_optimization
        and not is_overridden("on_before_zero_grad", module)
        and not is_overridden("optimizer_zero_grad", module)
        and not any(is_overridden("on_before_zero_grad", callback, Callback) for callback in callbacks)
        and getattr(optimizer.zero_grad, "__func__", None) is Optimizer.zero_grad
        and not is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)
    )
