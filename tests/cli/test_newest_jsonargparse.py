"""LitGPT holds jsonargparse back at 4.41; without it users get a newer one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

VERSION = "4.53.0"


@pytest.mark.timeout(240)
def test_the_command_line_works_with_the_newest_jsonargparse_too(tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    installed = subprocess.run([*install, f"jsonargparse=={VERSION}"], capture_output=True, text=True, timeout=90)
    if installed.returncode != 0:
        pytest.skip(f"jsonargparse {VERSION} cannot be installed here: {installed.stderr.strip().splitlines()[-1]}")
    root = Path(__file__).parent.parent.parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root), os.environ.get("PYTHONPATH", "")])}
    version = [sys.executable, "-c", "import jsonargparse; print(jsonargparse.__version__)"]
    assert subprocess.run(version, env=env, capture_output=True, text=True).stdout.strip() == VERSION
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(root / "tests/cli/test_cli.py")]
    tests = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True)
    assert tests.returncode == 0, tests.stdout[-6000:]
