"""``compile_optimizer="auto"`` trains as torch's own optimizers do, under Trainer and Fabric."""

import gc
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

import lightning_thunder_strategy as lts
from lightning_thunder_strategy import fabric as fabrics
from lightning_thunder_strategy.executors.triton import interpreted
from tests.strategies.fabric_helpers import Net, batches, fabric, seeded
from tests.strategies.modules import Classifier
from tests.strategies.training import Run, classification_data, compile_warnings, fit, make_trainer, thunder

BY = "triton" if interpreted() else "torch fused"
ADAMW, ADAM, SGD = torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD


class Scheduled(Classifier):
    """Trains with two param groups, a frozen bias and a learning rate that changes at each step."""

    cls: Any = ADAMW
    options: dict[str, Any] = {"weight_decay": 0.1}

    def configure_optimizers(self) -> Any:
        first, *others = (parameter for parameter in self.parameters() if parameter.ndim == 2)
        vectors = [parameter for parameter in self.parameters() if parameter.ndim == 1]
        vectors[-1].requires_grad_(False)
        groups = [{"params": [first]}, {"params": [*others, *vectors], "lr": 0.02, "weight_decay": 0.0}]
        optimizer = self.cls(groups, lr=0.01, **self.options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class WithAdam(Scheduled):
    cls, options = ADAM, {"amsgrad": True}


class WithSgd(Scheduled):
    cls, options = SGD, {"momentum": 0.9, "nesterov": True}


def assert_close(ours: Run, theirs: Run, tolerance: float = 1e-9) -> None:
    """The same training within rounding, and a state of the same form."""
    torch.testing.assert_close(ours.module.state_dict(), theirs.module.state_dict(), rtol=tolerance, atol=tolerance)
    one, other = ours.trainer.optimizers[0].state_dict(), theirs.trainer.optimizers[0].state_dict()
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert ours.trainer.global_step == theirs.trainer.global_step > 2


@pytest.mark.parametrize("make", [Scheduled, WithAdam, WithSgd])
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2, "max_epochs": 3},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ],
)
def test_trainer_trains_as_with_torchs_own(make: Any, options: dict) -> None:
    options = {"precision": "64-true", **options}
    with compile_warnings() as texts:
        ours = fit(make, thunder(compile_optimizer="auto"), **options)
    theirs = fit(make, thunder(), **options)
    assert_close(ours, theirs)
    assert ours.step() == {**theirs.step(), **{key: ours.step()[key] for key in ("compile_seconds", "compile_stages")}}
    assert texts == [], "one program, and everything by kernels"
    (record,) = lts.explain(ours.trainer).to_dict()["optimizers"]
    trained = sum(parameter.requires_grad for parameter in ours.module.parameters())
    assert record == {"name": make.cls.__name__, "parameters": {BY: trained}, "reasons": {}}
    assert lts.explain(theirs.trainer).to_dict()["optimizers"] == []


class ReadsLearningRate(Scheduled):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + self.optimizers().param_groups[0]["lr"])


def test_a_step_that_looks_at_the_optimizer_compiles_no_more_often() -> None:
    options = {"precision": "64-true", "accumulate_grad_batches": 2, "max_epochs": 4}
    ours, theirs = (fit(ReadsLearningRate, thunder(compile_optimizer=value), **options) for value in ("auto", False))
    assert_close(ours, theirs)
    assert ours.step()["graphs"] == theirs.step()["graphs"] and ours.step()["graph_breaks"] == []


class SomeInfinite(WithSgd):
    def on_after_backward(self) -> None:
        if self.global_step == 2:
            next(self.parameters()).grad.fill_(torch.inf)


def test_a_gradient_scaler_skips_steps_as_with_torchs_own() -> None:
    def run(**options: Any) -> Run:
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        precision = MixedPrecision("16-mixed", "cpu", scaler)
        return fit(SomeInfinite, thunder(compile="off", **options), plugins=[precision], gradient_clip_val=0.5)

    ours, theirs = run(compile_optimizer="auto"), run()
    torch.testing.assert_close(ours.module.state_dict(), theirs.module.state_dict())
    states = [run.trainer.precision_plugin.state_dict() for run in (ours, theirs)]
    assert states[0] == states[1] and states[0]["scale"] != 16.0


@pytest.mark.parametrize("make", [Scheduled, WithSgd])
@pytest.mark.parametrize("first", ["auto", False])
def test_a_checkpoint_goes_on_in_both_directions(make: Any, first: Any, tmp_path: Path) -> None:
    def without_dropout() -> Any:
        return make(dropout=0.0)

    whole = fit(without_dropout, thunder(compile="off"), precision="64-true", max_epochs=3)
    begun = fit(without_dropout, thunder(compile="off", compile_optimizer=first), precision="64-true", max_epochs=1)
    begun.trainer.save_checkpoint(tmp_path / "begun.ckpt")
    other = False if first == "auto" else "auto"
    strategy = thunder(compile="off", compile_optimizer=other)
    path = tmp_path / "begun.ckpt"
    resumed = fit(without_dropout, strategy, precision="64-true", max_epochs=3, ckpt_path=path)
    assert_close(resumed, whole, tolerance=1e-6)  # Lightning loads weights before it makes them float64


class Manual(Classifier):
    """Two optimizers of one class, of which one steps without the strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        return ADAMW([first], lr=0.01), ADAMW(others, lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, other = self.optimizers()
        one.zero_grad(), other.zero_grad()
        self.manual_backward(self.loss(batch))
        one.step(), other.optimizer.step()


def test_two_optimizers_and_steps_outside_of_the_strategy() -> None:
    strategies = [thunder(compile="off", compile_optimizer=value) for value in ("auto", False)]
    run, plain = (fit(Manual, strategy, precision="64-true") for strategy in strategies)
    torch.testing.assert_close(run.module.state_dict(), plain.module.state_dict())
    assert [item["parameters"] for item in lts.explain(run.trainer).to_dict()["optimizers"]] == [{BY: 1}]


class Asks(Scheduled):
    options: dict[str, Any] = {"foreach": True}


def test_what_is_left_to_torch_is_told_once_and_reported(capsys: pytest.CaptureFixture) -> None:
    with compile_warnings() as texts:
        run = fit(Asks, thunder(compile="off", compile_optimizer="auto", report=True))
    reason = "foreach=True asks for an implementation of torch"
    assert len(texts) == 1 and texts[0].endswith(f"because {reason}.") and "AdamW updates 1 of its" in texts[0]
    assert f"by torch ({reason})" in " ".join(capsys.readouterr().out.split())
    assert list(lts.explain(run.module).to_dict()["optimizers"][0]["parameters"]) == ["torch"]
    config = lts.CompileConfig(mode="off", on_error="raise")
    with pytest.raises(RuntimeError, match=f"compile_optimizer='auto' cannot take over .*{reason}"):
        fit(Asks, thunder(compile=config, compile_optimizer="auto"))


def test_the_records_are_of_the_newest_fit() -> None:
    trainer, module = make_trainer(thunder(compile="off", compile_optimizer="auto"), max_epochs=1), Scheduled()
    trainer.fit(module, classification_data())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, classification_data())
    assert len(lts.explain(trainer).optimizers) == 1
    trainer.test(module, classification_data(), verbose=False)
    assert len(lts.explain(trainer).optimizers) == 1


# ----------------------------------------------------------------------------------------------------------- Fabric


def train(runner: L.Fabric, cls: Any, state: dict | None = None, clip: dict | None = None, steps: int = 4) -> Any:
    model = seeded(Net).double()
    model.second.bias.requires_grad_(False)
    groups = [{"params": model.first.parameters()}, {"params": model.second.parameters(), "lr": 0.05}]
    model, optimizer = runner.setup(model, cls(groups, lr=0.01))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    if state is not None:
        model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
    for index, x in enumerate(batches(2 * steps)):
        runner.backward(model(x.double()).square().mean())
        if index % 2:
            if clip:
                runner.clip_gradients(model, optimizer, **clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return (model, optimizer), {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def auto(**options: Any) -> L.Fabric:
    return fabric(fabrics.ThunderStrategy(executors=["eager"], compile="off", compile_optimizer="auto", **options))


@pytest.mark.parametrize("cls", [ADAMW, SGD])
@pytest.mark.parametrize("clip", [None, {"max_norm": 0.1}, {"clip_val": 0.01}])
def test_fabric_trains_as_with_torchs_own(cls: Any, clip: Any) -> None:
    (model, _optimizer), ours = train(auto(), cls, clip=clip)  # kept: reports are of optimizers that exist
    _, theirs = train(fabric(), cls, clip=clip)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert lts.explain(model).to_dict()["optimizers"] == [{"name": cls.__name__, "parameters": {BY: 3}, "reasons": {}}]
    _, here = train(auto(), cls, state=theirs)
    _, there = train(fabric(), cls, state=ours)
    torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-9)


def test_fabric_steps_with_a_closure() -> None:
    def losses(runner: L.Fabric) -> list[float]:
        model = seeded(Net)
        model, optimizer = runner.setup(model, ADAMW(model.parameters()))

        def closure() -> float:
            optimizer.zero_grad()
            loss = model(batches(1)[0]).square().mean()
            runner.backward(loss)
            return loss.item()

        return [optimizer.step(closure) for _ in range(3)]

    ours = losses(auto())
    assert ours == pytest.approx(losses(fabric()), rel=1e-6) and ours[0] > ours[2]


def test_two_strategies_in_one_process_do_not_share() -> None:
    (ours, _), (theirs, _) = train(auto(), ADAMW), train(fabric(), ADAMW)
    assert len(lts.explain(ours[0]).optimizers) == 1 and lts.explain(theirs[0]).optimizers == []


def test_fabric_forgets_optimizers_that_are_gone_and_numbers_equal_names() -> None:
    runner = auto()
    model = runner.setup(seeded(Net))

    def stepped(cls: Any) -> Any:
        optimizer = runner.setup_optimizers(cls(model.parameters(), lr=0.01))
        runner.backward(model(batches(1)[0]).square().mean())
        optimizer.step()
        return optimizer

    def names() -> list[str]:
        gc.collect()
        return [item["name"] for item in lts.explain(runner).to_dict()["optimizers"]]

    for _ in range(3):
        stepped(ADAMW)
    assert names() == []
    kept = [stepped(cls) for cls in (ADAMW, SGD, ADAMW, ADAMW)]
    assert names() == ["AdamW", "SGD", "AdamW#2", "AdamW#3"]
    kept[0].step()
    assert names() == ["AdamW", "SGD", "AdamW#2", "AdamW#3"]
    del kept[0]
    assert names() == ["SGD", "AdamW", "AdamW#2"]
