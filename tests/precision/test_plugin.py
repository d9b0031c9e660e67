"""ThunderPrecision under Trainer and Fabric, on one process."""

import copy
import pickle
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_thunder_strategy as lts
from lightning_thunder_strategy import fabric as thunder
from tests.strategies.training import GradientLog, make_trainer

SMALL = lts.Recipe(min_features=16)


class Module(L.LightningModule):
    """Two linears and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.lm_head = nn.Linear(16, 16, bias=False)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.body(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch).square().mean()
        self.log("loss", loss)
        return loss

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data() -> DataLoader:
    return DataLoader(torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), batch_size=4)


def fitted(plugin: Any = None, **options: Any) -> tuple[Module, L.Trainer, GradientLog]:
    module, log = Module(), GradientLog()
    plugins = [plugin] if plugin is not None else None
    strategy = lts.ThunderStrategy(executors=["eager"])
    trainer = make_trainer(strategy, plugins=plugins, callbacks=[log], max_epochs=1, **options)
    trainer.fit(module, data())
    return module, trainer, log


def decisions(x: Any) -> dict[str, str]:
    (step,) = lts.explain(x).to_dict()["steps"].values()
    return {item["subject"]: item["choice"] for item in step["decisions"]}


@pytest.mark.parametrize("base", ["bf16-true", "bf16-mixed", "32-true"])
def test_trains_near_the_base_precision_and_is_not_it(base: str) -> None:
    low, trainer, log = fitted(lts.ThunderPrecision(SMALL, base))
    plain, _, plain_log = fitted(precision=base)
    choices = decisions(trainer)
    assert [choices[name].split(",")[0] for name in ("body.0", "body.2", "lm_head")] == ["fp8", "fp8", "left alone"]
    assert trainer.precision == base
    dtype = torch.bfloat16 if base == "bf16-true" else torch.float32
    assert {p.dtype for p in low.parameters()} == {p.dtype for p in plain.parameters()} == {dtype}
    for name, expected in plain_log.gradients[0].items():
        found = log.gradients[0][name]
        assert found.dtype == expected.dtype
        assert 1e-3 < (found - expected).norm() / expected.norm() < 0.15, name
    assert list(low.state_dict()) == list(plain.state_dict())


def test_predicts_and_saves_as_the_plain_model(tmp_path: Any) -> None:
    module, trainer, _ = fitted(lts.ThunderPrecision(SMALL, "32-true"))
    outputs = torch.cat(trainer.predict(module, data()))
    exact = module(torch.cat(list(data())))
    assert 1e-3 < (outputs - exact).norm() / exact.norm() < 0.1
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    plain = Module()
    plain.load_state_dict(torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"], strict=True)
    assert torch.equal(plain(torch.ones(1, 16)), module(torch.ones(1, 16)))


@pytest.mark.parametrize("mode", ["forward", "submodules"])
def test_smaller_units_are_rewritten_too(mode: str) -> None:
    module = Module()
    strategy = lts.ThunderStrategy(executors=["eager"], compile=mode)
    trainer = make_trainer(strategy, plugins=[lts.ThunderPrecision(SMALL, "32-true")], max_epochs=1)
    trainer.fit(module, data())
    found = lts.explain(trainer).to_dict()["steps"]["training_step"]["decisions"]
    assert sum(item["choice"].startswith("fp8") for item in found) == 2


def test_fabric() -> None:
    plugin = thunder.ThunderPrecision(SMALL, "bf16-true")
    fabric = L.Fabric(
        accelerator="cpu", devices=1, strategy=thunder.ThunderStrategy(executors=["eager"]), plugins=plugin
    )
    with fabric.init_module():
        module = Module()
    assert module.lm_head.weight.dtype == torch.bfloat16
    reference = copy.deepcopy(module)
    model = fabric.setup(module)
    x = torch.randn(4, 16)
    y = model(x)
    assert y.dtype == torch.float32  # as Lightning's bf16-true returns it
    fabric.backward(y.square().mean())
    exact = reference(x.bfloat16()).float()
    assert 1e-3 < (y - exact).norm() / exact.norm() < 0.1
    assert decisions(model)["body.0"].startswith("fp8")
    other = fabric._strategy.compile_function(lambda x: model(x).sum())
    other(x)
    assert decisions(other)["body.0"].startswith("fp8")


@pytest.mark.parametrize("run", ["trainer", "fabric"])
def test_another_strategy_is_refused(run: str) -> None:
    with pytest.raises(TypeError, match="choose strategy='thunder', 'thunder_ddp' or 'thunder_fsdp'"):
        if run == "trainer":
            make_trainer("auto", plugins=[lts.ThunderPrecision(SMALL)], max_epochs=1).fit(Module(), data())
        else:
            L.Fabric(accelerator="cpu", devices=1, plugins=thunder.ThunderPrecision(SMALL)).setup(Module())


def test_refused_options() -> None:
    with pytest.raises(ValueError, match="precision='fp8-e9' is not allowed: choose one of 'fp8', 'fp8-rowwise'"):
        lts.ThunderPrecision("fp8-e9")
    with pytest.raises(ValueError, match="base='16-mixed' is not allowed: choose one of 'bf16-true', 'bf16-mixed'"):
        lts.ThunderPrecision("fp8", base="16-mixed")
    with pytest.raises(ValueError, match="skip='head' is not allowed"):
        lts.ThunderPrecision("fp8", skip="head")
    with pytest.raises(ValueError, match="compile='off' is not allowed with ThunderPrecision"):
        make_trainer(lts.ThunderStrategy(compile="off"), plugins=[lts.ThunderPrecision(SMALL)])
    with pytest.raises(ValueError, match="Choose one"):
        make_trainer(lts.ThunderStrategy(), plugins=[lts.ThunderPrecision("fp8")], precision="bf16-true")


def test_copies_and_pickles() -> None:
    plugin = lts.ThunderPrecision("fp8-block", skip=["a"])
    make_trainer(lts.ThunderStrategy(), plugins=[plugin])
    for other in (copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin))):
        assert (other.recipe, other.precision, other.passes) == (plugin.recipe, plugin.precision, plugin.passes)
