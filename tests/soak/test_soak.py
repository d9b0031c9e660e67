"""The long fit of ``make soak``, in short."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_a_hundred_steps_leave_nothing_behind(tmp_path: Path) -> None:
    """In a process of its own, where nothing else has allocated memory or opened files."""
    path = tmp_path / "soak.json"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.soak.run", "--steps", "100", "--output", str(path)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(path.read_text())
    assert found["growth"]["graphs"] == 0 and not found["not freed"]
    assert len(found["checkpoints kept"]) == 2
