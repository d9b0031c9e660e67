"""The scripts for several nodes, with two nodes of one process each on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.ranks import end, free_port
from tests.examples.test_examples import EXAMPLES

FEW = [
    "--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--trainer.limit_val_batches", "1",
    "--trainer.enable_progress_bar", "false", "--trainer.strategy.executors", "[eager]",
]  # fmt: skip

SRUN = """#!/usr/bin/env bash
# What srun does: the command once for each task, with its place among them.
processes=()
for task in 0 1; do
  SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_NODEID=$task "$@" & processes+=($!)
done
for process in "${processes[@]}"; do wait "$process" || exit 1; done
"""


def environment(folder: Path, **more: str) -> dict[str, str]:
    paths = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in ranks}
    return {
        **kept, "PYTHONPATH": paths, "PYTHON": sys.executable, "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1", **more,
    }  # fmt: skip


def outputs(commands: list[list[str]], env: dict[str, str], folder: Path) -> str:
    """What commands that run side by side print. Nothing of them is left running."""
    logs = [folder / f"log{index}" for index in range(len(commands))]
    processes = []
    try:
        for command, log in zip(commands, logs):
            with open(log, "wb") as file:
                processes.append(
                    subprocess.Popen(command, cwd=folder, env=env, stdout=file, stderr=file, start_new_session=True)
                )
        codes = [process.wait(timeout=250) for process in processes]
    finally:
        for process in processes:
            end(process)
    text = "\n".join(log.read_text(errors="replace") for log in logs)
    assert codes == [0] * len(commands), text[-6000:]
    return text


def assert_trained(text: str) -> None:
    assert "Starting with 2 processes" in text, text[-3000:]
    assert "`Trainer.fit` stopped: `max_steps=2` reached." in text
    assert "0 breaks" in text and "all_reduce" in text  # among nodes


@pytest.mark.timeout(600)
def test_torchrun_on_each_node(tmp_path: Path) -> None:
    env = environment(tmp_path, HEAD=f"localhost:{free_port()}", DEVICES="1")
    assert_trained(outputs([["bash", str(EXAMPLES / "cli/torchrun.sh"), *FEW]] * 2, env, tmp_path))


@pytest.mark.timeout(600)
def test_a_slurm_job(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    env = environment(
        tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_SUBMIT_DIR=str(tmp_path), SLURM_JOB_ID="41",
        SLURM_JOB_NAME="two_nodes", SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="1", SLURM_NNODES="2",
        SLURM_NODELIST="127.0.0.1", MASTER_PORT=str(free_port()),
    )  # fmt: skip
    few = [*FEW, "--trainer.devices", "1"]
    assert_trained(outputs([["bash", str(EXAMPLES / "cli/slurm.sh"), *few]], env, tmp_path))
