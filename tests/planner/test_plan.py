"""Plans of small models, against runs of them."""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.planner.observe import PlanError
from tests.distributed.planned import Small, batch_of


def mean(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return module(batch).mean()


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))


def test_sharded_parameters_gradients_and_states(model: nn.Module) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    strategy = lts.ThunderFSDPStrategy(executors=["eager"])
    found = lts.plan(model, torch.zeros(8, 512), strategy, devices=4, loss=mean)
    whole = sum(p.numel() * 4 for p in model.parameters())
    assert found.memory.parameters == found.memory.gradients == whole // 4
    assert found.memory.optimizer == 2 * whole // 4 + 4 * 512  # and a step count for each parameter
    assert found.memory.peak > found.memory.parameters + found.memory.optimizer + found.memory.gradients
    assert not torch.distributed.is_initialized()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert found.to_dict()["collective_totals"][0]["count"] == len(
        [item for item in found.collectives if item.direction == "forward"]
    )
    assert "DOES NOT FIT" not in str(found) and "H100" in str(found)


def test_operations_are_those_that_torch_counts() -> None:
    found = lts.plan(Small(), batch_of(), lts.ThunderStrategy(executors=["eager"]), devices=1)
    module = Small()
    module.log = lambda *_: None  # type: ignore[method-assign, assignment]
    with FlopCounterMode(display=False) as counter:
        module.training_step(batch_of(), 0).backward()
    assert found.time.flops == found.time.model_flops == counter.get_total_flops() > 0


class Memory(L.Callback):
    """The most that torch's CPU allocator has given out in the third step."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self._profile.__enter__()
        elif batch_idx == 2:
            with torch.profiler.record_function("third step"):
                pass

    def on_train_end(self, *_: Any) -> None:
        self._profile.__exit__(None, None, None)
        events = sorted(self._profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        begun = next(event.start_ns() for event in events if event.name() == "third step")
        now = self.bytes = 0
        for event in events:
            if event.name() == "[memory]":
                now += event.nbytes()
                if event.start_ns() >= begun:
                    self.bytes = max(self.bytes, now)


class Wide(Small):
    """Large enough for rounding not to matter."""

    def __init__(self) -> None:
        super().__init__(vocabulary=999, width=128)


def test_the_peak_is_the_one_that_is_measured() -> None:
    batch = torch.arange(256).view(4, 64)
    found = lts.plan(Wide(), batch, lts.ThunderStrategy(executors=["eager"]), devices=1)
    measured = Memory()
    trainer = L.Trainer(
        accelerator="cpu", strategy=lts.ThunderStrategy(executors=["eager"]), max_steps=3, callbacks=[measured],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Wide(), DataLoader([batch] * 3, batch_size=None))
    held = found.memory.parameters + found.memory.batch  # what was there before the profiler
    assert measured.bytes + held == pytest.approx(found.memory.peak, rel=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 12}, "devices=12 is not a multiple of devices_per_node=8"),
        ({"devices": 0}, "devices=0 is not allowed"),
        ({"gpu": "V100"}, "gpu='V100' is not allowed"),
        ({"efficiency": 2}, "efficiency=2 is not allowed"),
        ({"devices": 16, "interconnect": "nvlink"}, "interconnect='nvlink' is not allowed"),
        ({"loss": None}, "give loss="),
    ],
)
def test_what_cannot_be_planned_is_said(model: nn.Module, options: dict[str, Any], message: str) -> None:
    options = {"devices": 8, "loss": mean, **options}
    with pytest.raises((PlanError, ValueError), match=message):
        lts.plan(model, torch.zeros(8, 512), lts.ThunderFSDPStrategy(executors=["eager"]), **options)


def test_a_step_that_is_no_single_program_is_an_error() -> None:
    class Printing(Small):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            print(loss.item())
            return loss

    with pytest.raises(PlanError, match="not one program"):
        lts.plan(Printing(), batch_of(), lts.ThunderStrategy(executors=["eager"]), devices=1)


def test_a_picture_needs_a_name_and_matplotlib(model: nn.Module, tmp_path: Path, monkeypatch: Any) -> None:
    found = lts.plan(model, torch.zeros(8, 512), lts.ThunderStrategy(executors=["eager"]), devices=1, loss=mean)
    with pytest.raises(ValueError, match="let it end in .png"):
        found.plot(tmp_path / "memory.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        found.plot(tmp_path / "memory.png")


def test_a_picture(model: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = lts.plan(model, torch.zeros(8, 512), lts.ThunderStrategy(executors=["eager"]), devices=1, loss=mean)
    assert found.plot(tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
