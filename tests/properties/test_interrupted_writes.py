"""Checkpoint writes that are killed or fail at any point: the last complete checkpoint always loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KINDS, IN_BACKGROUND = ("full", "sharded"), ("async-full", "async-sharded")
ROOT = Path(__file__).parent.parent.parent
LONG = int(os.environ.get("FUZZ_EXAMPLES", "0"))


@pytest.mark.timeout(0)
def test_the_last_complete_checkpoint_loads(tmp_path: Path) -> None:
    """One is overwritten, or training saves after each step; in one file and in a folder of shards."""
    seed = int.from_bytes(os.urandom(4), "little") if LONG else 0
    jobs = {f"overwrites:{kind}:{LONG or 20}": LONG or 20 for kind in ("full", "sharded")}
    jobs |= {f"training:{kind}:{LONG // 10 or 1}": LONG // 10 or 1 for kind in (*KINDS, *IN_BACKGROUND)}
    command = [sys.executable, "-m", "tests.properties.interrupted_writes", str(seed), str(tmp_path), *jobs]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    env["CUDA_VISIBLE_DEVICES"] = ""  # its processes fork, which CUDA does not survive
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240 + 10 * LONG)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stderr[-3000:]}"
    assert json.loads(ended.stdout.splitlines()[-1]) == jobs
