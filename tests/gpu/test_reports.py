"""Faults that users have reported and that only a GPU can show; ``docs/reports.md`` lists them with the others.

python -m pytest tests/gpu                         # on a machine with one CUDA GPU
REPORTS_DEVICE=cpu python -m pytest tests/gpu      # the same code without it: shows that the tests run, not more
"""

import copy
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.precision import LowPrecisionLinears

DEVICE = os.environ.get("REPORTS_DEVICE", "cuda")
pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(400),
]
on_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def mlp(width: int, out: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, out)).to(DEVICE, dtype)


@on_cuda
def test_cuda_graphs_are_recorded_for_each_length() -> None:  # pytorch#188150
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8)).cuda()
    config = lts.CompileConfig(cudagraphs=True)
    compiled = lts.compile(copy.deepcopy(model), executors=["inductor"], config=config)
    for length in (16, 24, 40, 56, 72, 88, 16, 40):
        x = torch.randn(4, length, 64, device="cuda")
        for _ in range(3):  # the second call records, the third replays
            model.zero_grad(), compiled.zero_grad()
            torch.compiler.cudagraph_mark_step_begin()
            model(x).square().mean().backward()
            compiled(x).square().mean().backward()
        for ours, theirs in zip(compiled.parameters(), model.parameters()):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    (step,) = lts.explain(compiled).to_dict()["steps"].values()
    assert step["graphs"] <= 2, "one of static shapes, one of symbolic ones"


def train(precision: str, steps: int, checkpointed: bool = False) -> list[float]:
    """Losses of a small classifier whose linears compute in ``precision``; an empty text is bf16."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = nn.ModuleList([mlp(256, 256), mlp(256, 128)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        x = x + (checkpoint(model[0], x, use_reentrant=False) if checkpointed else model[0](x))
        return F.cross_entropy(model[1](x).float(), y)

    transforms = [LowPrecisionLinears(precision, skip=())] if precision else []
    step = lts.compile(loss, executors=["inductor"], transforms=transforms)
    generator = torch.Generator().manual_seed(2)
    centers, losses = torch.randn(128, 256, generator=generator), []
    for _ in range(steps):
        y = torch.randint(128, (512,), generator=generator)
        x = centers[y] + torch.randn(512, 256, generator=generator)
        optimizer.zero_grad()
        found = step(x.to(DEVICE, torch.bfloat16), y.to(DEVICE))
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise", "fp8-block"])
def test_fp8_gives_nan_after_some_steps(precision: str) -> None:  # torchtitan#1056, #865
    ours, theirs = train(precision, 200), train("", 200)
    assert all(value == value and abs(value) < 100 for value in ours)
    last, expected = sum(ours[-20:]) / 20, sum(theirs[-20:]) / 20
    assert abs(last - expected) < 0.1 * sum(theirs[:5]) / 5, (last, expected)


def test_fp8_with_recomputation_loses_or_doubles_its_state() -> None:  # lightning-thunder#1424, #2344
    torch.testing.assert_close(train("fp8", 20, checkpointed=True), train("fp8", 20), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("tokens", "features", "classes"), [(7, 256, 130), (513, 136, 257), (1, 384, 129)])
def test_divisible_by_16_deep_in_the_backward(  # ao#571, #1268, #3111
    tokens: int, features: int, classes: int
) -> None:
    model = mlp(features, classes)
    compiled = lts.compile(copy.deepcopy(model), executors=["inductor"], transforms=[LowPrecisionLinears("fp8")])
    x = torch.randn(tokens, features, device=DEVICE, dtype=torch.bfloat16)
    model(x).square().mean().backward()
    compiled(x).square().mean().backward()
    for ours, theirs in zip(compiled.parameters(), model.parameters()):
        error = (ours.grad - theirs.grad).float().norm() / theirs.grad.float().norm()
        assert error < 0.15, f"{tuple(theirs.shape)}: {error:.3f}"


@pytest.mark.parametrize("executor", ["chunked_loss", "triton"])
def test_a_fused_loss_is_silently_wrong_when_targets_are_ignored(executor: str) -> None:  # Liger#1338
    reason = next((info.reason for info in lts.executors.list() if info.name == executor), "unknown")
    if reason:
        pytest.skip(f"{executor}: {reason}")
    features, classes, rows = 256, 4096, 1000
    x = torch.randn(rows, features, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.05 * torch.randn(classes, features, device=DEVICE)).to(torch.bfloat16).requires_grad_()
    target = torch.randint(classes, (rows,), device=DEVICE)
    target[torch.rand(rows, device=DEVICE) < 0.25] = -100

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), target)

    compiled = lts.compile(loss, executors=[executor, "inductor"])
    expected = F.cross_entropy(F.linear(x.double(), weight.double()), target)
    found = compiled(x, weight)
    torch.testing.assert_close(found.double(), expected, rtol=5e-3, atol=5e-3)
    wanted = torch.autograd.grad(expected, (x, weight))
    for ours, theirs in zip(torch.autograd.grad(found, (x, weight)), wanted):
        assert (ours - theirs).float().norm() < 0.03 * theirs.float().norm()
    assert any(claim.accepted and claim.executor == executor for claim in compiled.record.programs[0].claims)


@on_cuda
def test_slower_than_torch_compile() -> None:  # lightning-thunder#1364, #1366
    model = nn.Sequential(*[mlp(1024, 1024) for _ in range(6)])
    x = torch.randn(4096, 1024, device=DEVICE, dtype=torch.bfloat16)

    def seconds(step: Callable[[Tensor], Any]) -> float:
        for _ in range(5):
            step(x).float().square().mean().backward()
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                step(x).float().square().mean().backward()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return sorted(times)[2]

    theirs = seconds(torch.compile(copy.deepcopy(model)))
    torch._dynamo.reset()
    ours = seconds(lts.compile(copy.deepcopy(model), executors=["inductor"]))
    print(f"torch.compile {theirs:.4f} s, ours {ours:.4f} s for 20 steps, {ours / theirs:.3f} times")
    assert ours < 1.1 * theirs
