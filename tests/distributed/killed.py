"""Run as a script: groups of two processes save while they train, and one of each is killed inside a save.

Prints, for each case, what the other one saw, as JSON. Processes are forked when everything is imported.

Usage: python -m tests.distributed.killed FOLDER TYPE:VICTIM...   (such as sharded:1)
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_thunder_strategy.distributed.checkpoint import is_sharded_checkpoint, load_sharded
from tests.distributed.models import make
from tests.distributed.ranks import free_port
from tests.distributed.training import PATIENCE, loader, thunder, trainer

LAST = "step=1.ckpt"
DEADLINE = 60  # seconds


def die_writing(folder: Path, words: str) -> None:
    """From now on this process is killed when it opens a file with one of the words in its path for writing."""

    def hook(event: str, args: tuple) -> None:
        path = str(args[0]) if event == "open" else ""
        if path.startswith(str(folder)) and all(word in path for word in words.split()) and "r" not in str(args[1]):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def rank(number: int, kind: str, victim: int, folder: Path, port: int) -> None:
    """Train three steps with a save after each; the victim is killed in the second one."""
    os.environ.update(
        RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="tests",
    )  # fmt: skip
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=PATIENCE)
    if number == victim:
        die_writing(folder, f"step=2 partial {'distcp' if kind == 'sharded' else ''}")
    callback = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    made = trainer(
        thunder("zero3", compile="off", state_dict_type=kind), callbacks=[callback], enable_checkpointing=True,
        max_steps=3, limit_val_batches=0,
    )  # fmt: skip
    module, data = make("smooth")
    seen = {"error": "", "seconds": 0.0}
    started = time.monotonic()
    try:
        made.fit(module, loader(data, 2))
    except Exception as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    seen["seconds"] = time.monotonic() - started
    (folder / "seen.json").write_text(json.dumps(seen))


def main(folder: Path, cases: list[str]) -> None:
    own, processes, results = os.getpid(), {}, {}
    try:
        for case in cases:
            kind, victim = case.split(":")
            here, port = folder / case.replace(":", "-"), free_port()
            here.mkdir()
            for number in range(2):
                child = os.fork()
                if child == 0:
                    rank(number, kind, int(victim), here, port)
                    return
                processes[child] = (case, number)
        ended, deadline = {}, time.monotonic() + DEADLINE
        while len(ended) < len(processes) and time.monotonic() < deadline:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child:
                ended[processes[child]] = status
            time.sleep(0.05)
        for case in cases:
            here = folder / case.replace(":", "-")
            results[case] = {
                "status": [ended.get((case, number)) for number in range(2)],
                "left": sorted(path.name for path in here.iterdir() if path.name != "seen.json"),
                "loads": loads(here / LAST),
                **json.loads((here / "seen.json").read_text()),
            }
        print(json.dumps(results))
    finally:
        if os.getpid() == own:
            for child, which in processes.items():
                if which not in ended:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)


def loads(path: Path) -> bool:
    """Whether a checkpoint is complete: weights and what the optimizer keeps."""
    plain = make("smooth")[0].state_dict()
    if is_sharded_checkpoint(path):
        state, metadata = load_sharded(path, {"state_dict": plain}, ["optimizer_0"], True)
    else:
        state = metadata = torch.load(path, weights_only=True)
    return state["state_dict"].keys() == plain.keys() and metadata["global_step"] == 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
