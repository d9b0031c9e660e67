"""Steps of optimizers by our Triton kernel on a GPU.

python -m pytest tests/gpu/test_optimizers.py tests/optimizers     # on a machine with one CUDA GPU
"""

import copy
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import lightning_thunder_strategy as lts
from lightning_thunder_strategy import fabric as fabrics
from lightning_thunder_strategy.optimizers.steps import OptimizerSteps
from tests.strategies.modules import Classifier
from tests.strategies.training import classification_data

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"), pytest.mark.timeout(400)]
ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cls", "options"), [(ADAMW, {}), (SGD, {"momentum": 0.9})])
def test_many_parameters_are_one_launch(cls: Any, options: dict, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(33, 65 + index, device="cuda", dtype=dtype)) for index in range(40)]
    exact = [nn.Parameter(parameter.detach().double()) for parameter in ours]
    optimizer, reference = cls(ours, lr=1e-2, **options), cls(exact, lr=1e-2, **options)
    steps = OptimizerSteps("auto", on_error="raise")
    for _ in range(4):
        for parameter, wide in zip(ours, exact):
            parameter.grad = torch.randn_like(parameter)
            wide.grad = parameter.grad.double()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled, steps.taken(optimizer):
            optimizer.step()
        reference.step()
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] *= 0.7
    kernels = [event.name for event in profiled.events() if event.name in ("adam", "sgd")]
    assert 1 <= len(kernels) <= 2, kernels  # two, if not all addresses are multiples of 16 bytes
    assert steps.records[0].to_dict()["parameters"] == {"triton": 40}
    rounding = 8 * torch.finfo(dtype).eps
    for parameter, wide in zip(ours, exact):
        torch.testing.assert_close(parameter.double(), wide.detach(), rtol=rounding, atol=rounding)


def test_trainer_trains_as_with_torchs_own() -> None:
    weights = []
    for value in ("auto", False):
        L.seed_everything(3, verbose=False)
        module = Classifier(dropout=0.0).double()
        trainer = L.Trainer(
            accelerator="cuda", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, precision="64-true", gradient_clip_val=0.1,
            strategy=lts.ThunderStrategy(executors=["eager"], compile_optimizer=value),
        )  # fmt: skip
        trainer.fit(module, classification_data())
        weights.append(module.state_dict())
        reported = lts.explain(trainer).to_dict()["optimizers"]
        assert reported == ([{"name": "AdamW", "parameters": {"triton": 6}, "reasons": {}}] if value else [])
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-9, atol=1e-9)


def test_fabric_with_a_gradient_scaler() -> None:
    weights = []
    start = nn.Linear(16, 16)
    for value in ("auto", False):
        torch.manual_seed(0)
        strategy = fabrics.ThunderStrategy(executors=["eager"], compile="off", compile_optimizer=value)
        runner = L.Fabric(accelerator="cuda", devices=1, strategy=strategy, precision="16-mixed")
        model = copy.deepcopy(start)
        model, optimizer = runner.setup(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
        for _ in range(4):
            optimizer.zero_grad()
            runner.backward(model(torch.randn(8, 16, device="cuda")).square().mean())
            optimizer.step()
        weights.append(model.state_dict())
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)
