"""Prints the losses of a run, for a test to read."""

import lightning as L


class PrintLosses(L.Callback):
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            print("losses:", {name: round(value.item(), 5) for name, value in sorted(trainer.callback_metrics.items())})
