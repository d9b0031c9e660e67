"""A user's script: trains a small model on two processes and writes down what each of them saw.

Usage: python launched.py KIND START_METHOD FOLDER
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

import lightning_thunder_strategy as lts
from tests.distributed.models import Smooth, vectors


class Notes(L.Callback):
    """Writes one file a rank at the end of training."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows = folder, []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0:
            self.rows += batch[1].tolist()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        notes = {
            "rows": self.rows, "world_size": trainer.world_size, "rank": trainer.global_rank, "pid": os.getpid(),
            "launcher": type(trainer.strategy.launcher).__name__,
            "graphs": lts.explain(trainer).to_dict()["steps"]["training_step"]["graphs"],
            "loss": trainer.callback_metrics["loss_epoch"].item(),
        }  # fmt: skip
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(notes))


def main(kind: str, start_method: str, folder: Path) -> None:
    torch.set_num_threads(1)
    options = {"executors": ["eager"], "start_method": start_method}
    strategy = lts.ThunderDDPStrategy(**options) if kind == "ddp" else lts.ThunderFSDPStrategy(**options)
    L.seed_everything(1, verbose=False)
    module = Smooth()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, logger=False, callbacks=[Notes(folder)],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(vectors(), batch_size=4))
    result = {"weights": {name: value.tolist() for name, value in module.state_dict().items()}}
    if start_method == "popen":  # the processes stay, and use their group again
        trainer.validate(module, DataLoader(vectors(), batch_size=4), verbose=False)
        second = L.Trainer(
            accelerator="cpu", devices=2, strategy=type(strategy)(**options), max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        second.fit(module, DataLoader(vectors(), batch_size=4))
        result.update(val=trainer.callback_metrics["val"].item(), steps=second.global_step)
    (folder / f"result{os.environ.get('LOCAL_RANK', '0')}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
