"""The ways to start processes: Lightning's subprocesses, spawn, and torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_thunder_strategy import ThunderFSDPStrategy
from tests.distributed import launched
from tests.distributed.models import vectors
from tests.distributed.ranks import ROOT, end, free_port

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
WAYS = {"popen": ("ddp", "popen"), "spawn": ("zero3", "spawn"), "torchrun": ("zero3", "popen")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: Any) -> dict[str, tuple[Path, int, str]]:
    """All ways at once: they spend their time on starting. One that found its port taken starts again."""
    found = started(list(WAYS), tmp_path_factory)
    taken = [way for way, (_, code, log) in found.items() if code and "address already in use" in log.lower()]
    return {**found, **(started(taken, tmp_path_factory) if taken else {})}


def started(ways: list[str], tmp_path_factory: Any) -> dict[str, tuple[Path, int, str]]:
    """Folder, exit code and output of each way."""
    processes = {}
    for way in ways:
        kind, start_method = WAYS[way]
        folder = tmp_path_factory.mktemp(way)
        command = [launched.__file__, kind, start_method, str(folder)]
        command = [*TORCHRUN, str(free_port()), *command] if way == "torchrun" else [sys.executable, *command]
        variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
        log = open(folder / "log", "wb")  # noqa: SIM115 - open as long as the process
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, cwd=folder, start_new_session=True)
        processes[way] = (folder, process)
    try:
        return {
            way: (folder, process.wait(timeout=240), (folder / "log").read_text(errors="replace"))
            for way, (folder, process) in processes.items()
        }
    finally:
        for _, process in processes.values():
            end(process)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_processes_are_started_and_train(way: str, runs: dict[str, tuple[Path, int, str]]) -> None:
    folder, code, log = runs[way]
    assert code == 0, log[-5000:]
    notes = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [note["rank"] for note in notes] == [0, 1]
    assert {note["world_size"] for note in notes} == {2} and notes[0]["pid"] != notes[1]["pid"]
    assert {note["graphs"] for note in notes} == {1}
    assert notes[0]["loss"] == notes[1]["loss"]
    assert not set(notes[0]["rows"]) & set(notes[1]["rows"]), "each rank sees its own part of the data"
    together = torch.tensor(notes[0]["rows"] + notes[1]["rows"]).sort().values
    torch.testing.assert_close(together, vectors().tensors[1].sort().values)
    expected = {"popen": "_SubprocessScriptLauncher", "torchrun": "_SubprocessScriptLauncher"}
    assert notes[0]["launcher"] == expected.get(way, "_MultiProcessingLauncher")


@pytest.mark.timeout(600)
def test_all_ways_give_the_same_weights_in_the_main_process(runs: dict[str, tuple[Path, int, str]]) -> None:
    results = {way: json.loads((runs[way][0] / "result0.json").read_text()) for way in WAYS}
    untrained = launched.Smooth().state_dict()
    for way, result in results.items():
        assert result["weights"].keys() == untrained.keys()
        for name, value in result["weights"].items():
            torch.testing.assert_close(
                torch.tensor(value), torch.tensor(results["popen"]["weights"][name]), rtol=1e-5, atol=1e-6,
                msg=lambda text, way=way, name=name: f"{way}, {name}: {text}",
            )  # fmt: skip


@pytest.mark.timeout(600)
def test_processes_that_stay_serve_later_stages_and_trainers(runs: dict[str, tuple[Path, int, str]]) -> None:
    popen, torchrun = (json.loads((runs[way][0] / "result0.json").read_text()) for way in ("popen", "torchrun"))
    assert popen["steps"] == torchrun["steps"] == 3
    assert abs(popen["val"] - torchrun["val"]) < 1e-5


def test_spawned_processes_must_bring_whole_weights_back() -> None:
    with pytest.raises(ValueError, match="unshard_on_teardown=False is not allowed with start_method='spawn'"):
        ThunderFSDPStrategy(start_method="spawn", unshard_on_teardown=False)
