"""What Lightning's own tests expect of any strategy, where one of ours once differed."""

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.fabric.plugins.io import CheckpointIO
from lightning.pytorch.strategies import Strategy
from torchmetrics import MeanMetric

import lightning_thunder_strategy as lts
from lightning_thunder_strategy import fabric as thunder
from tests.strategies.fabric_helpers import Net, fabric
from tests.strategies.modules import Linear
from tests.strategies.training import classification_data, make_trainer
from tests.strategies.training import thunder as thunder_trainer


class InMemory(CheckpointIO):
    """A user's own storage."""

    def __init__(self) -> None:
        self.files: dict[Path, Any] = {}

    def save_checkpoint(self, *, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.files[path] = (checkpoint, storage_options)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> dict[str, Any]:
        return self.files[path][0]

    def remove_checkpoint(self, path: Any) -> None:
        del self.files[path]


def test_fabric_hands_a_users_storage_what_it_names(tmp_path) -> None:
    storage = InMemory()
    strategy = thunder.ThunderStrategy(executors=["eager"])
    strategy.checkpoint_io = storage
    run = fabric(strategy)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer, "anything": {"a": 1}, "step": 1}
    run.save(tmp_path / "x", state, filter={key: lambda k, v: False for key in state})
    assert storage.files == {tmp_path / "x": ({"step": 1}, None)}


def test_the_backward_that_the_trainer_calls_can_be_watched() -> None:
    trainer = make_trainer(thunder_trainer(), max_epochs=1)
    with mock.patch.object(Strategy, "backward", wraps=trainer.strategy.backward) as watched:
        trainer.fit(Linear(), classification_data())
    assert watched.call_count == 3


def test_the_base_class_hears_of_an_exception() -> None:
    class Fails(Linear):
        def on_fit_start(self) -> None:
            raise error

    error = RuntimeError("in a hook")
    with mock.patch.object(Strategy, "on_exception") as watched, pytest.raises(RuntimeError, match="in a hook"):
        make_trainer(thunder_trainer(compile="off"), max_epochs=1).fit(Fails(), classification_data())
    watched.assert_called_once_with(error)


def test_a_clock_that_a_test_has_replaced_is_not_read() -> None:
    step = lts.compile(lambda x: (x * 2).sum(), executors=["eager"])
    x = torch.ones(2, requires_grad=True)
    with mock.patch("time.perf_counter", side_effect=[]):  # an exhausted one ends Lightning's epochs for ever
        step(x).backward()
    assert x.grad.tolist() == [2, 2]


class Manual(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step(closure=None)
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def test_a_mocked_optimizer_sees_no_other_calls_than_the_steps_own() -> None:
    trainer = make_trainer(thunder_trainer(), max_epochs=1)
    with mock.patch("torch.optim.SGD.step") as step:
        trainer.fit(Manual(), classification_data())
    assert [set(call.kwargs) for call in step.call_args_list] == [{"closure"}] * 3
    assert "_torchdynamo" not in str(step.mock_calls)


def test_schedulers_in_a_manual_step_know_their_optimizers() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(thunder_trainer(), max_epochs=1).fit(Manual(), classification_data())
    assert not [str(item.message) for item in caught if "lr_scheduler" in str(item.message)]


def test_a_logger_may_be_a_mock(tmp_path) -> None:
    logger = mock.Mock()
    logger.version, logger.name, logger.save_dir = "0", "name", tmp_path
    trainer = make_trainer(thunder_trainer(), max_epochs=1, logger=logger)
    trainer.fit(Linear(), classification_data())
    assert trainer.strategy.records()[0].programs
    logger.finalize.assert_called_once_with("success")


class WatchedMetric(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.seen = MeanMetric()
        self.seen.reset = mock.Mock(side_effect=self.seen.reset)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.seen(loss.detach())
        self.seen.reset.reset_mock()  # the metric's own call resets too
        self.log("seen", self.seen, on_epoch=True)
        return loss


def test_a_callable_that_a_user_puts_on_a_metric_stays_there() -> None:
    module = WatchedMetric()
    make_trainer(thunder_trainer(), max_epochs=1).fit(module, classification_data())
    module.seen.reset.assert_called_once()
