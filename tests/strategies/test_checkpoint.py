"""Checkpoints of ThunderStrategy: files of the plain model, folders of shards, resuming, interrupted writes."""

import copy
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor

from lightning_thunder_strategy.distributed.checkpoint import is_sharded_checkpoint
from lightning_thunder_strategy.strategies.storage import CheckpointReadError, CheckpointWriteError
from tests.strategies.modules import Classifier, Linear
from tests.strategies.training import (
    Run,
    assert_same,
    assert_same_state,
    assert_same_training,
    classification_data,
    fit,
    make_trainer,
    thunder,
)

KINDS = ["full", "sharded"]


class Resumable(Classifier):
    """No dropout; a scheduler; tied to hyperparameters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width, dropout=0.0)
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def saved(tmp_path: Path, kind: str, make: Any = Resumable, epochs: int = 2) -> tuple[Run, Path]:
    run = fit(make, thunder(state_dict_type=kind), max_epochs=epochs)
    path = tmp_path / "model.ckpt"
    run.trainer.save_checkpoint(path)
    return run, path


def test_a_full_checkpoint_is_the_file_that_lightning_writes(tmp_path) -> None:
    ours, path = saved(tmp_path, "full")
    eager = fit(Resumable, "auto")
    eager.trainer.save_checkpoint(tmp_path / "eager.ckpt")
    one, other = (torch.load(p, weights_only=False) for p in (path, tmp_path / "eager.ckpt"))
    assert list(one) == list(other)
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "hyper_parameters", "epoch", "global_step"):
        assert_same(one[key], other[key], key)
    assert list(torch.load(path, weights_only=True, mmap=True)["state_dict"]) == list(Resumable().state_dict())
    loaded = Resumable.load_from_checkpoint(path)
    assert_same_state(loaded, ours.module)
    plain = Resumable()
    plain.load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_at_an_epochs_end_is_bit_equal_to_the_uninterrupted_run(kind: str, tmp_path) -> None:
    class Moments(Callback):
        """The optimizer's state when training starts again."""

        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.state = copy.deepcopy(trainer.optimizers[0].state_dict()["state"])

    first, path = saved(tmp_path, kind)
    moments = copy.deepcopy(first.trainer.optimizers[0].state_dict()["state"])
    watch = Moments()
    resumed = fit(Resumable, thunder(state_dict_type=kind), ckpt_path=path, callbacks=lambda: [watch], max_epochs=4)
    whole = fit(Resumable, thunder(), max_epochs=4)
    assert_same(watch.state, moments, "moments")
    resumed.gradients, whole.gradients = resumed.gradients, whole.gradients[len(first.gradients) :]
    resumed.random = whole.random  # dataloaders have drawn their seeds again
    assert_same_training(resumed, whole)
    schedulers = [run.trainer.lr_scheduler_configs[0].scheduler.state_dict() for run in (resumed, whole)]
    assert_same(schedulers[0], schedulers[1], "scheduler")
    assert resumed.trainer.current_epoch == 4


def test_a_checkpoint_of_one_kind_is_read_by_the_other(tmp_path) -> None:
    for kind, other in (KINDS, KINDS[::-1]):
        first, path = saved(tmp_path / kind, kind, epochs=1)
        resumed = fit(Resumable, thunder(state_dict_type=other), ckpt_path=path, max_epochs=2)
        whole = fit(Resumable, "auto", max_epochs=2)
        assert_same_state(resumed.module, whole.module)


def test_lightnings_own_checkpoint_resumes_under_ours_and_the_reverse(tmp_path) -> None:
    eager = fit(Resumable, "auto", max_epochs=1)
    eager.trainer.save_checkpoint(tmp_path / "eager.ckpt")
    _, path = saved(tmp_path, "full", epochs=1)
    ours = fit(Resumable, thunder(), ckpt_path=tmp_path / "eager.ckpt", max_epochs=2)
    theirs = fit(Resumable, "auto", ckpt_path=path, max_epochs=2)
    assert_same_training(ours, theirs)


def test_a_sharded_checkpoint_is_a_folder_that_the_consolidate_command_reads(tmp_path, monkeypatch) -> None:
    run, path = saved(tmp_path, "sharded", epochs=1)
    assert path.is_dir() and is_sharded_checkpoint(path)
    monkeypatch.setattr(sys, "argv", ["consolidate_checkpoint", str(path)])
    runpy.run_module("lightning.fabric.utilities.consolidate_checkpoint", run_name="__main__")
    consolidated = torch.load(f"{path}.consolidated", weights_only=False)
    assert_same(consolidated["state_dict"], dict(run.module.state_dict()), "state_dict")
    loaded = Resumable.load_from_checkpoint(f"{path}.consolidated")
    assert_same_state(loaded, run.module)


def test_a_file_is_overwritten_by_a_folder_and_back(tmp_path) -> None:
    for kind in ("full", "sharded", "sharded", "full", "full"):
        _, path = saved(tmp_path, kind, make=Linear, epochs=1)
        assert path.is_dir() == (kind == "sharded")
        assert [item.name for item in tmp_path.iterdir()] == ["model.ckpt"]
        fit(Linear, thunder(), ckpt_path=path, max_epochs=2)


@pytest.mark.parametrize("kind", KINDS)
def test_saving_after_fit_and_after_test_and_from_validation(kind: str, tmp_path) -> None:
    run = fit(Resumable, thunder(state_dict_type=kind), max_epochs=1)
    run.trainer.save_checkpoint(tmp_path / "fit.ckpt")
    run.trainer.test(run.module, classification_data(), verbose=False)
    run.trainer.save_checkpoint(tmp_path / "test.ckpt")
    run.trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    for name in ("fit", "test", "weights"):
        module = Resumable()
        trainer = make_trainer(thunder(state_dict_type=kind))
        trainer.validate(module, classification_data(), ckpt_path=tmp_path / f"{name}.ckpt", verbose=False)
        assert_same_state(module, run.module)


@pytest.mark.parametrize("kind", KINDS)
def test_fit_then_test_the_best_then_fit_on(kind: str, tmp_path) -> None:
    results = []
    for strategy in (thunder(state_dict_type=kind), "auto"):
        folder = tmp_path / str(len(results))
        checkpoint = ModelCheckpoint(
            folder, "{epoch}-{step}", monitor="val_loss", save_top_k=2, save_last=True, every_n_epochs=1
        )
        run = fit(
            Resumable, strategy, val=classification_data(seed=9), callbacks=lambda c=checkpoint: [c],
            enable_checkpointing=True, max_epochs=3,
        )  # fmt: skip
        tested = run.trainer.test(run.module, classification_data(seed=9), ckpt_path="best", verbose=False)
        run.trainer.fit_loop.max_epochs = 5
        run.trainer.fit(run.module, classification_data(), classification_data(seed=9), ckpt_path=folder / "last.ckpt")
        names = sorted(item.name for item in folder.iterdir())
        results.append((tested, names, Path(checkpoint.best_model_path).name, dict(run.module.state_dict())))
        assert all((folder / name).is_dir() == (kind == "sharded" and len(results) == 1) for name in names)
    assert_same(*results, "results")
    assert len(results[0][1]) == 3


def test_checkpoints_every_few_steps_and_on_an_exception(tmp_path) -> None:
    class Fails(Resumable):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 5:
                raise RuntimeError("stop")

    callbacks = [
        ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=2),
        OnExceptionCheckpoint(tmp_path, "exception"),
    ]
    with pytest.raises(RuntimeError, match="stop"):
        fit(Fails, thunder(), callbacks=lambda: callbacks, enable_checkpointing=True)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["exception.ckpt", "step=2.ckpt", "step=4.ckpt"]
    assert torch.load(tmp_path / "exception.ckpt", weights_only=True)["global_step"] == 5


@pytest.mark.parametrize("kind", KINDS)
def test_the_users_own_state_dict_and_checkpoint_hooks_are_called(kind: str, tmp_path) -> None:
    class Own(Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {key: value for key, value in super().state_dict(*args, **kwargs).items() if "bias" not in key}

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["own"] = {"tensor": torch.arange(3), "text": "kept"}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.found = checkpoint["own"]

        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            assert "net.bias" not in state_dict
            return super().load_state_dict(state_dict, strict=False)

    run, path = saved(tmp_path, kind, make=Own, epochs=1)
    resumed = fit(Own, thunder(state_dict_type=kind), ckpt_path=path, max_epochs=2)
    assert resumed.module.found["text"] == "kept" and torch.equal(resumed.module.found["tensor"], torch.arange(3))
    if kind == "full":
        assert list(torch.load(path, weights_only=True)["state_dict"]) == ["net.weight"]


@pytest.mark.parametrize("kind", KINDS)
def test_strict_loading_off_accepts_other_keys(kind: str, tmp_path) -> None:
    class Larger(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.extra = torch.nn.Linear(2, 2)

    _, path = saved(tmp_path, kind, make=Linear, epochs=1)
    with pytest.raises(RuntimeError, match="extra.weight"):
        make_trainer(thunder()).test(with_test_step(Larger), classification_data(), ckpt_path=path, verbose=False)
    module = with_test_step(Larger)
    module.strict_loading = False
    make_trainer(thunder()).test(module, classification_data(), ckpt_path=path, verbose=False)


def with_test_step(make: Any) -> L.LightningModule:
    class WithTest(make):
        def test_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch)

    return WithTest()


# --------------------------------------------------------------------------------------------------- interrupted writes


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_that_fails_leaves_the_previous_checkpoint_and_no_rubbish(kind: str, tmp_path, monkeypatch) -> None:
    run, path = saved(tmp_path, kind, make=Linear, epochs=1)
    before = {name: value.clone() for name, value in run.module.state_dict().items()}
    run.trainer.fit_loop.max_epochs = 2
    run.trainer.fit(run.module, classification_data())

    save = torch.save

    def fails(*args: Any, **kwargs: Any) -> None:
        save(*args, **kwargs)
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises((CheckpointWriteError, OSError), match=r"model.ckpt.*No space left on device"):
        run.trainer.save_checkpoint(path)
    monkeypatch.undo()
    assert [item.name for item in tmp_path.iterdir()] == ["model.ckpt"]
    module = with_test_step(Linear)
    make_trainer(thunder()).test(module, classification_data(), ckpt_path=path, verbose=False)
    assert_same(dict(module.state_dict()), before, "state")


KILLED = """
import os, signal, sys, torch
from tests.strategies.modules import Linear
from tests.strategies.training import classification_data, fit, thunder

def killed(*args, **kwargs):
    save(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)

torch.set_num_threads(1)
save = torch.save
for kind in sys.argv[2:]:
    path = f"{sys.argv[1]}/{kind}.ckpt"
    run = fit(Linear, thunder(state_dict_type=kind), max_epochs=1)
    run.trainer.save_checkpoint(path)
    torch.save(run.module.state_dict(), path + ".expected")
    run.trainer.fit_loop.max_epochs = 2
    run.trainer.fit(run.module, classification_data())
    child = os.fork()
    if child == 0:
        torch.save = killed
        run.trainer.save_checkpoint(path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
"""


def test_a_process_killed_while_writing_leaves_the_previous_checkpoint(tmp_path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "CUDA_VISIBLE_DEVICES": "",  # it forks, which CUDA does not survive
    }
    command = [sys.executable, "-c", KILLED, str(tmp_path), *KINDS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    for kind in KINDS:
        path = tmp_path / f"{kind}.ckpt"
        module = with_test_step(Linear)
        make_trainer(thunder()).test(module, classification_data(), ckpt_path=path, verbose=False)
        assert_same(dict(module.state_dict()), torch.load(f"{path}.expected"), "state")


def test_a_checkpoint_that_is_not_there_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found: nowhere.ckpt"):
        fit(Linear, thunder(), ckpt_path="nowhere.ckpt")


@pytest.mark.parametrize(("state_dict_type", "refuses"), [("full", "TorchCheckpointIO"), ("sharded", "'sharded'")])
def test_storage_options_are_refused_by_who_cannot_use_them(state_dict_type, refuses, tmp_path) -> None:
    run = fit(Linear, thunder(state_dict_type=state_dict_type), max_epochs=1)
    with pytest.raises(TypeError, match=f"storage_options.*{refuses}.*CheckpointIO"):
        run.trainer.save_checkpoint(tmp_path / "x.ckpt", storage_options={"a": 1})


def test_a_users_checkpoint_io_writes_and_reads_full_checkpoints(tmp_path) -> None:
    class Counting(TorchCheckpointIO):
        calls: list[str] = []

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            self.calls.append(f"save {storage_options}")
            super().save_checkpoint(checkpoint, path)

        def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append("load")
            return super().load_checkpoint(path, *args, **kwargs)

    run = fit(Linear, thunder(), max_epochs=1, plugins=[Counting()])
    run.trainer.save_checkpoint(tmp_path / "x.ckpt", storage_options={"a": 1})
    fit(Linear, thunder(), max_epochs=2, plugins=[Counting()], ckpt_path=tmp_path / "x.ckpt")
    assert Counting.calls == ["save {'a': 1}", "load"]


@pytest.mark.parametrize("kind", ("full", "sharded"))
def test_a_damaged_checkpoint_is_named(kind: str, tmp_path) -> None:
    """Every file of it, empty, cut in the middle, one byte too short, or gone."""
    path = tmp_path / "x.ckpt"
    strategy = thunder(compile="off", state_dict_type=kind)
    fit(Resumable, strategy).trainer.save_checkpoint(path)
    files = sorted(path.iterdir()) if kind == "sharded" else [path]
    assert [file.name for file in files] == (
        [".metadata", "__0_0.distcp", "meta.pt"] if kind == "sharded" else ["x.ckpt"]
    )
    for file in files:
        whole = file.read_bytes()
        for size in (0, len(whole) // 2, len(whole) - 1, None):
            file.unlink() if size is None else file.write_bytes(whole[:size])
            gone = size is None and file.name != ".metadata" and file.suffix != ".distcp"
            error = FileNotFoundError if gone else CheckpointReadError
            with pytest.raises(error, match="Checkpoint file not found: .*x.ckpt" if gone else "x.ckpt is damaged"):
                strategy.load_checkpoint(path)
        file.write_bytes(whole)
    assert strategy.load_checkpoint(path)["global_step"] > 0
