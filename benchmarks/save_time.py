"""How long a fit waits for its checkpoints, with and without ``async_save``.

A model of 25 million parameters (101 MB, with Adam's state 302 MB) saves three times in 24 steps, on one CPU process.

Usage: python benchmarks/save_time.py
"""

import tempfile
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_thunder_strategy as lts

WIDTH, STEPS, EVERY = 2048, 24, 8


class Wide(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def measure(kind: str, background: bool) -> tuple[list[float], float]:
    """Seconds that each save took of the loop, and seconds of the whole fit."""
    blocked: list[float] = []
    strategy = lts.ThunderStrategy(executors=["eager"], compile="off", state_dict_type=kind, async_save=background)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            strategy=strategy, accelerator="cpu", devices=1, max_steps=STEPS, logger=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[ModelCheckpoint(folder, every_n_train_steps=EVERY)],
        )  # fmt: skip
        save = trainer.save_checkpoint

        def timed(*args: Any, **options: Any) -> None:
            started = time.perf_counter()
            save(*args, **options)
            blocked.append(time.perf_counter() - started)

        trainer.save_checkpoint = timed  # type: ignore[method-assign]
        batches = DataLoader(TensorDataset(torch.randn(STEPS * 256, WIDTH)), batch_size=256)
        started = time.perf_counter()
        trainer.fit(Wide(), batches)
        return blocked, time.perf_counter() - started


if __name__ == "__main__":
    torch.set_num_threads(1)
    for kind in ("full", "sharded"):
        for background in (False, True):
            blocked, total = measure(kind, background)
            seconds = ", ".join(f"{value:.2f}" for value in blocked)
            print(f"{kind}, async_save={background}: blocked {seconds} s; fit {total:.1f} s", flush=True)
