"""Fabric on two ranks."""

import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_thunder_strategy import fabric as thunder
from tests.distributed.checks import Group
from tests.distributed.fabric_scenarios import Odd, batch, objective
from tests.distributed.ranks import run_ranks
from tests.strategies.fabric_helpers import seeded

GROUP = Group("fabric_scenarios", "fabric_checkpoints", timeout=560)


@pytest.mark.timeout(600)
@GROUP.parametrize()
def test_fabric(check: str, request: pytest.FixtureRequest) -> None:
    GROUP.assert_passed(check, request)


def test_a_checkpoint_moves_between_two_ranks_and_one(tmp_path: Path) -> None:
    alone = train_alone_on_the_same_data(6)
    source, results = None, []
    for number, world_size in enumerate((2, 1, 2)):
        target = tmp_path / str(number)
        target.mkdir()
        env = {"FABRIC_TO": str(target), **({"FABRIC_FROM": str(source)} if source else {})}
        scenario = "fabric_checkpoints:resume_and_save"
        results.append(run_ranks(scenario, world_size=world_size, env=env)[scenario][0])
        source = target
    for name in ("full", "sharded"):
        assert [result[name]["step"] for result in results] == [2, 4, 6]
        torch.testing.assert_close(results[-1][name]["weights"], alone, rtol=1e-5, atol=1e-6)
    command = [sys.executable, "-m", "lightning.fabric.utilities.consolidate_checkpoint", str(source / "sharded")]
    subprocess.run([*command, "--output_file", str(tmp_path / "one.ckpt")], check=True, capture_output=True)
    consolidated = torch.load(tmp_path / "one.ckpt", weights_only=True)
    torch.testing.assert_close(consolidated["model"], results[-1]["sharded"]["weights"], rtol=0, atol=0)
    assert consolidated["step"] == 6


def train_alone_on_the_same_data(steps: int) -> dict:
    module = seeded(Odd)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    for number in range(steps):
        objective(module, batch(number, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(module.state_dict())


@pytest.mark.timeout(180)
def test_processes_can_be_spawned(tmp_path: Path) -> None:
    strategy = thunder.ThunderFSDPStrategy(executors=["eager"], start_method="spawn")
    runner = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    runner.launch(train_in_a_started_process, tmp_path / "file")
    alone = train_alone_on_the_same_data(2)
    torch.testing.assert_close(torch.load(tmp_path / "file", weights_only=True)["model"], alone)


def train_in_a_started_process(runner: L.Fabric, path: Path) -> None:
    module = seeded(Odd)
    model, optimizer = runner.setup(module, torch.optim.AdamW(module.parameters(), lr=0.05))
    for number in range(2):
        runner.backward(objective(model, batch(number, 0)))
        optimizer.step()
        optimizer.zero_grad()
    runner.save(path, {"model": model})
