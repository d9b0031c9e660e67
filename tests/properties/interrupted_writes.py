"""Run as a script: writes checkpoints in processes that end in the middle, and looks at what they leave.

Each case is a process of its own, forked when everything is imported. It ends by SIGKILL at its n-th file operation or
after a random time, or its n-th file operation fails. Prints the numbers of cases as JSON.

Usage: python -m tests.properties.interrupted_writes SEED FOLDER WHAT:KIND:CASES...
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.distributed.checkpoint import is_sharded_checkpoint, load_sharded
from lightning_thunder_strategy.strategies.storage import CheckpointWriteError
from tests.strategies.modules import Linear
from tests.strategies.training import classification_data, make_trainer

FAILED = 5  # exit status of a process that was told that it could not write
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")


class Interrupter:
    """Counts file operations inside one folder; at the n-th one something happens."""

    def __init__(self) -> None:
        self.folder, self.count, self.at = "", 0, -1
        self.happens: Callable[[], None] = lambda: None
        sys.addaudithook(self._hook)

    def start(self, folder: Path, at: int, happens: Callable[[], None]) -> None:
        self.folder, self.count, self.at, self.happens = str(folder), 0, at, happens

    def stop(self) -> int:
        self.folder, count = "", self.count
        return count

    def _hook(self, event: str, args: tuple) -> None:
        exchange = event == "ctypes.dlsym" and "renameat2" in args
        if not self.folder or not (exchange or (event in OPERATIONS and self.folder in str(args[0]))):
            return
        self.count += 1
        if self.count == self.at:
            self.happens()


interrupter = Interrupter()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError(28, "No space left on device")


def trainer(kind: str, **options: Any) -> L.Trainer:
    """``kind`` is ``full`` or ``sharded``, or ``async-full`` and ``async-sharded``: written while training goes on."""
    background = kind.startswith("async-")
    kind = kind.removeprefix("async-")
    strategy = lts.ThunderStrategy(executors=["eager"], compile="off", state_dict_type=kind, async_save=background)
    return make_trainer(strategy, **{"max_epochs": 1, **options})


def weights(path: Path) -> Optional[torch.Tensor]:
    """A weight of a complete checkpoint."""
    if is_sharded_checkpoint(path):
        state, _ = load_sharded(path, {"state_dict": Linear().state_dict()}, ["optimizer_0"], True)
        assert state["optimizer_0"]["param_groups"]
        return state["state_dict"]["net.weight"]
    state = torch.load(path, weights_only=True)
    assert state["optimizer_states"][0]["param_groups"]
    return state["state_dict"]["net.weight"]


def in_process(function: Callable[[], int], seconds: Optional[float] = None) -> int:
    """Call ``function`` in a forked process, which may be killed after some seconds: its exit status."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = function()
        finally:
            os._exit(status)
    if seconds is not None:
        time.sleep(seconds)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def overwrites(kind: str, cases: int, seed: int, folder: Path) -> int:
    """One checkpoint takes the place of another one: afterwards one of the two is there, whole."""
    made = trainer(kind)
    made.fit(Linear(), classification_data())
    path, module = folder / "model.ckpt", made.lightning_module
    chance = random.Random(seed)

    def write(value: float, at: int = -1, happens: Callable[[], None] = die) -> int:
        nonlocal operations
        with torch.no_grad():
            module.net.weight.fill_(value)
        interrupter.start(folder, at, happens)
        try:
            made.save_checkpoint(path)
        except CheckpointWriteError as error:
            assert "No space left" in str(error), error
            return FAILED
        finally:
            operations = interrupter.stop()
        return 0

    operations = 0
    write(0.0)
    write(0.0)
    started = time.perf_counter()
    write(0.0)
    duration = time.perf_counter() - started
    points: list[Any] = [(happens, at) for happens in (die, fail) for at in range(1, operations + 1)]
    points = chance.sample(points, min(len(points), cases - 3))
    points += [(None, chance.uniform(0, 1.2 * duration)) for _ in range(cases - len(points))]
    for number, (happens, when) in enumerate(points, 1):
        before = weights(path)[0, 0].item()

        def case(number: int = number, happens: Any = happens, when: Any = when) -> int:
            return write(float(number)) if happens is None else write(float(number), when, happens)

        status = in_process(case, when if happens is None else None)
        where = f"{happens.__name__ if happens else 'killed'} at {when}: status {status}"
        expected = {None: (0, signal.SIGKILL), die: (signal.SIGKILL,), fail: (0, FAILED << 8)}
        assert status in expected[happens], where
        found = weights(path)
        assert (found == found[0, 0]).all() and found[0, 0].item() in ((number, before) if status else (number,)), where
        left = set(os.listdir(folder)) - {path.name}
        assert all(name.startswith(".model.ckpt.") for name in left), where
        failed_to_clean = happens is fail and status == 0  # what could not be read or removed stays for the next one
        assert status == signal.SIGKILL or failed_to_clean or not left, f"{where}: {left} was not cleaned up"
    return len(points)


def training(kind: str, cases: int, seed: int, folder: Path) -> int:
    """Training that saves after each step is killed: every checkpoint that can be seen is whole, and there is one."""
    chance = random.Random(seed)
    for number in range(cases):
        here = folder / str(number)

        def train(here: Path = here) -> int:
            callback = ModelCheckpoint(
                here, monitor="step", mode="max", filename="{step}", every_n_train_steps=1, save_top_k=2, save_last=True
            )
            trainer(kind, max_epochs=100, callbacks=[callback], enable_checkpointing=True).fit(
                Linear(), classification_data()
            )
            return 0

        in_process(train, chance.uniform(0.1, 2.0))
        visible = [path for path in here.iterdir() if not path.name.startswith(".")] if here.exists() else []
        for path in visible:
            assert weights(path) is not None
        if (here / "last.ckpt").exists():
            resumed = trainer(kind, max_epochs=101)
            resumed.fit(Linear(), classification_data(), ckpt_path=here / "last.ckpt")
            assert resumed.global_step >= 3
    return cases


if __name__ == "__main__":
    torch.set_num_threads(1)
    seed, folder, *jobs = sys.argv[1:]
    done = {}
    for job in jobs:
        what, kind, cases = job.split(":")
        here = Path(folder) / f"{what}-{kind}"
        here.mkdir()
        done[job] = {"overwrites": overwrites, "training": training}[what](kind, int(cases), int(seed), here)
    print(json.dumps(done))
