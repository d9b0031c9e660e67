"""What killed writes left is told from what is written now."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_thunder_strategy.distributed import leftovers
from lightning_thunder_strategy.distributed.files import beside, replacing
from lightning_thunder_strategy.distributed.leftovers import hidden_name, stale

WRITER = """
import sys, time
from pathlib import Path
from lightning_thunder_strategy.distributed.leftovers import hidden_name
for folder in (False, True):
    path = hidden_name(Path(sys.argv[1]))
    path.mkdir() if folder else path.write_text("half")
    (path / "shard" if folder else path).write_text("half")
hidden_name(Path(sys.argv[1]), "old").write_text("the one before")
print("written", flush=True)
time.sleep(100)
"""


@pytest.fixture
def writer(tmp_path: Path):
    """A process that writes a file and a folder for ``model.ckpt``, and has moved an old one away."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "model.ckpt")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "written\n"
        yield process
    finally:
        process.kill()
        process.wait()


def kinds(paths: list[Path]) -> list[str]:
    return sorted(path.suffix for path in paths)


def test_the_next_save_removes_what_a_killed_one_left(tmp_path: Path, writer: subprocess.Popen) -> None:
    (tmp_path / ".notes.partial").write_text("a user's")
    assert stale(tmp_path) == [], "it is being written"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert kinds(stale(tmp_path)) == [".partial", ".partial"], "the old one may be the only one"
    path = tmp_path / "model.ckpt"
    with replacing(path, beside(path)) as temporary:
        assert kinds(list(tmp_path.glob(".model*"))) == [".old"]
        temporary.write_text("new")
        assert stale(tmp_path)[0].suffix == ".old" if path.exists() else stale(tmp_path) == []
    assert path.read_text() == "new"
    assert kinds(stale(tmp_path)) == [".old"], "now it is not"
    beside(path)
    assert sorted(item.name for item in tmp_path.iterdir()) == [".notes.partial", "model.ckpt"]


def test_a_process_that_has_got_the_number_of_a_dead_one_is_another(tmp_path: Path) -> None:
    own = hidden_name(tmp_path / "model.ckpt")
    own.touch()
    started = leftovers._process(os.getpid())
    other = own.with_name(own.name.replace(started, f"{os.getpid()}-1"))
    other.touch()
    assert stale(tmp_path) == [other]


def test_writes_of_another_machine_count_as_dead_after_an_hour(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(leftovers, "_machine", lambda: "0123abcd")
    path = hidden_name(tmp_path / "model.ckpt")
    monkeypatch.undo()
    path.mkdir()
    (path / "shard").touch()
    long_ago = time.time() - 2 * 3600
    os.utime(path, (long_ago, long_ago))
    assert stale(tmp_path) == [], "a shard has just been written"
    os.utime(path / "shard", (long_ago, long_ago))
    assert stale(tmp_path) == [path]


def test_long_names_stay_within_what_a_file_system_takes(tmp_path: Path) -> None:
    path = tmp_path / f"{'ä' * 120}.ckpt"
    hidden_name(path).touch()
    assert stale(tmp_path) == []
