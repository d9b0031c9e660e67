"""Something happens to one rank of two: the other one ends soon, says which, and the last checkpoint loads."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.distributed.ranks import ROOT

KILLED_SAVING = ("save:sharded:0:zero3", "save:sharded:1:zero3", "save:full:0:tp", "save:async-sharded:1:zero3")
KILLED = ("step:sharded:1:zero3", "step:full:0:tp", "collective:full:1:zero2", "collective:full:1:tp")
RAISES = ("raises:full:1:zero3", "raises:full:0:tp")
DISK = ("disk:full:0:zero3", "disk:sharded:1:tp", "disk:async-full:0:ddp", "disk:async-sharded:1:zero3")
CASES = (*KILLED_SAVING, *KILLED, *RAISES, *DISK)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, dict]:
    """All cases at once: they spend their time on waiting."""
    wanted = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]
    command = [sys.executable, "-m", "tests.distributed.faults", str(tmp_path_factory.mktemp("faults")), *wanted]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stderr[-5000:]
    return json.loads(ended.stdout.splitlines()[-1])


def of(case: str, seen: dict[str, dict]) -> tuple[dict, int, dict]:
    """What was found, the victim, and what the other rank saw."""
    found, victim = seen[case], int(case.split(":")[2])
    assert found["status"][1 - victim] == 0 and found["loads"], found
    other = found["seen"][1 - victim]
    assert other["seconds"] < 50, found
    return found, victim, other


@pytest.mark.parametrize("case", KILLED_SAVING)
def test_a_rank_killed_in_a_save_is_named_and_nothing_is_left(case: str, seen: dict[str, dict]) -> None:
    found, victim, other = of(case, seen)
    assert found["status"][victim] == signal.SIGKILL
    told = f"Rank {victim} ended or stopped while the checkpoint"
    if "async" in case:  # training has gone on until it needed the other one
        assert f"Rank {victim} " in other["error"], found
        assert other["error"].startswith("CheckpointWriteError") or any(told in text for text in other["warnings"])
    else:
        assert other["error"].startswith(f"CheckpointWriteError: {told}"), found
        assert "step=2.ckpt" in other["error"]
    assert found["left"] == ["step=1.ckpt"], found


@pytest.mark.parametrize("case", KILLED)
def test_a_rank_killed_in_a_step_or_a_collective_is_named(case: str, seen: dict[str, dict]) -> None:
    found, victim, other = of(case, seen)
    assert found["status"][victim] == signal.SIGKILL
    assert f"Rank {victim}" in other["error"] and "ended" in other["error"], found
    assert found["left"] == ["step=1.ckpt", "step=2.ckpt"], found


@pytest.mark.parametrize("case", RAISES)
def test_a_rank_that_raises_is_named_with_its_error(case: str, seen: dict[str, dict]) -> None:
    found, victim, other = of(case, seen)
    assert found["seen"][victim]["error"] == "ValueError: of the user", found
    assert f"Rank {victim}" in other["error"], found
    if victim != 0:  # which keeps what the ranks tell each other
        assert f"Rank {victim} failed with ValueError: of the user." in other["error"]
    assert found["left"] == ["step=1.ckpt", "step=2.ckpt"], found


@pytest.mark.parametrize("case", DISK)
def test_a_file_that_cannot_grow_is_an_error_on_all_ranks(case: str, seen: dict[str, dict]) -> None:
    found, _, _ = of(case, seen)
    for told in found["seen"]:
        assert told["error"].startswith("CheckpointWriteError: The checkpoint"), found
        assert "step=2.ckpt could not be written: " in told["error"] and "File too large" in told["error"], found
    assert found["left"] == ["step=1.ckpt"], found
