"""A user's script for torchrun: saves each step, goes on from the last checkpoint; one rank is killed the first time.

Usage: torchrun --max-restarts 1 restarted.py FOLDER STATE_DICT_TYPE
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import lightning_thunder_strategy as lts
from tests.distributed.models import Smooth, vectors

STEPS, KILLED_AT = 6, 3
FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"


class Killed(Smooth):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if FIRST and self.global_step == KILLED_AT and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, state_dict_type: str) -> None:
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    strategy = lts.ThunderFSDPStrategy(compile="off", state_dict_type=state_dict_type, async_save=not FIRST)
    keeper = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=1, save_last=True)
    steps: list[int] = []
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=STEPS, logger=False, callbacks=[keeper],
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    module = Killed()
    module.on_train_batch_end = lambda *_: steps.append(module.global_step)  # type: ignore[method-assign]
    trainer.fit(module, DataLoader(vectors(), batch_size=2), ckpt_path="last")
    if trainer.is_global_zero:
        (folder / "steps.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
