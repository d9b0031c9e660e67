"""A rank that is killed inside a save: the other one ends soon, says which, and leaves nothing half written."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.distributed.ranks import ROOT

CASES = ("sharded:0", "sharded:1", "full:0")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """All cases at once: they spend their time on waiting."""
    command = [sys.executable, "-m", "tests.distributed.killed", str(tmp_path_factory.mktemp("killed")), *CASES]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stderr[-5000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_a_rank_killed_in_a_save_is_named_and_nothing_is_left(case: str, seen: dict[str, dict]) -> None:
    found, victim = seen[case], int(case[-1])
    assert found["status"][victim] == signal.SIGKILL and found["status"][1 - victim] == 0, found
    assert found["error"].startswith(f"CheckpointWriteError: Rank {victim} ended or stopped while the checkpoint"), (
        found
    )
    assert "step=2.ckpt" in found["error"] and found["seconds"] < 40
    assert found["left"] == ["step=1.ckpt"] and found["loads"], found
