"""Stages, several fits, errors: the module is the user's own whenever no step is running."""

import copy
import io
import pickle
from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

import lightning_thunder_strategy as lts
from tests.strategies.modules import GAN, Classifier, Linear
from tests.strategies.training import (
    CLASSES,
    FEATURES,
    Run,
    assert_same,
    assert_same_state,
    assert_same_training,
    classification_data,
    compile_warnings,
    fit,
    fit_both,
    make_trainer,
    thunder,
)


class WithMetric(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.acc = MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.acc.update(self(batch[0]), batch[1])
        self.log("acc", self.acc)
        return super().training_step(batch, batch_idx)


def footprint(module: nn.Module, optimizers: Sequence[Any] = ()) -> dict[str, Any]:
    """Everything that a compiler could leave behind on modules and optimizers."""
    found: dict[str, Any] = {}
    for name, child in module.named_modules():
        found[name] = (type(child), sorted(vars(child)), child.__dict__.get("_compiled_call_impl"))
        found[f"{name} functions"] = {
            key: getattr(value, "__qualname__", "") for key, value in vars(child).items() if callable(value)
        }
    for index, optimizer in enumerate(optimizers):
        found[f"optimizer {index}"] = (
            type(optimizer),
            {k: getattr(v, "__qualname__", "") for k, v in vars(optimizer).items() if callable(v)},
        )
    return found


def test_all_stages_in_one_process_give_the_results_of_eager() -> None:
    train, val = classification_data(), classification_data(seed=9)
    results = []
    for strategy in (thunder(), "auto"):
        L.seed_everything(11, verbose=False)
        module, trainer = Classifier(), make_trainer(strategy, num_sanity_val_steps=1)
        result: list[Any] = [trainer.validate(module, val, verbose=False)]
        trainer.fit(module, train, val)
        result += [dict(trainer.callback_metrics), trainer.test(module, val, verbose=False)]
        result.append(trainer.predict(module, val))
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, train, val)
        result += [dict(trainer.callback_metrics), module.state_dict(), torch.rand(1)]
        results.append((result, trainer))
    assert_same(results[0][0], results[1][0], "results")
    steps = lts.explain(results[0][1]).to_dict()["steps"]
    assert steps.keys() == {"training_step", "validation_step", "test_step", "predict_step"}
    for name, step in steps.items():
        # validation runs under inference mode when it is a stage of its own, and without gradients inside fit
        assert (step["graphs"], step["graph_breaks"]) == (2 if name == "validation_step" else 1, []), name


def test_the_module_is_as_after_eager_training() -> None:
    runs = fit_both(WithMetric)
    prints = [footprint(run.module, run.trainer.optimizers) for run in runs]
    assert prints[0] == prints[1]


class Interrupted(Exception):
    pass


class Fails(WithMetric):
    error: type[BaseException] = Interrupted

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise self.error("stop")
        return super().training_step(batch, batch_idx)


class FailsInManualOptimization(GAN):
    error: type[BaseException] = Interrupted

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise self.error("stop")
        super().training_step(batch, batch_idx)


@pytest.mark.parametrize("make", [Fails, FailsInManualOptimization])
@pytest.mark.parametrize("error", [Interrupted, KeyboardInterrupt])
def test_after_an_error_in_a_step_nothing_stays_patched(make, error) -> None:
    prints = []
    for strategy in (thunder(), "auto"):
        L.seed_everything(11, verbose=False)
        module, trainer = make(), make_trainer(strategy)
        module.error = error
        with pytest.raises((Interrupted, SystemExit)):
            trainer.fit(module, classification_data())
        prints.append(footprint(module, trainer.optimizers))
        module(torch.randn(3, FEATURES)) if make is Fails else module.generator(torch.randn(3, 4))
    assert prints[0] == prints[1]


def test_an_error_in_a_logger_call_after_the_program_leaves_nothing_patched() -> None:
    class LogsBadly(Linear):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("x", {"nested": 1.0})
            return self.loss(batch)

    module = LogsBadly()
    with pytest.raises(ValueError, match="log"):
        fit(lambda: module, thunder())
    assert "log" not in vars(module)


def test_during_hooks_and_callbacks_the_module_is_the_users_own() -> None:
    seen: list[Any] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
            seen.append(footprint(pl_module, trainer.optimizers))
            assert trainer.model is pl_module and trainer.strategy.model is pl_module

    fit(WithMetric, thunder(), callbacks=lambda: [Watch()], max_epochs=1)
    ours, seen = seen, []
    fit(WithMetric, "auto", callbacks=lambda: [Watch()], max_epochs=1)
    assert ours == seen


def check_usable(module: L.LightningModule) -> None:
    """Pickle, deepcopy and torch.save give independent modules with the same results."""
    module.eval()
    x = torch.randn(4, FEATURES)
    expected = module(x)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies = [pickle.loads(pickle.dumps(module)), copy.deepcopy(module), torch.load(buffer, weights_only=False)]
    for other in copies:
        assert type(other) is type(module)
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert torch.equal(module(x), expected)  # a copy has weights of its own
        assert not torch.equal(other(x), expected)


def test_the_module_can_be_pickled_copied_and_saved_after_fit_and_after_other_stages() -> None:
    run = fit(Classifier, thunder(), max_epochs=1)
    run.module.trainer = None
    check_usable(run.module)
    run.trainer.test(run.module, classification_data(), verbose=False)
    run.module.trainer = None
    check_usable(run.module)


def test_the_module_exports_to_onnx_after_fit(tmp_path) -> None:
    run = fit(Linear, thunder(), max_epochs=1)
    run.module.eval()
    run.module.to_onnx(tmp_path / "m.onnx", torch.randn(2, FEATURES), dynamo=True)
    assert (tmp_path / "m.onnx").stat().st_size > 0


def test_a_second_fit_and_a_second_trainer_continue_as_eager() -> None:
    finals = []
    for make_strategy in (thunder, lambda: "auto"):
        first = fit(Classifier, make_strategy(), max_epochs=1)
        first.trainer.fit_loop.max_epochs = 2
        first.trainer.fit(first.module, classification_data(seed=1))
        second = make_trainer(make_strategy(), max_epochs=1)
        second.fit(first.module, classification_data(seed=2))
        finals.append((first.module, second.callback_metrics))
    assert_same_state(finals[0][0], finals[1][0])
    assert_same(finals[0][1], finals[1][1], "metrics")


def test_a_strategy_instance_shared_by_two_trainers_and_modules_works_for_both() -> None:
    strategy = thunder()
    first = fit(Classifier, strategy, max_epochs=1)
    second = fit(lambda: Classifier(width=4), strategy, max_epochs=1, accelerator="auto")
    again = fit(lambda: first.module, strategy, max_epochs=1, accelerator="auto")
    eager = fit(Classifier, "auto", max_epochs=1)
    assert_same_state_after_two_fits(first, eager)
    assert second.step()["graphs"] == 1 and again.step()["graphs"] == 1


def assert_same_state_after_two_fits(ours: Run, eager: Run) -> None:
    fit(lambda: eager.module, "auto", max_epochs=1)
    assert_same_state(ours.module, eager.module)


def test_later_stages_reuse_the_programs_of_earlier_ones() -> None:
    train, val = classification_data(), classification_data(seed=9)
    module, trainer = Classifier(), make_trainer(thunder(), max_epochs=1)
    trainer.fit(module, train, val)
    graphs = {name: step["graphs"] for name, step in lts.explain(trainer).to_dict()["steps"].items()}
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, train, val)
    assert {name: step["graphs"] for name, step in lts.explain(trainer).to_dict()["steps"].items()} == graphs


def test_the_strategy_and_the_trainer_can_be_pickled_before_and_after_fit() -> None:
    strategy = thunder(compile=lts.CompileConfig(dynamic=False))
    assert pickle.loads(pickle.dumps(strategy)).compile_config == strategy.compile_config
    run = fit(Linear, strategy, max_epochs=1)
    restored = pickle.loads(pickle.dumps(run.trainer))
    assert restored.strategy.compile_config == strategy.compile_config
    assert lts.explain(restored).to_dict()["steps"]["training_step"]["graphs"] == 1


def test_parameters_frozen_between_steps_get_no_gradient_and_the_same_results_as_eager() -> None:
    class Freezes(Classifier):
        def on_train_epoch_start(self) -> None:
            self.net[0].requires_grad_(self.current_epoch != 1)

    with compile_warnings() as messages:
        ours, eager = fit_both(Freezes, max_epochs=3)
    assert messages == []
    assert_same_training(ours, eager)
    assert ours.step()["graphs"] == 2


def test_hooks_put_on_after_compilation_are_called() -> None:
    class AddsHook(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def _count(self, *args: Any) -> None:
            self.calls += 1

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net.register_forward_hook(self._count)

    ours, eager = fit_both(AddsHook, max_epochs=3)
    assert ours.module.calls == eager.module.calls == 6
    assert_same_training(ours, eager)


def test_weights_changed_in_place_by_a_callback_are_seen_by_the_program() -> None:
    class Halves(Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            with torch.no_grad():
                for parameter in pl_module.parameters():
                    parameter.mul_(0.5)

        def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            pl_module.net[0].weight.data = pl_module.net[0].weight.data.clone() * 1.25

    ours, eager = fit_both(Classifier, val=classification_data(seed=9), callbacks=lambda: [Halves()])
    assert_same_training(ours, eager)
