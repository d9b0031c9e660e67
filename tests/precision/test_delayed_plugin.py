"""ThunderPrecision("fp8-delayed") under Trainer and Fabric, on one process."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_thunder_strategy as lts
from lightning_thunder_strategy import fabric as thunder
from tests.precision import test_plugin
from tests.strategies.training import make_trainer

RECIPE = lts.Recipe(min_features=16, amax_history_len=3)


class Module(test_plugin.Module):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self(batch).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def data(batches: int = 4) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(torch.randn(4 * batches, 16, generator=generator), batch_size=4)


def plugin(recipe: Any = RECIPE) -> lts.ThunderPrecision:
    return lts.ThunderPrecision(recipe, "32-true")


def fitted(strategy: Any = None, ckpt_path: Any = None, precision: Any = None, **options: Any) -> Any:
    strategy = strategy or lts.ThunderStrategy(executors=["eager"])
    trainer = make_trainer(strategy, plugins=[precision or plugin()], **options)
    trainer.fit(Module(), data(), data(1), ckpt_path=ckpt_path)
    return trainer


def histories(trainer: L.Trainer) -> dict[str, Tensor]:
    return trainer.precision_plugin.state_dict()["amax_histories"]


def assert_same(found: L.Trainer, expected: L.Trainer) -> None:
    for mine, other in zip(found.lightning_module.parameters(), expected.lightning_module.parameters()):
        assert torch.equal(mine, other)
    assert histories(found).keys() == histories(expected).keys() == {"body.0", "body.2"}
    for name, history in histories(expected).items():
        assert history.shape == (3, 3) and (history > 0).all()
        assert torch.equal(histories(found)[name], history)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_resumed_training_equals_uninterrupted_training(tmp_path: Path, kind: Any) -> None:
    def strategy() -> Any:
        return lts.ThunderStrategy(executors=["eager"], state_dict_type=kind)

    expected = fitted(strategy(), max_epochs=2)
    first = fitted(strategy(), max_epochs=1)
    first.save_checkpoint(tmp_path / "a.ckpt")
    assert_same(fitted(strategy(), tmp_path / "a.ckpt", max_epochs=2), expected)
    plain = fitted(strategy(), tmp_path / "a.ckpt", plugin(lts.Recipe(min_features=16)), max_epochs=2)
    assert not torch.equal(plain.lightning_module.body[0].weight, expected.lightning_module.body[0].weight)


@pytest.mark.parametrize("base", ["bf16-true", "bf16-mixed"])
def test_state_is_float32_beside_any_base(base: Any) -> None:
    trainer = fitted(max_epochs=1, precision=lts.ThunderPrecision(RECIPE, base))
    for history in histories(trainer).values():
        assert history.dtype == torch.float32 and (history > 0).all()
    (decision, *_) = lts.explain(trainer).to_dict()["steps"]["training_step"]["decisions"]
    assert decision["choice"].endswith("delayed, emulated")


def test_checkpoints_load_into_the_plain_model(tmp_path: Path) -> None:
    trainer = fitted(max_epochs=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert saved["state_dict"].keys() == Module().state_dict().keys()
    assert saved["ThunderPrecision"]["amax_histories"].keys() == {"body.0", "body.2"}
    plain = Module()
    plain.load_state_dict(saved["state_dict"])
    make_trainer("auto", max_epochs=2).fit(plain, data(), ckpt_path=tmp_path / "a.ckpt")


def test_micro_batches_move_the_history_once() -> None:
    trainer = fitted(max_epochs=1, accumulate_grad_batches=2)
    assert all((history[:2] > 0).all() and not history[2].any() for history in histories(trainer).values())


def test_only_training_steps_are_observed() -> None:
    strategy = lts.ThunderStrategy(executors=["eager"])
    strategy.precompile(next(iter(data())) * 1000)
    found = fitted(strategy, max_epochs=1, val_check_interval=1)
    assert_same(found, fitted(max_epochs=1, limit_val_batches=0))
    found.validate(found.lightning_module, data(), verbose=False)
    assert_same(found, fitted(max_epochs=1, limit_val_batches=0))


@pytest.mark.parametrize("mode", ["forward", "submodules"])
def test_smaller_programs_train_the_same(mode: Any) -> None:
    expected = fitted(max_epochs=1)
    found = fitted(lts.ThunderStrategy(executors=["eager"], compile=mode), max_epochs=1)
    assert histories(found).keys() == histories(expected).keys()
    for name, history in histories(expected).items():
        torch.testing.assert_close(histories(found)[name], history)


def test_another_module_starts_over() -> None:
    trainer = fitted(max_epochs=1)
    before = histories(trainer)
    trainer.strategy.connect(Module())
    assert not histories(trainer) and before


# -------------------------------------------------------------------------------------------------------------- fabric


class Loop:
    """Two modules whose linears have the same names, under Fabric."""

    def __init__(self, kind: Any = "full") -> None:
        torch.manual_seed(0)
        strategy = thunder.ThunderStrategy(executors=["eager"], state_dict_type=kind)
        self.fabric = L.Fabric(
            accelerator="cpu", devices=1, strategy=strategy, plugins=thunder.ThunderPrecision(RECIPE, "32-true")
        )
        self.state: dict[str, Any] = {}
        for name in ("a", "b"):
            module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            self.state[name], self.state[f"{name} optimizer"] = self.fabric.setup(module, optimizer)

    def run(self, batches: list[Tensor]) -> None:
        for x in batches:
            for name, scale in (("a", 1.0), ("b", 3.0)):
                self.fabric.backward((scale * self.state[name](x)).square().mean())
                self.state[f"{name} optimizer"].step()
                self.state[f"{name} optimizer"].zero_grad()

    @property
    def histories(self) -> dict[str, Tensor]:
        return self.fabric._strategy.precision.state_dict()["amax_histories"]


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_fabric_resumes(tmp_path: Path, kind: str) -> None:
    batches = list(data())
    expected, first, second = Loop(kind), Loop(kind), Loop(kind)
    expected.run(batches)
    first.run(batches[:2])
    first.fabric.save(tmp_path / "state", {**first.state, "step": 2})
    state = {**second.state, "step": 0}
    assert second.fabric.load(tmp_path / "state", state) == {}
    assert state["step"] == 2
    second.run(batches[2:])
    assert second.histories.keys() == {"0", "2", "1.0", "1.2"}
    for name, history in expected.histories.items():
        assert (history > 0).all() and torch.equal(second.histories[name], history), name
    assert second.histories["1.2"][2, 2] > 3 * second.histories["2"][2, 2]  # each has its own
    for name in ("a", "b"):
        for mine, other in zip(second.state[name].parameters(), expected.state[name].parameters()):
            assert torch.equal(mine, other)


def test_fabric_state_with_the_name_of_the_plugin_is_refused(tmp_path: Path) -> None:
    loop = Loop()
    with pytest.raises(ValueError, match="has an entry 'ThunderPrecision', the name of the precision plugin's"):
        loop.fabric.save(tmp_path / "state", {"ThunderPrecision": 1})


def test_a_function_of_several_modules_knows_their_linears() -> None:
    loop = Loop()
    (x,) = data(1)
    step = loop.fabric._strategy.compile_function(lambda x: loop.state["b"](loop.state["a"](x)).square().mean())
    loop.fabric.backward(step(x))
    loop.state["a optimizer"].step()
    assert loop.histories.keys() == {"0", "2", "1.0", "1.2"}
    assert all((history[0] > 0).all() for history in loop.histories.values())
