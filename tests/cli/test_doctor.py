"""``python -m lightning_thunder_strategy doctor``."""

import pytest
import torch

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.cli.main import main
from lightning_thunder_strategy.executors.inductor import InductorExecutor


def test_the_doctor_names_every_executor_its_version_and_state(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"torch {torch.__version__}" in text
    for info in lts.executors.list():
        (row,) = [line for line in text.splitlines() if line.startswith(f"│ {info.name} ")]
        assert ("not available" in row) != info.available
        assert info.version is None or info.version in row
    assert 'executors="auto" is ' in text


def test_the_doctor_says_why_not_and_what_to_install(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(InductorExecutor, "unavailable", lambda self: "[No] C++ compiler.")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "not available: [No] C++ compiler." in text and "to install: apt install g++" in text
    assert 'executors="auto" is eager on this machine: inductor cannot run here: [No] C++ compiler.' in text


def test_without_a_command_the_commands_are_listed(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "command" in capsys.readouterr().err
