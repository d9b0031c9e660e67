"""Run as a script: groups of two processes train, and something happens to one of each.

Prints, for each case, what the ranks saw, as JSON. Processes are forked when everything is imported.

Usage: python -m tests.distributed.faults FOLDER FAULT:SAVES:VICTIM:KIND...   (such as save:sharded:1:zero3)
"""

import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.distributed.checkpoint import is_sharded_checkpoint, load_sharded
from tests.distributed.models import Regression, vectors
from tests.distributed.ranks import free_port
from tests.distributed.training import PATIENCE, thunder, trainer

LAST = "step=1.ckpt"
DEADLINE = 60  # seconds


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save(folder: Path, step: int) -> None:
    """From the second step on, opening a file of a checkpoint for writing is the end."""
    if step != 1:
        return

    def hook(event: str, args: tuple) -> None:
        path = Path(str(args[0])) if event == "open" else Path()
        if folder in path.parents and "partial" in str(path) and "r" not in str(args[1]):
            kill()

    sys.addaudithook(hook)


def during(folder: Path, step: int) -> None:
    """Killed before the collectives of the third step, for which the other one waits."""
    if step == 2:
        kill()


def collective(folder: Path, step: int) -> None:
    """Killed while it waits in a collective, to which the other one has not come yet."""
    if step == 2:
        threading.Timer(0.3, kill).start()


def raises(folder: Path, step: int) -> None:
    if step == 2:
        raise ValueError("of the user")


def disk(folder: Path, step: int) -> None:
    """From the second step on, files cannot grow beyond some bytes."""
    if step == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


FAULTS: dict[str, Callable[[Path, int], None]] = {
    "save": save, "step": during, "collective": collective, "raises": raises, "disk": disk,
}  # fmt: skip


def strategy(kind: str, saves: str) -> Any:
    options = {
        "compile": "off", "state_dict_type": saves.removeprefix("async-"), "async_save": saves.startswith("async-"),
    }  # fmt: skip
    if kind == "tp":
        plan = {"net.0": "colwise", "net.2": "rowwise"}
        return lts.ThunderTPStrategy(plan=plan, timeout=PATIENCE, executors=["eager"], **options)
    return thunder(kind, **options)


class Faulty(Regression):
    """Something happens in its steps."""

    happens: Callable[[int], None]

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 1)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.happens(batch_idx)
        return super().training_step(batch, batch_idx)


class Settled(L.Callback):
    """Waits, where a checkpoint would be written in the background while the fault comes, until it is there."""

    def __init__(self, folder: Path) -> None:
        self.last = folder / LAST

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        while batch_idx == 1 and not self.last.exists():
            time.sleep(0.01)


def rank(number: int, case: str, folder: Path, port: int) -> None:
    """Train four steps with a save after each; in one of them something happens to the victim."""
    fault, saves, victim, kind = case.split(":")
    os.environ.update(
        RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="tests",
    )  # fmt: skip
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=PATIENCE)
    module = Faulty()
    if number == int(victim):
        module.happens = lambda step: FAULTS[fault](folder, step)
    else:
        module.happens = lambda step: time.sleep(1 if fault == "collective" and step == 2 else 0)
    callback = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    made = trainer(
        strategy(kind, saves), callbacks=[Settled(folder), callback], enable_checkpointing=True, max_steps=4,
        limit_val_batches=0, use_distributed_sampler=True,
    )  # fmt: skip
    seen: dict[str, Any] = {"error": "", "warnings": []}
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made.fit(module, DataLoader(vectors(), batch_size=2))
        except Exception as error:
            seen["error"] = f"{type(error).__name__}: {error}"
    seen["seconds"] = time.monotonic() - started
    seen["warnings"] = [str(warning.message) for warning in caught]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
    (folder / f"seen{number}.json").write_text(json.dumps(seen))


def main(folder: Path, cases: list[str]) -> None:
    processes, results = {}, {}
    try:
        for case in cases:
            here, port = folder / case.replace(":", "-"), free_port()
            here.mkdir()
            for number in range(2):
                child = os.fork()
                if child == 0:
                    try:
                        rank(number, case, here, port)
                        os._exit(0)  # tidying up all that was imported takes longer than training
                    finally:
                        traceback.print_exc()
                        os._exit(1)
                processes[child] = (case, number)
        ended, deadline = {}, time.monotonic() + DEADLINE
        while len(ended) < len(processes) and time.monotonic() < deadline:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child:
                ended[processes[child]] = status
            time.sleep(0.05)
        for case in cases:
            here = folder / case.replace(":", "-")
            files = [here / f"seen{number}.json" for number in range(2)]
            results[case] = {
                "status": [ended.get((case, number)) for number in range(2)],
                "left": sorted(path.name for path in here.iterdir() if not path.name.startswith("seen")),
                "loads": loads(here / LAST),
                "seen": [json.loads(file.read_text()) if file.exists() else None for file in files],
            }
        print(json.dumps(results))
    finally:
        for child, which in processes.items():
            if which not in ended:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def loads(path: Path) -> bool:
    """Whether a checkpoint is complete: weights and what the optimizer keeps."""
    plain = Faulty().state_dict()
    if is_sharded_checkpoint(path):
        state, metadata = load_sharded(path, {"state_dict": plain}, ["optimizer_0"], True)
    else:
        state = metadata = torch.load(path, weights_only=True)
    return state["state_dict"].keys() == plain.keys() and metadata["global_step"] == 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
