"""``python -m lightning_thunder_strategy plan``."""

import json
from pathlib import Path

import pytest

from lightning_thunder_strategy.cli.main import main

PROGRAM = """
import sys
import lightning as L
import torch
from torch.utils.data import DataLoader
import lightning_thunder_strategy as lts
from tests.distributed.planned import Small, batch_of

strategy = lts.ThunderFSDPStrategy(sharding=sys.argv[1], executors=["eager"], report=True) if sys.argv[1:] else "ddp"
module = Small()
assert all(parameter.is_meta for parameter in module.parameters())
trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, precision="bf16-mixed", max_epochs=1)
trainer.fit(module, DataLoader([batch_of()] * 2, batch_size=None))
raise SystemExit("the program went on")
"""


def test_a_program_is_planned_up_to_its_first_step(tmp_path: Path, capsys) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    assert main(["plan", "--devices", "16", "--json", str(tmp_path / "plan.json"), "--", str(script), "zero2"]) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["devices"] == 16 and plan["fits"] and plan["strategy"] == "ThunderFSDPStrategy"
    assert {item["ranks"] for item in plan["collectives"]} == {16}
    assert {item["nodes"] for item in plan["collectives"]} == {2}
    assert "rank 0 of 16 x H100 on 2 nodes" in capsys.readouterr().out
    assert not (tmp_path / "lightning_logs").exists()

    assert main(["plan", "--", str(script)]) == 1
    assert _one_line(capsys.readouterr().err, "the Trainer's strategy is DDPStrategy")


def test_errors_are_one_line(tmp_path: Path, capsys) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("print('no Trainer')")
    for arguments, message in (
        (["--", str(script)], "ended without a call of Trainer.fit"),
        (["--", str(tmp_path / "missing.py")], "there is no file"),
        (["--devices", "12", "--", str(script)], "devices=12 is not a multiple of devices_per_node=8"),
        (["--png", "memory.pdf", "--", str(script)], "let it end in .png"),
    ):
        assert main(["plan", *arguments]) == 1
        assert _one_line(capsys.readouterr().err, message)


def _one_line(printed: str, message: str) -> bool:
    lines = [line for line in printed.splitlines() if line.startswith("plan: ")]
    return len(lines) == 1 and message in lines[0]


def test_help_names_every_option(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    printed = capsys.readouterr().out
    for option in ("--devices", "--devices-per-node", "--gpu", "--interconnect", "--efficiency", "--png", "--json"):
        assert option in printed


CLI = """
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader
import lightning_thunder_strategy
from tests.distributed.planned import Small, batch_of


class Tied(Small):
    def __init__(self):
        super().__init__()
        weight = nn.Parameter(next(self.parameters()).new_empty(64, 32))
        self.one, self.other = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
        self.one.weight = weight
        self.other.weight = weight

    def setup(self, stage):
        if FAILS:
            raise ValueError("the data folder is missing")

    def train_dataloader(self):
        return DataLoader([batch_of()] * 2, batch_size=None)


options = {"strategy": "thunder_fsdp", "accelerator": "cpu", "logger": "false"}
LightningCLI(Tied, args=["fit", *(f"--trainer.{key}={value}" for key, value in options.items())])
"""


def test_a_lightning_cli_is_planned_and_nothing_is_written(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "main.py"
    sizes = []
    for tied in (True, True, False):
        text = CLI.replace("FAILS", "False")
        script.write_text(text if tied else text.replace("self.other.weight = weight", "pass"))
        assert main(["plan", "--devices", "2", "--json", "plan.json", "--", str(script)]) == 0, capsys.readouterr().err
        sizes.append(json.loads((tmp_path / "plan.json").read_text())["memory"]["parameters"])
    assert sizes[0] == sizes[1] and sizes[2] - sizes[0] == 64 * 32 * 4 // 2
    assert {path.name for path in tmp_path.iterdir()} <= {"main.py", "plan.json", "__pycache__"}


def test_an_error_of_the_program_is_what_is_said(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "main.py"
    script.write_text(CLI.replace("FAILS", "True"))
    assert main(["plan", "--devices", "2", "--", str(script)]) == 1
    assert _one_line(capsys.readouterr().err, "the data folder is missing")
