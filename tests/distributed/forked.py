"""Scenarios about the processes that ranks are."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

MARK = "FORKED_MARK"


def describe() -> dict:
    """What must be a rank's own."""
    return {
        "pid": os.getpid(), "group": os.getpgid(0), "session": os.getsid(0), "parent": os.getppid(),
        "rank": torch.distributed.get_rank(), "lightning": rank_zero_only.rank, "hash": hash("a text"),
        "random": (torch.rand(()).item(), numpy.random.rand(), random.random()),
        "mark": os.environ.get(MARK), "folder": os.getcwd(),
        "input": sys.stdin.read(), "threads": torch.get_num_threads(),
        "command": Path("/proc/self/cmdline").read_text(),
    }  # fmt: skip


def sleep_with_a_child() -> None:
    """Say so in the folder that the environment names, and go on for long."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    path = Path(os.environ[MARK]) / f"{torch.distributed.get_rank()}.tmp"
    path.write_text(f"{os.getpid()} {child.pid}")
    path.rename(path.with_suffix(".pids"))
    time.sleep(300)
