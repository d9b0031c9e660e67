"""Low precision on a GPU: which products are native, and that they give the values of the emulation."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.precision import RECIPES, LowPrecisionLinears

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NATIVE = ("fp8", "fp8-rowwise", "fp8-delayed")  # on Hopper; fp8-block where torch has its product


def gradients(name: str, device: str) -> tuple[list[torch.Tensor], str]:
    """Result and gradients of a linear in bf16, on the CPU, and what it computed in."""
    torch.manual_seed(0)
    module = nn.Linear(272, 416, dtype=torch.bfloat16).to(device)
    x = torch.randn(96, 272).to(device, torch.bfloat16).requires_grad_()
    step = lts.compile(module, ["eager"], transforms=[LowPrecisionLinears(name)])  # type: ignore[arg-type]
    y = step(x)
    y.backward(torch.randn(96, 416).to(device, torch.bfloat16))
    (record,) = lts.explain(step).to_dict()["steps"].values()
    (decision,) = record["decisions"]
    results = [y.detach(), x.grad, module.weight.grad, module.bias.grad]
    return [result.float().cpu() for result in results], decision["choice"]


@pytest.mark.parametrize("name", RECIPES)
def test_values_are_those_of_the_emulation(name: str) -> None:
    found, choice = gradients(name, "cuda")
    expected, emulated = gradients(name, "cpu")
    assert emulated == f"{name}, emulated"
    assert choice == f"{name}, native" if name in NATIVE else choice.startswith(name)
    if RECIPES[name].gradient_rounding == "nearest":
        for mine, other in zip(found, expected):
            assert (mine - other).norm() < 0.01 * other.norm()
    else:  # random
        assert (found[0] - expected[0]).norm() < 0.01 * expected[0].norm()


def train(name: str, checkpointed: bool = False, cudagraphs: bool = False) -> tuple[list[float], Any]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 128))
    net = net.to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    low = LowPrecisionLinears(name, skip=())  # type: ignore[arg-type]

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = checkpoint(net, x, use_reentrant=False) if checkpointed else net(x)
        return F.cross_entropy(x.float(), y)

    step = lts.compile(loss, ["inductor"], [low], lts.CompileConfig(cudagraphs=cudagraphs))
    generator = torch.Generator().manual_seed(2)
    centers, losses = torch.randn(128, 256, generator=generator), []
    for _ in range(60):
        y = torch.randint(128, (512,), generator=generator)
        x = centers[y] + torch.randn(512, 256, generator=generator)
        found = step(x.to("cuda", torch.bfloat16), y.to("cuda"))
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        if low.delayed is not None:
            low.delayed.update()
        losses.append(found.item())
    (record,) = lts.explain(step).to_dict()["steps"].values()
    assert record["graphs"] == 1
    return losses, copy.copy(low.delayed and low.delayed.state_dict())


def test_delayed_scaling_trains_as_scaling_by_the_tensor_itself() -> None:
    expected, _ = train("fp8")
    found, histories = train("fp8-delayed")
    assert found[-1] < 0.7 * found[0]
    assert abs(sum(found[-10:]) - sum(expected[-10:])) < 0.05 * sum(expected[-10:])
    assert all((history[:60] > 0).all() and not history[60:].any() for history in histories.values())
    for options in ({"checkpointed": True}, {"cudagraphs": True}):
        again, state = train("fp8-delayed", **options)
        torch.testing.assert_close(again, found, rtol=0.05, atol=0.05)
        assert state.keys() == histories.keys()
