"""The states of a LightningModule and its optimizers under our Trainer strategies: saved, loaded and removed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.fabric.utilities.types import _PATH as PathLike
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_thunder_strategy.distributed import checkpoint as states
from lightning_thunder_strategy.strategies import storage
from lightning_thunder_strategy.strategies.background import BackgroundSaves, Write
from lightning_thunder_strategy.strategies.checkpoint_callbacks import TakenNames, refuse_links
from lightning_thunder_strategy.strategies.engine import Engine

_MODEL_STATES = ("state_dict", "current_model_state")  # the second beside an average of the weights
_MOST_OPTIMIZERS = 100


class SavedStates(Strategy):
    """What a strategy does with checkpoints."""

    _engine: Engine

    def _use(self, engine: Engine) -> None:
        self._engine = engine
        self._saves = BackgroundSaves()
        self._taken_names = TakenNames(self._saves)

    # --------------------------------------------------------------------------------------------------- background

    def _open_saves(self, callbacks: Sequence[Any]) -> None:
        """At the start of a fit: write checkpoints in the background, if that was asked for."""
        if self._engine.options.state_dict_type == "sharded" and type(self.checkpoint_io) is not TorchCheckpointIO:
            raise TypeError(
                f"state_dict_type='sharded' is not allowed with the plugin {type(self.checkpoint_io).__name__}, which "
                "would not be asked to write: use 'full', or leave the plugin out."
            )
        if not self._engine.options.async_save:
            return
        if type(self.checkpoint_io) is not TorchCheckpointIO:
            raise TypeError(
                f"async_save=True is not allowed with the plugin {type(self.checkpoint_io).__name__}, which writes "
                "checkpoints in its own way: leave out one of the two."
            )
        refuse_links(callbacks)
        self._saves.open(self._engine.timeout, alone=self._engine.parallelism == "none")
        self._taken_names.on(callbacks)

    def _close_saves(self) -> None:
        """Wait for what is under way, and write at once from now on."""
        self._taken_names.off()
        self._saves.close(failed=self._engine.failed)

    # ------------------------------------------------------------------------------------------------------- states

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        state = self.lightning_module.state_dict()
        return self._full(state) if self._engine.options.state_dict_type == "full" else state

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if self._engine.options.state_dict_type == "full":
            return self._full(optimizer.state_dict())
        assert self.lightning_module is not None
        return states.named_optimizer_state(optimizer, states.parameter_names(self.lightning_module))

    def _full(self, state: Any) -> Any:
        return states.full_state(state, keep=self.is_global_zero)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Optional[Any] = None
    ) -> None:
        filepath = self.broadcast(filepath)
        if self._engine.options.state_dict_type == "full" and states.has_distributed_tensors(checkpoint["state_dict"]):
            checkpoint["state_dict"] = self._full(checkpoint["state_dict"])  # a callback has put an average there
        sharded = self._engine.options.state_dict_type == "sharded"
        if self._engine.options.async_save and not storage.is_local(filepath):
            raise ValueError(f"async_save=True writes to a local file or folder, not to {filepath!r}: set it to False.")
        if not sharded and (type(self.checkpoint_io) is not TorchCheckpointIO or not storage.is_local(filepath)):
            super().save_checkpoint(checkpoint, filepath, storage_options)  # a user's own way to write
            return
        path = Path(filepath).absolute() if storage.is_local(filepath) else Path(filepath)
        if not sharded and storage_options is not None:
            self.checkpoint_io.save_checkpoint(
                checkpoint, filepath, storage_options=storage_options
            )  # raises everywhere
            return
        if not sharded:
            content = checkpoint if self.is_global_zero else None
            self._saves.write(self, path, content, self._writes_file(path))
            self._wait_for_requeue(path)
            return
        if storage_options is not None:
            raise TypeError(
                f"storage_options={storage_options!r} is not supported with state_dict_type='sharded': use 'full' and "
                "a CheckpointIO plugin that understands them."
            )
        if not storage.is_local(filepath):
            raise ValueError(f"state_dict_type='sharded' writes to a local folder, not to {filepath!r}.")
        optimizers = {f"optimizer_{i}": state for i, state in enumerate(checkpoint.pop("optimizer_states", []))}
        models = {key: checkpoint.pop(key) for key in _MODEL_STATES if key in checkpoint}
        rest = checkpoint if self.is_global_zero else {}
        self._saves.write(self, path, ({**models, **optimizers}, rest), _writes_folder(path))
        self._wait_for_requeue(path)

    def _wait_for_requeue(self, path: Path) -> None:
        """Right after this checkpoint Lightning asks SLURM to end the job, and to start it again from it."""
        if path.name.startswith("hpc_ckpt_"):
            self._saves.wait()

    def _writes_file(self, path: Path) -> Write:
        def write(ranks: storage.Ranks, checkpoint: Any) -> None:
            storage.write_file(ranks, path, lambda file: self.checkpoint_io.save_checkpoint(checkpoint, file))

        return write

    @override
    def remove_checkpoint(self, filepath: PathLike) -> None:
        if type(self.checkpoint_io) is not TorchCheckpointIO or not storage.is_local(filepath):
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            self._saves.remove(Path(filepath))

    @override
    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: Optional[bool] = None) -> dict[str, Any]:
        self._saves.wait()
        checkpoint_path = self.broadcast(checkpoint_path)
        if storage.is_local(checkpoint_path) and states.is_sharded_checkpoint(Path(checkpoint_path)):
            return self._load_folder(Path(checkpoint_path), weights_only)
        if type(self.checkpoint_io) is TorchCheckpointIO:
            return storage.read_file(checkpoint_path, weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def _load_folder(self, path: Path, weights_only: Optional[bool]) -> dict[str, Any]:
        assert self.lightning_module is not None
        keys = [f"optimizer_{index}" for index in range(_MOST_OPTIMIZERS)]
        likes = {key: self.lightning_module.state_dict() for key in _MODEL_STATES}
        state, checkpoint = storage.read_folder(path, likes, keys, weights_only)
        optimizers = [state.pop(key) for key in keys if key in state]
        return {**checkpoint, **state, "optimizer_states": optimizers}

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        states.load_model_state(self.lightning_module, checkpoint["state_dict"], strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"]):
            states.load_optimizer_state(optimizer, state, states.parameter_names(self.lightning_module))
            if not self._engine.sharded:
                optimizers_to_device([optimizer], self.root_device)


def _writes_folder(path: Path) -> Write:
    def write(ranks: Any, content: Any) -> None:
        storage.write_folder(ranks, path, *content, group=getattr(ranks, "group", None))

    return write
