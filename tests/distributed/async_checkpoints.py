"""Checks of checkpoints that two ranks write while they train."""

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.distributed import files
from lightning_thunder_strategy.strategies import storage
from lightning_thunder_strategy.strategies.background import BackgroundSaves
from lightning_thunder_strategy.strategies.storage import CheckpointWriteError
from tests.distributed import tensor
from tests.distributed.checkpoints import (
    BIT_EQUAL,
    TYPES,
    _assert_same_end,
    _each_epoch,
    _fit_saving,
    _folder,
    _resume,
    uncompiled,
)
from tests.distributed.models import make
from tests.distributed.training import loader


@contextmanager
def slow_writes(seconds: float = 0.3) -> Iterator[None]:
    """Training is several steps ahead when a checkpoint is complete."""
    swap_in = files.swap_in

    def later(new: Path, path: Path) -> None:
        time.sleep(seconds)
        swap_in(new, path)

    storage.swap_in = files.swap_in = later
    try:
        yield
    finally:
        storage.swap_in = files.swap_in = swap_in


def check_what_is_written_is_what_was_there_at_the_call() -> None:
    for kind, types in (("zero3", TYPES), ("ddp", ("full",))):
        for state_dict_type in types:
            options = {"state_dict_type": state_dict_type, "async_save": True}
            with _folder() as folder, slow_writes():
                through = _fit_saving(uncompiled(kind, **options), folder)
                assert sorted(path.name for path in folder.iterdir()) == ["epoch=0.ckpt", "epoch=1.ckpt"]
                resumed = _resume(uncompiled(kind, **options), folder / "epoch=0.ckpt")
                _assert_same_end(resumed, through, **BIT_EQUAL)


def check_the_same_under_tensor_parallelism() -> None:
    for state_dict_type in TYPES:
        options = {"state_dict_type": state_dict_type, "async_save": True, "compile": "off", "plan": tensor.TWO_LAYERS}
        with _folder() as folder, slow_writes():
            saving = {"callbacks": [_each_epoch(folder)], "enable_checkpointing": True}
            through = tensor.fit(tensor.Plain(), tensor.strategy(**options), **saving)
            path = folder / "epoch=0.ckpt"
            resumed = tensor.fit(tensor.Plain(), tensor.strategy(**options), ckpt_path=path)
            _assert_same_end(resumed, through, **BIT_EQUAL)


def check_the_best_and_the_last_one_load_during_later_stages() -> None:
    for state_dict_type in TYPES:
        with _folder() as folder, slow_writes(0.1):
            callback = ModelCheckpoint(
                folder, filename="same", monitor="val", mode="max", save_top_k=2, save_last=True, every_n_epochs=1
            )
            strategy = uncompiled("zero3", state_dict_type=state_dict_type, async_save=True)
            result = _fit_saving(strategy, folder, "smooth", callbacks=[callback], max_epochs=3)
            torch.distributed.barrier()
            found = sorted(path.name for path in folder.iterdir())
            assert found == sorted([*(Path(path).name for path in callback.best_k_models), "last.ckpt"]), found
            assert len(found) == 3
            module, data = make("smooth")
            (metrics,) = result.trainer.validate(module, loader(data), ckpt_path="best", verbose=False)
            torch.testing.assert_close(metrics["val"], callback.best_model_score.item())
            result.trainer.validate(module, loader(data), ckpt_path="last", verbose=False)


def check_a_write_error_reaches_every_rank_at_the_next_save() -> None:
    """Of rank zero that writes the file, or of rank one that writes its shards."""
    for state_dict_type in TYPES:
        with _folder() as folder:
            victim, save = 0 if state_dict_type == "full" else 1, torch.save
            threads: list[threading.Thread] = []  # one for each save

            def fail(*args: Any, victim: int = victim, save: Any = save, threads: list = threads, **kw: Any) -> None:
                if threading.current_thread() not in threads:
                    threads.append(threading.current_thread())
                if torch.distributed.get_rank() == victim and len(threads) == 2:
                    raise OSError(28, "No space left on device")
                save(*args, **kw)

            strategy = uncompiled("zero3", state_dict_type=state_dict_type, async_save=True)
            torch.save = fail
            try:
                _fit_saving(strategy, folder, "smooth", max_epochs=4)
            except CheckpointWriteError as error:
                assert "epoch=1.ckpt could not be written: OSError" in str(error), error
                assert "No space left" in str(error), error
            else:
                raise AssertionError("no error on this rank")
            finally:
                torch.save = save
            torch.distributed.barrier()
            assert [path.name for path in folder.iterdir()] == ["epoch=0.ckpt"]
            assert _resume(uncompiled("zero3"), folder / "epoch=0.ckpt", "smooth").losses


def check_a_copy_that_fails_on_one_rank_is_an_error_on_all() -> None:
    saves = BackgroundSaves()
    saves.open(timedelta(seconds=30), alone=False)
    content = threading.Lock() if torch.distributed.get_rank() == 1 else torch.ones(2)
    try:
        saves.write(None, Path("x.ckpt"), content, lambda ranks, copied: None)  # type: ignore[arg-type]
    except CheckpointWriteError as error:
        assert "cannot be copied" in str(error)
    else:
        raise AssertionError("no error")
    saves.close(failed=False)


def check_processes_that_train_by_themselves_save_by_themselves() -> None:
    """A strategy of one device does not ask other processes, also where there are some."""
    if torch.distributed.get_rank() == 0:
        return  # it does not train
    with tempfile.TemporaryDirectory() as folder:
        strategy = lts.ThunderStrategy(executors=["eager"], compile="off", async_save=True)
        keeper = ModelCheckpoint(folder, every_n_train_steps=1)
        module, data = make("mlp")
        options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_steps": 2}
        trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, callbacks=[keeper], **options)
        trainer.fit(module, loader(data))
        assert Path(keeper.best_model_path).exists()
