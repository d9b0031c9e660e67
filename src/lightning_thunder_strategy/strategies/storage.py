"""Writes and reads checkpoints for all ranks: a file from rank zero, or a folder with a shard from each."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Optional, Protocol

import torch
from lightning.fabric.utilities.cloud_io import _load as load_anywhere

from lightning_thunder_strategy.distributed import checkpoint as states
from lightning_thunder_strategy.distributed.files import beside, remove, replacing, swap_in


class Ranks(Protocol):
    """What writing needs of a strategy."""

    @property
    def is_global_zero(self) -> bool: ...

    def barrier(self, name: Optional[str] = None) -> None: ...

    def broadcast(self, obj: Any, src: int = 0) -> Any: ...


class CheckpointWriteError(RuntimeError):
    """A checkpoint could not be written; the one that was there before is whole."""


def is_local(path: Any) -> bool:
    """Whether a path names a file of this machine rather than remote storage."""
    return "://" not in str(path)


def write_file(ranks: Ranks, path: Path, write: Callable[[Path], None]) -> None:
    """Let rank zero write one file beside ``path`` and move it there. Every rank calls it.

    Raises:
        CheckpointWriteError: On every rank, if rank zero could not write.
    """
    error = None
    if ranks.is_global_zero:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path, beside(path)) as temporary:
                write(temporary)
        except Exception as failure:  # every rank must hear of it
            error = f"{type(failure).__name__}: {failure}"
    error = ranks.broadcast(error)
    if error is not None:
        raise CheckpointWriteError(f"The checkpoint {path} could not be written: {error}")


def write_folder(ranks: Ranks, path: Path, state: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Let every rank write its shards into a folder beside ``path`` and move it there. Every rank calls it.

    Raises:
        CheckpointWriteError: On every rank, if one could not write.
    """
    temporary = Path(ranks.broadcast(str(beside(path))))
    if ranks.is_global_zero:
        temporary.mkdir(parents=True)
    ranks.barrier()
    try:
        states.save_sharded(temporary, state, metadata, main=ranks.is_global_zero)
        ranks.barrier()
        if ranks.is_global_zero:
            swap_in(temporary, path)
    except Exception as failure:
        raise CheckpointWriteError(f"The checkpoint {path} could not be written: {failure}") from failure
    finally:
        if ranks.is_global_zero:
            remove(temporary)
    ranks.barrier()


def read_file(path: Any, weights_only: Optional[bool]) -> dict[str, Any]:
    """A checkpoint file; tensors of local files stay on disk until they are used."""
    if is_local(path):
        if not Path(path).is_file():
            raise FileNotFoundError(f"Checkpoint file not found: {path}. Give the path of a file, or of a sharded folder.")
        try:
            return torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
    return load_anywhere(path, map_location="cpu", weights_only=weights_only)
