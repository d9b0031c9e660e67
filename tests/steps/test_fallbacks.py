"""What cannot be part of one program trains as eager, and is said once; under ``fullgraph=True`` it is an error."""

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lightning_thunder_strategy as lts
from tests.strategies.modules import Classifier, Linear
from tests.strategies.training import (
    CLASSES,
    FEATURES,
    assert_same_training,
    classification_data,
    compile_warnings,
    fit,
    fit_both,
    thunder,
)


class Prints(Linear):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        print("training")  # cut here
        self.log("loss", loss)
        return loss * 2


class PrintsValue(Linear):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.print(f"loss {loss:.3f}")  # cut here
        return loss


class UsesNumpy(Linear):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        scale = np.random.default_rng(batch_idx).uniform()  # cut here
        return loss * scale


class BranchesOnData(Linear):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if loss > 1.0:  # cut here
            loss = loss * 0.5
        return loss


class UsesItem(Linear):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.last = loss.item()  # cut here
        self.log("last", self.last)
        return loss


class WithLSTM(Linear):
    """Dynamo refuses the whole frame that holds a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, FEATURES, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden, _ = self.lstm(x[:, None])
        loss = nn.functional.cross_entropy(self.net(hidden[:, 0]), y)
        self.log("loss", loss)
        return loss


class WithFullBackwardHook(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.net.register_full_backward_hook(self._hook)

    def _hook(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        self.seen += 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


CUT = [Prints, PrintsValue, UsesNumpy, BranchesOnData, WithFullBackwardHook]


@pytest.mark.parametrize("make", CUT)
def test_a_cut_step_trains_as_eager_with_one_message_naming_the_place(make, capsys) -> None:
    with compile_warnings() as messages:
        ours, eager = fit_both(make)
    assert_same_training(ours, eager)
    assert len(messages) == 1, messages
    place = "test_fallbacks.py:" if make is not WithFullBackwardHook else "hook"
    for part in ("training_step", "not one compiled program", place, "compiled", "eagerly", "fullgraph=True"):
        assert part in messages[0], (part, messages[0])
    if make is not WithFullBackwardHook:
        line = int(messages[0].split("test_fallbacks.py:")[1].split(":")[0])
        assert "# cut here" in Path(__file__).read_text().splitlines()[line - 1]
    else:
        assert ours.module.seen == eager.module.seen == 6
    step = ours.step()
    assert step["mode"] == "step" and step["graphs"] > 0 and step["note"] in messages[0]
    lines = capsys.readouterr().out.splitlines()
    assert lines == lines[: len(lines) // 2] * 2  # ours printed what eager printed


@pytest.mark.parametrize("make", CUT)
def test_a_cut_step_is_an_error_under_fullgraph(make) -> None:
    with compile_warnings() as messages, pytest.raises(lts.CompileError, match="training_step cannot be compiled"):
        fit(make, thunder(compile=lts.CompileConfig(fullgraph=True)))
    assert messages == []


def test_an_lstm_runs_eagerly_beside_compiled_submodules_with_one_message() -> None:
    with compile_warnings() as messages:
        ours, eager = fit_both(WithLSTM)
    assert_same_training(ours, eager)
    assert len(messages) == 1 and "LSTM" in messages[0] and "outermost submodules" in messages[0]
    assert ours.step()["mode"] == "submodules" and ours.step()["graphs"] == 1  # the linear layer


def test_item_is_right_whether_it_cuts_or_not() -> None:
    ours, eager = fit_both(UsesItem)
    assert_same_training(ours, eager)
    assert ours.module.last == eager.module.last


def test_a_step_over_the_dataloader_iterator_trains_as_eager() -> None:
    class Iterates(Linear):
        def training_step(self, dataloader_iter: Any) -> Tensor:
            batch, _, _ = next(dataloader_iter)
            loss = self.loss(batch)
            self.log("loss", loss, batch_size=8)
            return loss

    with compile_warnings() as messages:
        ours, eager = fit_both(Iterates)
    assert_same_training(ours, eager)
    assert len(messages) == 1
    assert ours.step()["graphs"] > 0


def test_a_step_may_return_nothing_to_skip_a_batch() -> None:
    class Skips(Linear):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            loss = self.loss(batch)
            self.log("loss", loss)
            return None if batch_idx == 1 else loss

    ours, eager = fit_both(Skips)
    assert_same_training(ours, eager)
    assert ours.step()["graphs"] == 2 and ours.step()["graph_breaks"] == []


def test_dictionary_outputs_reach_the_hooks_as_eager() -> None:
    class Returns(Linear):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {"loss": self.loss(batch), "texts": ["a", batch_idx], "logits": self.net(batch[0])}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert outputs["texts"] == ["a", batch_idx]
            self.log("logits", outputs["logits"].sum())

    ours, eager = fit_both(Returns)
    assert_same_training(ours, eager)
    assert ours.step()["graphs"] == 1


class OwnError(Exception):
    pass


class RaisesOwnError(Linear):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx == 2:
            raise OwnError(f"batch {batch_idx}")
        return loss


class RaisesInValidation(Linear):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise OwnError("in validation")


class WrongShape(Linear):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(batch[0]) @ self.net.weight).sum() if batch_idx < 1 else self.net(batch[0]).view(5, 7).sum()


@pytest.mark.parametrize(
    "make, error", [(RaisesOwnError, OwnError), (RaisesInValidation, OwnError), (WrongShape, RuntimeError)]
)
def test_an_error_of_the_step_is_the_one_of_eager_and_nothing_stays_patched(make, error) -> None:
    texts = []
    for strategy in (thunder(), "auto"):
        L.seed_everything(1, verbose=False)
        module = make()
        before = set(vars(module))
        with pytest.raises(error) as caught:
            fit(lambda module=module: module, strategy, val=classification_data(seed=9))
        assert type(caught.value) is error
        texts.append(str(caught.value))
        assert not {"log", "log_dict", "training_step", "forward"} & (set(vars(module)) - before)
    assert texts[0] == texts[1]


# ------------------------------------------------------------------------------------------------------------- modes


def test_mode_forward_compiles_the_modules_forward_only() -> None:
    ours, eager = fit_both(Classifier, {"compile": "forward"}, val=classification_data(seed=9))
    assert_same_training(ours, eager)
    for name in ("training_step", "validation_step"):
        assert (ours.step(name)["mode"], ours.step(name)["graphs"]) == ("forward", 1)
    trace = lts.traces(ours.trainer)[1][0].python()
    assert "linear" in trace and "cross_entropy" not in trace


def test_mode_forward_says_so_if_the_step_does_not_call_it_and_compiles_submodules() -> None:
    with compile_warnings() as messages:
        ours, eager = fit_both(Linear, {"compile": "forward"})
    assert_same_training(ours, eager)
    assert len(messages) == 1 and "does not call the module's own forward" in messages[0]
    assert (ours.step()["mode"], ours.step()["graphs"]) == ("submodules", 1)


@pytest.mark.parametrize("mode", ["forward", "submodules"])
def test_a_unit_that_is_not_called_is_an_error_under_fullgraph(mode: str) -> None:
    class Bare(Linear):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(nn.functional.linear(batch[0], self.net.weight), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.net.weight], lr=0.1)

    with pytest.raises(lts.CompileError, match="forward" if mode == "forward" else "no submodule"):
        fit(Bare, thunder(compile=lts.CompileConfig(mode=mode, fullgraph=True)))


@pytest.mark.parametrize("mode", ["forward", "submodules"])
def test_a_cut_inside_a_smaller_unit_is_said_once(mode: str) -> None:
    class PrintingLayer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x) * 2
            print("cut")
            return y + 1

    class Module(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net[4] = PrintingLayer(8, CLASSES)

    with compile_warnings() as messages:
        ours, eager = fit_both(Module, {"compile": mode})
    assert_same_training(ours, eager)
    assert len(messages) == 1 and "test_fallbacks.py:" in messages[0] and "print" in messages[0]
    assert ours.step()["mode"] == mode and ours.step()["graphs"] > 1
    with pytest.raises(lts.CompileError, match="print"):
        fit(Module, thunder(compile=lts.CompileConfig(mode=mode, fullgraph=True)))


def test_mode_submodules_compiles_what_the_step_calls() -> None:
    with compile_warnings() as messages:
        ours, eager = fit_both(Classifier, {"compile": "submodules"})
    assert messages == []
    assert_same_training(ours, eager)
    assert (ours.step()["mode"], ours.step()["graphs"]) == ("submodules", 1)


def test_mode_submodules_says_so_if_there_are_none() -> None:
    class Bare(Linear):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return nn.functional.cross_entropy(nn.functional.linear(x, self.net.weight), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.net.weight], lr=0.1)

    with compile_warnings() as messages:
        ours, eager = fit_both(Bare, {"compile": "submodules"})
    assert_same_training(ours, eager)
    assert len(messages) == 1 and "calls no submodule" in messages[0] and "Nothing of it is compiled" in messages[0]
    assert (ours.step()["mode"], ours.step()["graphs"]) == ("off", 0)


def test_mode_off_compiles_nothing() -> None:
    with compile_warnings() as messages:
        ours, eager = fit_both(Classifier, {"compile": "off"})
    assert messages == []
    assert_same_training(ours, eager)
    assert (ours.step()["mode"], ours.step()["graphs"]) == ("off", 0)


def test_different_batch_lengths_keep_the_class_count_check(recwarn) -> None:
    """A later error of the user's data is still torch's own, from a compiled program."""
    loader = classification_data()
    loader.dataset.tensors[1][20] = CLASSES + 5
    errors = []
    for strategy in (thunder(), "auto"):
        with pytest.raises(IndexError) as caught:
            fit(Linear, strategy, train=loader)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_submodules_called_directly_and_as_parts_of_others_are_compiled_once_each() -> None:
    class Mixed(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            direct = self.net[0](x) if batch_idx else self.net[4](self.net[0](x))
            return nn.functional.cross_entropy(self.net(x), y) + direct.square().mean()

    ours, eager = fit_both(Mixed, {"compile": "submodules"})
    assert_same_training(ours, eager)
    assert ours.step()["graphs"] == 3 and ours.step()["graph_breaks"] == []


def test_submodules_that_only_a_later_step_calls_are_compiled_too() -> None:
    class Alternates(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(FEATURES, CLASSES)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return nn.functional.cross_entropy((self.other if batch_idx == 2 else self.net)(x), y)

    ours, eager = fit_both(Alternates, {"compile": "submodules"})
    assert_same_training(ours, eager)
    assert ours.step()["graphs"] == 2


class GradientPenalty(Linear):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(self.net(x).square().sum(), x, create_graph=True)
        return nn.functional.cross_entropy(self.net(x), y) + slope.norm()


class Forces(Linear):
    """The gradient of an energy is the prediction."""

    def forces(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            return torch.autograd.grad(torch.tanh(self.net(x)).sum(), x, create_graph=self.training)[0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.forces(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("force", self.forces(batch[0]).square().mean())


@pytest.mark.parametrize("make", [GradientPenalty, Forces])
def test_a_step_that_takes_gradients_of_gradients_trains_as_eager(make) -> None:
    with compile_warnings() as messages:
        ours, eager = fit_both(make, val=classification_data(seed=9))
    assert_same_training(ours, eager)
    assert all("one compiled program" in message for message in messages)


def test_direct_backward_in_manual_optimization_trains_as_eager() -> None:
    class Manual(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            optimizer.step()
            self.log("loss", loss)

    ours, eager = fit_both(Manual)
    assert_same_training(ours, eager)
    assert ours.step()["graphs"] > 0


class PenaltyInManualOptimization(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def penalty(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        return torch.autograd.grad(torch.tanh(self.net(x)).sum(), x, create_graph=True)[0].norm()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch) + self.penalty(batch[0]))
        optimizer.step()


def test_a_gradient_penalty_in_manual_optimization_trains_as_eager() -> None:
    ours, eager = fit_both(PenaltyInManualOptimization)
    assert_same_training(ours, eager)
    assert ours.step()["graphs"] > 0


def test_differentiating_a_compiled_part_twice_is_an_error_with_the_fix() -> None:
    class Cut(PenaltyInManualOptimization):
        def penalty(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_(True)
            energy = torch.tanh(self.net(x)).sum()
            print("cut")
            return torch.autograd.grad(energy, x, create_graph=True)[0].norm()

    with pytest.raises(RuntimeError, match="compile='off'"):
        fit(Cut, thunder())
    fit(Cut, thunder(compile="off"))
