"""Ranks that are forked are processes like those that are started, and end with what started them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.distributed.forked import MARK
from tests.distributed.ranks import ROOT, RanksFailed, run_ranks


def test_forked_ranks_have_what_is_a_process_s_own() -> None:
    first, second = run_ranks("forked:describe", env={MARK: "one"})["forked:describe"]
    again = run_ranks("forked:describe", env={MARK: "two"})["forked:describe"]
    for rank, found in enumerate((first, second)):
        assert found["pid"] == found["group"] == found["session"]
        assert found["rank"] == found["lightning"] == rank
        assert (found["mark"], found["input"], found["threads"]) == ("one", "", 1)
        assert "tests.distributed.forking" in found["command"] and found["parent"] != os.getpid()
    assert first["folder"] == second["folder"] != os.getcwd() and not Path(first["folder"]).exists()
    assert first["hash"] != second["hash"] or "PYTHONHASHSEED" in os.environ, "as two processes differ"
    assert not set(first["random"]) & set(second["random"])
    for before, after in zip((first, second), again):
        assert before["pid"] != after["pid"] and before["parent"] == after["parent"] and after["mark"] == "two"
        assert not set(before["random"]) & set(after["random"])


def test_variables_that_are_read_at_import_get_processes_of_their_own() -> None:
    (found,) = run_ranks("forked:describe", world_size=1, env={"TORCH_SHOW_CPP_STACKTRACES": "1"})["forked:describe"]
    assert "tests.distributed.ranks" in found["command"] and found["parent"] == os.getpid()


def test_ranks_that_do_not_end_are_ended_with_their_children(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="did not end within 8 s"):
        run_ranks("forked:sleep_with_a_child", env={MARK: str(tmp_path)}, timeout=8)
    assert not _alive(tmp_path)


def test_nothing_is_left_when_the_process_that_runs_ranks_is_killed(tmp_path: Path) -> None:
    code = "from tests.distributed.ranks import run_ranks; run_ranks('forked:sleep_with_a_child', timeout=200)"
    environment = {**os.environ, MARK: str(tmp_path), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    runner = subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True)
    try:
        while len(list(tmp_path.glob("*.pids"))) < 2:
            assert runner.poll() is None
            time.sleep(0.05)
        assert len(_alive(tmp_path)) == 4
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    deadline = time.monotonic() + 20
    while _alive(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(tmp_path)


def _alive(folder: Path) -> list[int]:
    """The processes noted in ``folder`` that run."""
    pids = [int(pid) for path in folder.glob("*.pids") for pid in path.read_text().split()]
    assert len(pids) == 4
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
