"""Training under ``torchrun --max-restarts`` goes on from the last checkpoint after a rank was killed.

Starting four processes takes too long for the test suite: ``make faults``.
"""

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.distributed import restarted
from tests.distributed.ranks import ROOT, end, free_port
from tests.distributed.test_launching import TORCHRUN


@pytest.mark.timeout(300)
def test_a_killed_rank_is_started_again_with_the_others(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN, str(free_port()), "--max-restarts", "1", "--monitor-interval", "0.1"]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            [*command, restarted.__file__, str(tmp_path), "sharded"],
            env=env, stdout=log, stderr=log, cwd=tmp_path, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=200)
        finally:
            process.terminate()  # torchrun ends its processes, which are not in its group
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=40)
            end(process)
    assert code == 0, (tmp_path / "log").read_text(errors="replace")[-5000:]
    steps = json.loads((tmp_path / "steps.json").read_text())
    assert steps == list(range(restarted.KILLED_AT + 1, restarted.STEPS + 1)), "it goes on where it was"
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["last.ckpt", f"step={restarted.STEPS}.ckpt"]
    assert not list(tmp_path.glob(".*.partial"))
