"""Checks of checkpoints that two ranks write and read."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.distributed.checkpoint import is_sharded_checkpoint
from lightning_thunder_strategy.distributed.schemes import whole
from lightning_thunder_strategy.strategies.storage import CheckpointWriteError
from tests.distributed.models import Resumable, make
from tests.distributed.parity import EXACT, _float64
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Result, fit_case, fit_fsdp2, loader, thunder, trainer

BIT_EQUAL = {"rtol": 0, "atol": 0}
TYPES = ("full", "sharded")
WHERE = "RANKS_CHECKPOINTS"  # environment variable of the one-process scenarios: where the checkpoints are


def uncompiled(kind: str, **options: Any) -> Any:
    """Compiling takes most of the time, and what is saved does not depend on it."""
    return thunder(kind, compile="off", **options)


@contextmanager
def _folder() -> Iterator[Path]:
    """An empty folder that all ranks know."""
    made = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(made)
    try:
        yield Path(made[0])
    finally:
        torch.distributed.barrier()
        shutil.rmtree(made[0], ignore_errors=True)


def _each_epoch(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)


def _fit_saving(strategy: Any, folder: Path, case: str = "resumable", **options: Any) -> Result:
    options = {"enable_checkpointing": True, "callbacks": [_each_epoch(folder)], **options}
    return fit_case(strategy, case, **options)


def _resume(strategy: Any, path: Path, case: str = "resumable", **options: Any) -> Result:
    return fit_case(strategy, case, ckpt_path=path, **options)


def _moments(result: Result) -> list[dict]:
    """States of the optimizers with whole tensors."""
    return [
        {
            "state": {
                number: {key: whole(value) if isinstance(value, Tensor) else value for key, value in state.items()}
                for number, state in optimizer.state_dict()["state"].items()
            },
            "groups": optimizer.state_dict()["param_groups"],
        }
        for optimizer in result.trainer.optimizers
    ]


def _assert_same_end(resumed: Result, uninterrupted: Result, **tolerance: Any) -> None:
    """Weights, moments, learning rates and counters after training."""
    close = lambda a, b: torch.testing.assert_close(a, b, **tolerance)  # noqa: E731
    assert resumed.weights.keys() == uninterrupted.weights.keys()
    close(resumed.weights, uninterrupted.weights)
    close(_moments(resumed), _moments(uninterrupted))
    close(resumed.losses, uninterrupted.losses[-len(resumed.losses) :])
    assert resumed.trainer.global_step == uninterrupted.trainer.global_step
    assert resumed.trainer.current_epoch == uninterrupted.trainer.current_epoch
    close(resumed.trainer.callback_metrics, uninterrupted.trainer.callback_metrics)


def check_resuming_is_bit_equal() -> None:
    for kind, compile, types in (("zero3", "step", TYPES), ("zero2", "off", TYPES), ("ddp", "off", TYPES)):
        for state_dict_type in types:
            with _folder() as folder:
                options = {"compile": compile, "state_dict_type": state_dict_type}
                through = _fit_saving(thunder(kind, **options), folder)
                path = folder / "epoch=0.ckpt"
                assert is_sharded_checkpoint(path) == (state_dict_type == "sharded")
                resumed = _resume(thunder(kind, **options), path)
                assert 0 < len(resumed.losses) < len(through.losses)
                _assert_same_end(resumed, through, **BIT_EQUAL)


def check_moments_are_exact_on_load() -> None:
    """Loaded and not trained on: every tensor of the optimizer is that of the one that saved."""
    for kind in ("ddp", "zero3"):
        for state_dict_type in TYPES:
            with _folder() as folder:
                saved = _fit_saving(uncompiled(kind, state_dict_type=state_dict_type), folder)
                loaded = _resume(uncompiled(kind), folder / "epoch=1.ckpt")
                assert loaded.losses == []
                torch.testing.assert_close(_moments(loaded), _moments(saved), **BIT_EQUAL)
                assert all(state["state"] for state in _moments(loaded))


def check_either_type_is_read_whatever_the_strategy_writes() -> None:
    with _folder() as folder:
        through = _fit_saving(uncompiled("zero3", state_dict_type="sharded"), folder)
        resumed = _resume(uncompiled("ddp", state_dict_type="full"), folder / "epoch=0.ckpt")
        _assert_same_end(resumed, through, rtol=1e-5, atol=1e-6)
    with _folder() as folder:
        through = _fit_saving("ddp", folder)
        for strategy in (uncompiled("zero3", state_dict_type="sharded"), uncompiled("ddp")):
            _assert_same_end(_resume(strategy, folder / "epoch=0.ckpt"), through, rtol=1e-5, atol=1e-6)


def check_two_optimizers_and_optimizers_without_state() -> None:
    """A GAN, and plain SGD."""
    for case in ("gan", "lora"):
        for state_dict_type in TYPES:
            with _folder() as folder:
                options = {"limit_val_batches": 0, "limit_train_batches": 2}
                through = _fit_saving(uncompiled("zero3", state_dict_type=state_dict_type), folder, case, **options)
                path = folder / "epoch=0.ckpt"
                resumed = _resume(uncompiled("zero3", state_dict_type=state_dict_type), path, case, **options)
                _assert_same_end(resumed, through, **BIT_EQUAL)


def check_tied_weights_stay_tied() -> None:
    for state_dict_type in TYPES:
        with _folder() as folder:
            through = _fit_saving(uncompiled("zero3", state_dict_type=state_dict_type), folder, "tied")
            resumed = _resume(uncompiled("zero3", state_dict_type=state_dict_type), folder / "epoch=0.ckpt", "tied")
            _assert_same_end(resumed, through, **BIT_EQUAL)
            assert resumed.module.net[0].weight is resumed.module.net[4].weight


# ------------------------------------------------------------------------------------------------------- world size


@_float64
def check_another_world_size() -> None:
    """Saved on two ranks and resumed on one, by our strategies and by a plain Trainer; and the reverse."""
    options = {"limit_val_batches": 0}
    with _folder() as folder:
        for state_dict_type in TYPES:
            strategy = uncompiled("zero3", state_dict_type=state_dict_type)
            through = _fit_saving(strategy, folder / state_dict_type, "odd_shapes", **options)
        weights = {name: value.tolist() for name, value in through.weights.items()}
        if torch.distributed.get_rank() == 0:
            torch.save(weights, folder / "weights.pt")
            run_ranks(
                "checkpoints:resume_on_one_process", "checkpoints:save_on_one_process",
                world_size=1, env={WHERE: str(folder)},
            )  # fmt: skip
        _wait_for(folder / "one_done")
        for state_dict_type in TYPES:
            path = folder / f"one_{state_dict_type}" / "epoch=0.ckpt"
            for kind in ("zero3", "ddp"):
                resumed = _resume(uncompiled(kind), path, "odd_shapes", **options)
                torch.testing.assert_close(resumed.weights, through.weights, **EXACT)


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)
    torch.distributed.barrier()


def _on_one(strategy: Any, **options: Any) -> dict[str, Any]:
    return {"strategy": strategy, "devices": 1, "batch_size": 8, "limit_val_batches": 0, **options}


def resume_on_one_process() -> None:
    """Run by ``check_another_world_size`` in a group of one."""
    torch.set_default_dtype(torch.float64)
    folder = Path(os.environ[WHERE])
    weights = {name: torch.tensor(value) for name, value in torch.load(folder / "weights.pt").items()}
    for state_dict_type in TYPES:
        path = folder / state_dict_type / "epoch=0.ckpt"
        strategies = [uncompiled("zero3"), uncompiled("ddp"), lts.ThunderStrategy(compile="off")]
        for strategy in [*strategies, *(["auto"] if state_dict_type == "full" else [])]:
            resumed = fit_case(case="odd_shapes", ckpt_path=path, **_on_one(strategy))
            assert resumed.losses
            for name, value in weights.items():
                torch.testing.assert_close(resumed.weights[name].view_as(value), value, **EXACT)


def save_on_one_process() -> None:
    """Run by ``check_another_world_size`` in a group of one."""
    folder = Path(os.environ[WHERE])
    for state_dict_type in TYPES:
        strategy = lts.ThunderStrategy(compile="off", state_dict_type=state_dict_type)
        if state_dict_type == "sharded":
            strategy = uncompiled("zero3", state_dict_type=state_dict_type)
        _fit_saving(case="odd_shapes", folder=folder / f"one_{state_dict_type}", **_on_one(strategy))
    (folder / "one_done").touch()


# ------------------------------------------------------------------------------------------------- files and folders


def check_a_full_checkpoint_is_that_of_ddp() -> None:
    with _folder() as folder:
        theirs = _fit_saving("ddp", folder / "ddp")
        for kind in ("ddp", "zero3"):
            _fit_saving(uncompiled(kind), folder / kind)
            ours, other = (
                torch.load(folder / name / "epoch=1.ckpt", weights_only=True) for name in (kind, "ddp")
            )  # our file needs no more trust than theirs
            assert ours.keys() == other.keys()
            shapes = lambda state: {k: (v.shape, v.dtype, type(v)) for k, v in state.items()}  # noqa: E731
            assert shapes(ours["state_dict"]) == shapes(other["state_dict"])
            assert list(ours["state_dict"]) == list(other["state_dict"])
            torch.testing.assert_close(ours["optimizer_states"], other["optimizer_states"], rtol=1e-4, atol=1e-6)
            assert ours["lr_schedulers"] == other["lr_schedulers"]
            assert ours["hyper_parameters"] == other["hyper_parameters"] == {"width": 9}
            plain = Resumable.load_from_checkpoint(folder / kind / "epoch=1.ckpt", strict=True)
            torch.testing.assert_close(plain.state_dict(), theirs.weights, rtol=1e-4, atol=1e-5)


def check_the_consolidate_command_reads_our_folder() -> None:
    with _folder() as folder:
        through = _fit_saving(uncompiled("zero3", state_dict_type="sharded"), folder)
        if torch.distributed.get_rank() == 0:
            path = folder / "epoch=1.ckpt"
            command = [sys.executable, "-m", "lightning.fabric.utilities.consolidate_checkpoint", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=100)
            assert done.returncode == 0, done.stderr
            plain = Resumable.load_from_checkpoint(f"{path}.consolidated", strict=True)
            torch.testing.assert_close(plain.state_dict(), through.weights, **BIT_EQUAL)
            names = torch.load(f"{path}.consolidated", weights_only=False)["optimizer_0"]["state"]
            assert "net.0.weight" in names and names["net.0.weight"]["exp_avg"].shape == (9, 6)


def check_what_fsdp2_wrote() -> None:
    """Lightning's ModelParallelStrategy saves a folder, or a file; ours resumes and ends where it does."""
    for distributed in (True, False):
        with _folder() as folder:
            options = {"enable_checkpointing": True, "limit_val_batches": 0}
            theirs = fit_fsdp2("smooth", distributed, callbacks=[_each_epoch(folder)], **options)
            assert (folder / "epoch=0.ckpt").is_dir() == distributed
            resumed = _resume(uncompiled("zero3"), folder / "epoch=0.ckpt", "smooth", limit_val_batches=0)
            torch.testing.assert_close(resumed.weights, theirs.weights, rtol=1e-5, atol=1e-6)


def check_top_k_and_last() -> None:
    for state_dict_type in TYPES:
        with _folder() as folder:
            callback = ModelCheckpoint(
                folder, filename="{epoch}", monitor="val", mode="max", save_top_k=1, save_last=True, every_n_epochs=1
            )
            strategy = uncompiled("zero3", state_dict_type=state_dict_type)
            result = _fit_saving(strategy, folder, "smooth", callbacks=[callback], max_epochs=3)
            torch.distributed.barrier()
            found = sorted(path.name for path in folder.iterdir())
            assert found == [Path(callback.best_model_path).name, "last.ckpt"], found
            assert all((folder / name).is_dir() == (state_dict_type == "sharded") for name in found)
            module, data = make("smooth")
            (metrics,) = result.trainer.validate(module, loader(data), ckpt_path="best", verbose=False)
            torch.testing.assert_close(metrics["val"], callback.best_model_score.item())
            result.trainer.validate(module, loader(data), ckpt_path="last", verbose=False)


def check_saving_after_fit_and_after_validate() -> None:
    """Also while parameters stay sharded after teardown."""
    for unshard in (True, False):
        for state_dict_type in TYPES:
            with _folder() as folder:
                strategy = uncompiled("zero3", state_dict_type=state_dict_type, unshard_on_teardown=unshard)
                result = fit_case(strategy, "resumable")
                result.trainer.save_checkpoint(folder / "fitted.ckpt")
                result.trainer.validate(result.module, loader(make("resumable")[1]), verbose=False)
                result.trainer.save_checkpoint(folder / "validated.ckpt")
                for name in ("fitted.ckpt", "validated.ckpt"):
                    loaded = _resume(uncompiled("zero3"), folder / name)
                    assert loaded.losses == []
                    torch.testing.assert_close(loaded.weights, result.weights, **BIT_EQUAL)
                    torch.testing.assert_close(_moments(loaded), _moments(result), **BIT_EQUAL)


def check_weights_only() -> None:
    for state_dict_type in TYPES:
        with _folder() as folder:
            result = fit_case(uncompiled("zero3", state_dict_type=state_dict_type), "resumable")
            result.trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
            made, module = trainer(uncompiled("zero3")), make("resumable")[0]
            made.validate(module, loader(make("resumable")[1]), ckpt_path=folder / "weights.ckpt", verbose=False)
            torch.testing.assert_close(dict(module.state_dict()), result.weights, **BIT_EQUAL)


def check_files_and_folders_replace_each_other() -> None:
    with _folder() as folder:
        path = folder / "model.ckpt"
        for state_dict_type in ("full", "sharded", "sharded", "full", "full"):
            result = fit_case(uncompiled("zero3", state_dict_type=state_dict_type), "smooth", limit_val_batches=0)
            result.trainer.save_checkpoint(path)
            torch.distributed.barrier()
            assert path.is_dir() == (state_dict_type == "sharded")
            assert [item.name for item in folder.iterdir()] == ["model.ckpt"], "nothing else is left"
        loaded = _resume(uncompiled("zero3"), path, "smooth", limit_val_batches=0)
        torch.testing.assert_close(loaded.weights, result.weights, **BIT_EQUAL)


class Custom(Resumable):
    """Leaves a parameter out of its state, and adds to its checkpoints."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict:
        return {key: value for key, value in super().state_dict(*args, **kwargs).items() if key != "scale"}

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["note"] = "mine"

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.note = checkpoint["note"]


def check_modules_that_change_their_checkpoints() -> None:
    for state_dict_type in TYPES:
        with _folder() as folder:
            module = Custom()
            module.strict_loading = False
            made = trainer(uncompiled("zero3", state_dict_type=state_dict_type), max_epochs=1)
            made.fit(module, loader(make("resumable")[1]))
            made.save_checkpoint(folder / "custom.ckpt")
            other = Custom()
            other.strict_loading = False
            made = trainer(uncompiled("zero3"), max_epochs=1)
            made.fit(other, loader(make("resumable")[1]), ckpt_path=folder / "custom.ckpt")
            assert other.note == "mine"
            assert torch.equal(other.net[0].weight, module.net[0].weight)
            assert other.scale.item() == 1.5


# ------------------------------------------------------------------------------------------------------------ errors


def check_a_write_error_reaches_every_rank() -> None:
    for state_dict_type in TYPES:
        with _folder() as folder:
            result = fit_case(uncompiled("zero3", state_dict_type=state_dict_type), "smooth", limit_val_batches=0)
            blocked = folder / "file"
            blocked.write_text("in the way")
            try:
                result.trainer.save_checkpoint(blocked / "model.ckpt")
            except CheckpointWriteError as error:
                assert str(blocked / "model.ckpt") in str(error) and "Error: [Errno" in str(error), error
            else:
                raise AssertionError("no error on this rank")


def check_an_interrupted_write_leaves_the_old_checkpoint() -> None:
    for state_dict_type in TYPES:
        with _folder() as folder:
            path = folder / "model.ckpt"
            result = fit_case(uncompiled("zero3", state_dict_type=state_dict_type), "smooth", limit_val_batches=0)
            result.trainer.save_checkpoint(path)
            save, rank = torch.save, torch.distributed.get_rank()

            def fail(*args: Any, **kwargs: Any) -> None:
                raise OSError(28, "No space left on device")

            torch.distributed.barrier()
            try:
                torch.save = fail if rank == (0 if state_dict_type == "full" else 1) else save
                result.trainer.save_checkpoint(path)
            except CheckpointWriteError as error:
                assert "No space left" in str(error), error
            else:
                raise AssertionError("no error on this rank")
            finally:
                torch.save = save
            torch.distributed.barrier()
            assert [item.name for item in folder.iterdir()] == ["model.ckpt"]
            loaded = _resume(uncompiled("zero3"), path, "smooth", limit_val_batches=0)
            torch.testing.assert_close(loaded.weights, result.weights, **BIT_EQUAL)


def check_a_checkpoint_of_another_model_is_refused() -> None:
    with _folder() as folder:
        for state_dict_type in TYPES:
            result = fit_case(uncompiled("zero3", state_dict_type=state_dict_type), "smooth", limit_val_batches=0)
            result.trainer.save_checkpoint(folder / state_dict_type)
            for path, words in ((folder / state_dict_type, "net.3"), (folder / "nothing.ckpt", "nothing.ckpt")):
                try:
                    _resume(uncompiled("zero3"), path)
                except Exception as error:
                    assert words in str(error), error
                else:
                    raise AssertionError(path)
