"""The examples run as their first lines say, and do what they say."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from litgpt import GPT, Config

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "localhost:0",
]


def run(*command: str, folder: Path, timeout: float = 240) -> str:
    """What a Python program prints. Nothing of it is left running."""
    paths = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-6000:]
    return output


def number(pattern: str, text: str) -> float:
    return float(re.search(pattern + r"\s*([0-9.]+)", text)[1])


@pytest.mark.timeout(600)
def test_the_demo_learns_and_its_checkpoint_is_that_of_a_plain_model(tmp_path: Path) -> None:
    small = ["--steps", "60", "--layers", "1", "--width", "64", "--length", "64", "--batch-size", "32"]
    small += ["--learning-rate", "0.01", "--executors", "eager"]
    output = run(str(EXAMPLES / "pretrain_text.py"), *small, folder=tmp_path)
    entropy, loss = number("unigram entropy of the text:", output), number("final validation loss:", output)
    assert 2.5 < entropy < 4
    assert loss < entropy - 0.5
    assert [int(step) for step in re.findall(r"step (\d+): loss", output)] == [15, 30, 45, 60]
    assert "All distributed processes registered. Starting with 2 processes" in output
    assert re.search(r"reduce_scatter_tensor", output)  # from the compile report
    assert "0 breaks" in output
    assert torch.load(tmp_path / "checkpoints/pretrain_text.ckpt", weights_only=True)["global_step"] == 60


def test_an_operator_and_a_fusion_executor_of_ones_own(tmp_path: Path) -> None:
    output = run(str(EXAMPLES / "own_operator.py"), folder=tmp_path)
    assert "swish runs silu" in output and "swish declined silu (1 time): it takes matrices" in output
    assert re.search(r"operations: .*swish 3, pointwise \d", output)
    assert float(re.search(r"largest difference from eager PyTorch, loss and gradients: (\S+)", output)[1]) < 1e-5


@pytest.mark.timeout(600)
def test_litgpt_pretrains_under_torchrun_and_its_model_file_is_plain(tmp_path: Path) -> None:
    options = ["--steps", "4", "--length", "32", "--executors", "eager"]
    output = run(*TORCHRUN, str(EXAMPLES / "pretrain_litgpt.py"), *options, folder=tmp_path)
    assert "Final evaluation | val loss" in output
    assert "all keys match" in output
    folder = tmp_path / "checkpoints/pretrain_litgpt/final"
    config = Config(**yaml.safe_load((folder / "model_config.yaml").read_text()))
    GPT(config).load_state_dict(torch.load(folder / "lit_model.pth", weights_only=True)["model"], strict=True)


@pytest.mark.timeout(600)
def test_a_config_file_switches_from_eager_ddp_to_our_strategy(tmp_path: Path) -> None:
    few = ["--trainer.max_steps", "4", "--trainer.val_check_interval", "4", "--trainer.limit_val_batches", "2"]
    few += ["--trainer.enable_progress_bar", "false", "--trainer.callbacks", "tests.examples.losses.PrintLosses"]
    losses = {}
    for name in ("ddp_eager", "fsdp"):
        extra = ["--trainer.strategy.executors", "[eager]"] if name == "fsdp" else []
        config = str(EXAMPLES / f"cli/{name}.yaml")
        output = run(str(EXAMPLES / "cli/main.py"), "fit", "--config", config, *few, *extra, folder=tmp_path)
        losses[name] = re.findall(r"losses: (.*)", output)
        assert ("Compile report" in output) == (name == "fsdp")
    assert losses["fsdp"] == losses["ddp_eager"]
    assert len(losses["fsdp"]) == 1


def test_the_two_configs_differ_only_in_the_strategy() -> None:
    eager, ours = (yaml.safe_load((EXAMPLES / f"cli/{name}.yaml").read_text()) for name in ("ddp_eager", "fsdp"))
    assert eager["trainer"].pop("strategy") == "ddp"
    assert ours["trainer"].pop("strategy")["class_path"] == "lightning_thunder_strategy.ThunderFSDPStrategy"
    assert eager == ours
