"""Checkpoints that are written while training goes on, on one process."""

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.compiler.failures import ExecutorError, reported
from lightning_thunder_strategy.distributed import files, last_words
from lightning_thunder_strategy.distributed.snapshot import snapshot
from lightning_thunder_strategy.strategies import storage
from lightning_thunder_strategy.strategies.background import BackgroundSaves
from lightning_thunder_strategy.strategies.storage import CheckpointWriteError
from tests.properties.interrupted_writes import weights
from tests.strategies.modules import Linear
from tests.strategies.training import classification_data, make_trainer

KINDS = ("full", "sharded")


class Slow:
    """Lets each write wait, before it is moved to its place, until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released, self.threads = threading.Event(), []
        waiting = self._waiting(storage.swap_in)
        for module in (storage, files):
            monkeypatch.setattr(module, "swap_in", waiting)

    def _waiting(self, swap_in: Any) -> Any:
        def wait(new: Path, path: Path) -> None:
            self.threads.append(threading.current_thread().name)
            assert self.released.wait(20)
            swap_in(new, path)

        return wait


class Adaptive(Linear):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def strategy(kind: str = "full", **options: Any) -> lts.ThunderStrategy:
    return lts.ThunderStrategy(executors=["eager"], compile="off", state_dict_type=kind, async_save=True, **options)


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


class EachStep(L.Callback):
    """Calls a function after each training step."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.function(trainer, pl_module)


def fit(kind: str, after_step: Any, **options: Any) -> L.Trainer:
    callbacks = [EachStep(after_step), *options.pop("callbacks", [])]
    trainer = make_trainer(strategy(kind), max_epochs=1, callbacks=callbacks, **options)
    trainer.fit(Adaptive(), classification_data())
    return trainer


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_what_was_there_at_the_call(kind: str, tmp_path: Path, monkeypatch) -> None:
    slow, before = Slow(monkeypatch), []

    def save_and_change(trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_step == 2:
            before.append(module.net.weight.detach().clone())
            trainer.save_checkpoint(tmp_path / "x.ckpt")
            with torch.no_grad():
                module.net.weight.fill_(7.0)
                for state in trainer.optimizers[0].state.values():
                    state["exp_avg"].fill_(7.0)
            assert visible(tmp_path) == [], "training goes on before it is complete"
            slow.released.set()

    trainer = fit(kind, save_and_change)
    assert slow.threads == ["lts-save"] and trainer.global_step == 3
    torch.testing.assert_close(weights(tmp_path / "x.ckpt"), before[0], rtol=0, atol=0)
    state = trainer.strategy.load_checkpoint(tmp_path / "x.ckpt")
    assert state["global_step"] == 2
    moments = next(iter(state["optimizer_states"][0]["state"].values()))["exp_avg"]
    assert (moments != 7).all()
    resumed = make_trainer(strategy(kind), max_epochs=2)
    resumed.fit(Adaptive(), classification_data(), ckpt_path=tmp_path / "x.ckpt")
    assert resumed.global_step > 3


@pytest.mark.parametrize("kind", KINDS)
def test_an_older_checkpoint_goes_when_the_new_one_is_complete(kind: str, tmp_path: Path, monkeypatch) -> None:
    slow, seen = Slow(monkeypatch), {}
    slow.released.set()

    def hold(trainer: L.Trainer, module: L.LightningModule) -> None:  # before the save of each step
        step = trainer.global_step
        if step == 2:
            trainer.strategy._saves.wait()
            slow.released.clear()
        seen[step] = visible(tmp_path)
        if step == 3:
            slow.released.set()

    keeper = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1)
    fit(kind, hold, callbacks=[keeper], enable_checkpointing=True)
    assert seen == {1: [], 2: ["step=1.ckpt"], 3: ["step=1.ckpt"]}, "the second one is not complete before step 3"
    assert visible(tmp_path) == ["step=3.ckpt"] and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_that_fails_is_an_error_at_the_next_save_and_the_older_one_stays(
    kind: str, tmp_path: Path, monkeypatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    def fill(trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_step == 2:
            trainer.strategy._saves.wait()
            for module in (storage, files):
                monkeypatch.setattr(module, "flush", full)

    keeper = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1)
    with pytest.raises(CheckpointWriteError, match=r"step=2.ckpt could not be written: OSError.*No space left"):
        fit(kind, fill, callbacks=[keeper], enable_checkpointing=True)
    assert visible(tmp_path) == ["step=1.ckpt"] and not list(tmp_path.glob(".*"))
    assert weights(tmp_path / "step=1.ckpt") is not None


def test_an_error_at_the_end_of_a_fit_is_raised_too(tmp_path: Path, monkeypatch) -> None:
    def save(trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_step == 3:
            (tmp_path / "file").touch()
            trainer.save_checkpoint(tmp_path / "file" / "x.ckpt")

    with pytest.raises(CheckpointWriteError, match=r"file/x.ckpt could not be written"):
        fit("full", save)


def test_after_another_error_the_write_is_completed_and_that_error_is_raised(tmp_path: Path) -> None:
    def save_and_fail(trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        fit("full", save_and_fail)
    assert weights(tmp_path / "x.ckpt") is not None
    assert not [thread for thread in threading.enumerate() if thread.name == "lts-save"]


def test_a_failed_write_after_another_error_is_a_warning(tmp_path: Path) -> None:
    def save_and_fail(trainer: L.Trainer, module: L.LightningModule) -> None:
        (tmp_path / "file").touch()
        trainer.save_checkpoint(tmp_path / "file" / "x.ckpt")
        raise RuntimeError("of the user")

    with (
        pytest.raises(RuntimeError, match="of the user"),
        pytest.warns(UserWarning, match="saved in the background is not complete.*x.ckpt"),
    ):
        fit("full", save_and_fail)


def test_outside_of_fit_a_save_is_complete_when_it_returns(tmp_path: Path) -> None:
    trainer = fit("full", lambda *_: None)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert visible(tmp_path) == ["x.ckpt"]


def test_names_are_chosen_as_if_the_checkpoint_were_there(tmp_path: Path, monkeypatch) -> None:
    slow = Slow(monkeypatch)
    keeper = ModelCheckpoint(tmp_path, filename="same", monitor="step", mode="max", save_top_k=2, every_n_train_steps=1)

    def release(trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_step == 2:  # the first one is still under way when the second one gets its name
            threading.Timer(0.3, slow.released.set).start()

    fit("full", release, callbacks=[keeper], enable_checkpointing=True)
    assert visible(tmp_path) == ["same-v1.ckpt", "same-v2.ckpt"] or visible(tmp_path) == ["same-v1.ckpt", "same.ckpt"]
    assert {torch.load(tmp_path / name)["global_step"] for name in visible(tmp_path)} == {2, 3}
    assert "file_exists" not in vars(keeper)


def test_links_and_other_ways_to_write_are_refused(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, save_last="link")
    with pytest.raises(ValueError, match="save_last='link' of ModelCheckpoint is not allowed with async_save=True"):
        fit("full", lambda *_: None, callbacks=[keeper], enable_checkpointing=True)
    with pytest.raises(TypeError, match="async_save=True is not allowed with the plugin AsyncCheckpointIO"):
        fit("full", lambda *_: None, plugins=[AsyncCheckpointIO()])
    with pytest.raises(TypeError, match="state_dict_type='sharded' is not allowed with the plugin AsyncCheckpointIO"):
        make_trainer(lts.ThunderStrategy(compile="off", state_dict_type="sharded"), plugins=[AsyncCheckpointIO()]).fit(
            Linear(), classification_data()
        )
    with pytest.raises(ValueError, match="async_save=True writes to a local file or folder, not to 'memory://x.ckpt'"):
        fit("full", lambda trainer, _: trainer.save_checkpoint("memory://x.ckpt"))
    held = {"state_dict": {}, "lock": threading.Lock()}
    with pytest.raises(
        CheckpointWriteError, match=r"x.ckpt could not be written in the background: .*cannot be copied"
    ):
        fit("full", lambda trainer, _: trainer.strategy.save_checkpoint({**held}, tmp_path / "x.ckpt"))


def test_a_snapshot_keeps_shared_memory_views_and_types() -> None:
    base = torch.arange(12.0)
    state = {
        "tied": base, "again": base, "view": base.view(3, 4).t()[1:], "list": [torch.tensor(3), None, "text"],
        "half": torch.ones(2, dtype=torch.bfloat16), "empty": torch.empty(0, 3), "sparse": torch.eye(3).to_sparse(),
        "parameter": torch.nn.Parameter(torch.ones(2)), "object": {1, 2},
    }  # fmt: skip
    copied = snapshot(state)
    for key in ("tied", "view", "half", "empty", "parameter"):
        torch.testing.assert_close(copied[key], state[key].detach(), rtol=0, atol=0)
        assert copied[key].stride() == state[key].stride()
    base.fill_(-1)
    state["object"].add(3)
    assert copied["tied"][5] == 5 and copied["object"] == {1, 2} and (copied["sparse"].to_dense() == torch.eye(3)).all()
    assert copied["again"] is copied["tied"]
    copied["tied"][5] = 50
    assert copied["view"][0, 1] == 50, "they share memory as the originals do"
    assert copied["list"] == [torch.tensor(3), None, "text"]


def test_a_snapshot_of_lazily_conjugated_values_has_their_values() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conjugated": value.conj(), "negated": value.conj().imag}
    copied = snapshot(state)
    for key, expected in state.items():
        torch.testing.assert_close(copied[key].resolve_conj().resolve_neg(), expected.resolve_conj().resolve_neg())


def test_the_copy_goes_when_it_is_written(tmp_path: Path) -> None:
    saves = BackgroundSaves()
    saves.open(None, alone=True)
    copies = []

    def write(ranks: Any, content: Any) -> None:
        copies.append(weakref.ref(content["weight"]))
        storage.write_file(ranks, tmp_path / "x.ckpt", lambda file: torch.save(content, file))

    saves.write(None, tmp_path / "x.ckpt", {"weight": torch.ones(3)}, write)  # type: ignore[arg-type]
    assert saves._job is not None
    saves._job.thread.join()
    gc.collect()
    assert copies[0]() is None and torch.load(tmp_path / "x.ckpt")["weight"].tolist() == [1, 1, 1]


def test_slurm_starts_a_job_again_from_a_checkpoint_that_is_there(tmp_path: Path) -> None:
    def save(trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
        assert torch.load(tmp_path / "hpc_ckpt_1.ckpt")["global_step"] == trainer.global_step

    fit("full", save)


def test_a_failed_communication_inside_a_region_is_one() -> None:
    def fails() -> None:
        raise RuntimeError("[gloo/transport] Connection closed by peer")

    with pytest.raises(ExecutorError) as caught:
        reported(fails, "inductor", "region_0", lambda: None)()  # type: ignore[arg-type, return-value]
    assert last_words._is_communication(caught.value)
    assert not last_words._is_communication(ValueError("Connection closed by peer"))
