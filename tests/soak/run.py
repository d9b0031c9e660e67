"""A long fit with changing batch shapes, validation and checkpoints; nothing may grow.

Usage: python -m tests.soak.run [--steps 2000] [--executors eager] [--output soak.json]
"""

import argparse
import gc
import json
import os
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_thunder_strategy as lts

VOCABULARY, WIDTH = 64, 32
MOST_GROWTH = {"memory_mib": 24.0, "graphs": 0, "processes": 0, "file_handles": 2, "threads": 2}


class Batches(IterableDataset):
    """Token batches of changing length and, in training, changing size."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.count):
            rows, length = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((2, 9), (4, 33)))
            yield torch.randint(0, VOCABULARY, (rows, length + 1), generator=generator)


class Model(L.LightningModule):
    """A small language model with a buffer, dropout and logging."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.block(self.table(tokens[:, :-1]))
        x = self.norm(x.flatten(0, 1)).view_as(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Watch(L.Callback):
    """Notes what the process holds, every so many steps."""

    def __init__(self, every: int) -> None:
        self.every, self.rows, self.process = every, [], psutil.Process()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % self.every == 0:
            gc.collect()
            self.rows.append({"step": trainer.global_step, **held(self.process), "graphs": graphs(trainer)})


def held(process: psutil.Process) -> dict[str, float]:
    """Resident memory in MiB, child processes, open file handles and threads."""
    return {
        "memory_mib": round(process.memory_info().rss / 2**20, 1),
        "processes": len(process.children(recursive=True)),
        "file_handles": process.num_fds(),
        "threads": process.num_threads(),
    }


def graphs(trainer: L.Trainer) -> int:
    """How many programs have been compiled."""
    return sum(step["graphs"] for step in lts.explain(trainer).to_dict()["steps"].values())


def soak(steps: int, executors: list[str]) -> dict[str, Any]:
    """Run, and return the figures with what has grown too much since a quarter of the steps.

    Args:
        steps: Training steps; validation every 50, a checkpoint every 100 (both every 20 if there are fewer than 500).
        executors: For the strategy.
    """
    validate, save = (50, 100) if steps >= 500 else (20, 20)
    watch, started = Watch(validate), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        saver = ModelCheckpoint(folder, every_n_train_steps=save, save_top_k=2, monitor="step", mode="max")
        module = Model()
        trainer = L.Trainer(
            strategy=lts.ThunderStrategy(executors=executors), accelerator="cpu", devices=1, max_steps=steps,
            val_check_interval=validate, check_val_every_n_epoch=None, callbacks=[watch, saver], logger=False,
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1,
        )  # fmt: skip
        train, val = (DataLoader(Batches(*args), batch_size=None) for args in ((10 * steps, 1), (4, 2)))
        trainer.fit(module, train, val)
        files = sorted(path.name for path in Path(folder).iterdir())
    compiled = graphs(trainer)
    left = {
        name: weakref.ref(item)
        for name, item in {
            "module": module,
            "trainer": trainer,
            "layer": module.block,
            "parameter": module.head.weight,
        }.items()
    }
    rows = watch.rows
    del module, trainer, saver, train, val, watch  # Lightning gives callbacks the module's ``log``
    gc.collect()
    after = [row for row in rows if row["step"] >= steps / 4]
    growth = {key: round(max(row[key] for row in after) - after[0][key], 1) for key in MOST_GROWTH}
    return {
        "steps": steps, "executors": executors, "seconds": round(time.perf_counter() - started, 1),
        "first": rows[0], "after warm-up": after[0], "last": after[-1], "growth": growth, "graphs": compiled,
        "checkpoints kept": files, "too much": [key for key in MOST_GROWTH if growth[key] > MOST_GROWTH[key]],
        "not freed": [name for name, reference in left.items() if reference() is not None],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--executors", nargs="+", default=["eager"])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    result = soak(args.steps, args.executors)
    text = json.dumps(result, indent=2)
    print(text)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text)
    if result["too much"] or result["not freed"]:
        raise SystemExit(f"grown too much: {result['too much']}; not freed: {result['not freed']}")


if __name__ == "__main__":
    main()
