"""Runs scenario functions on several real processes and returns what each rank returned."""

import faulthandler
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Optional

from tests.distributed import forking
from tests.distributed.forking import ROOT

AFTER_THE_FIRST = 180  # seconds that other ranks may go on when one has ended


class RanksFailed(AssertionError):
    """A rank raised, or the ranks did not end in time."""


def run_ranks(
    *scenarios: str,
    world_size: int = 2,
    timeout: float = 240,
    check: bool = True,
    env: Optional[dict] = None,
    patience: float = 60,
) -> dict[str, list[Any]]:
    """Run scenarios one after another in one group of processes.

    Args:
        scenarios: ``"module:function"`` in ``tests.distributed``; each function takes no arguments and returns plain
            data or tensors. Starting processes costs seconds, so give several scenarios to one call.
        world_size: How many processes.
        timeout: Seconds after which all of them are ended.
        check: Raise if a scenario raised or did not end; otherwise its result is a text that says so.
        env: More environment variables.
        patience: Seconds that a rank waits for another in one collective.

    Returns:
        For each scenario, one result a rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        ports = [str(free_port()) for _ in scenarios]
        processes = []
        inherited = {key: value for key, value in os.environ.items() if key != "PL_GLOBAL_SEED"}  # of another test
        for rank in range(world_size):
            variables = {
                **inherited, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                "TORCHELASTIC_RUN_ID": "tests", "OMP_NUM_THREADS": "1", "RANKS_PORTS": ",".join(ports),
                "RANKS_PATIENCE": str(patience),
                "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", **(env or {}),
            }  # fmt: skip
            log = Path(folder) / f"log{rank}"
            processes.append(forking.started(rank, [folder, *scenarios], variables, log, Path(folder)))
        ended = _wait(processes, timeout)
        logs = [(Path(folder) / f"log{rank}").read_text(errors="replace")[-6000:] for rank in range(world_size)]
        if not ended and check:
            raise RanksFailed(f"The ranks did not end within {timeout} s.\n" + _joined(logs))
        return _collect(Path(folder), scenarios, world_size, check, logs)


def _collect(folder: Path, scenarios: Sequence[str], world_size: int, check: bool, logs: list[str]) -> dict[str, list]:
    import torch

    results: dict[str, list[Any]] = {}
    for index, scenario in enumerate(scenarios):
        files = [folder / f"result{index}.{rank}" for rank in range(world_size)]
        lost = ("lost", f"The rank did not get to it.\n{_joined(logs)}")
        values = [torch.load(file, weights_only=False) if file.exists() else lost for file in files]
        failed = [f"rank {rank}: {value}" for rank, (kind, value) in enumerate(values) if kind != "ok"]
        if check and failed:
            raise RanksFailed(f"{scenario} failed.\n" + "\n".join(failed) + "\n" + _joined(logs))
        results[scenario] = [value for _, value in values]
    return results


def _joined(logs: list[str]) -> str:
    return "\n".join(f"--- rank {rank}\n{log}" for rank, log in enumerate(logs))


def _wait(processes: list[Any], timeout: float) -> bool:
    """Wait for all; after the timeout end each by its process group. Nothing is left behind."""
    deadline = time.monotonic() + timeout
    try:
        while time.monotonic() < deadline:
            running = [process for process in processes if process.poll() is None]
            if not running:
                return True
            if len(running) < len(processes):
                deadline = min(deadline, time.monotonic() + AFTER_THE_FIRST)
            processes = running
            time.sleep(0.05)
        return False
    finally:
        for process in processes:
            end(process)


def end(process: subprocess.Popen | forking.Rank) -> None:
    """End a process that leads a process group, and what it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _main(folder: str, scenarios: Sequence[str]) -> None:
    import torch

    faulthandler.enable()  # a crash says where it was
    torch.set_num_threads(1)
    failed = False
    for index, scenario in enumerate(scenarios):
        if failed or not torch.distributed.is_initialized():  # a scenario may leave the process group destroyed
            _connect(os.environ["RANKS_PORTS"].split(",")[index])
        module, function = scenario.split(":")
        started = time.perf_counter()
        try:
            imported = importlib.import_module(f"tests.distributed.{module}")
            outcome: tuple[str, Any] = ("ok", getattr(imported, function)())
        except BaseException:
            outcome = ("error", traceback.format_exc())
        print(f"{scenario}: {outcome[0]} in {time.perf_counter() - started:.1f} s", flush=True)
        failed = _exchange(Path(folder), index, outcome)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _connect(port: str) -> None:
    """A process group whose collectives fail soon if another rank does not come."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ["MASTER_PORT"] = port
    timeout = timedelta(seconds=float(os.environ["RANKS_PATIENCE"]))
    torch.distributed.init_process_group("gloo", timeout=timeout)


def _exchange(folder: Path, index: int, outcome: tuple[str, Any]) -> bool:
    """Write this rank's outcome, and wait for the others': whether one of them failed."""
    import torch

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    temporary = folder / f"result{index}.{rank}.tmp"
    torch.save(outcome, temporary)
    temporary.rename(folder / f"result{index}.{rank}")
    files = [folder / f"result{index}.{other}" for other in range(size)]
    while not all(file.exists() for file in files):
        time.sleep(0.01)
    return any(torch.load(file, weights_only=False)[0] != "ok" for file in files)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
