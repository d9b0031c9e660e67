"""Writes and reads checkpoints for all ranks: a file from rank zero, or a folder with a shard from each."""

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Optional, Protocol

import torch
from lightning.fabric.utilities.cloud_io import _load as load_anywhere
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from lightning_thunder_strategy.distributed import checkpoint as states
from lightning_thunder_strategy.distributed.files import beside, flush, remove, replacing, swap_in, vanish
from lightning_thunder_strategy.distributed.liveness import Heartbeats


class Ranks(Protocol):
    """What writing needs of a strategy."""

    @property
    def is_global_zero(self) -> bool: ...

    def barrier(self, name: Optional[str] = None) -> None: ...

    def broadcast(self, obj: Any, src: int = 0) -> Any: ...


class CheckpointWriteError(RuntimeError):
    """A checkpoint could not be written; the one that was there before is whole."""


class CheckpointReadError(RuntimeError):
    """A checkpoint is damaged: cut short, or a part of it is missing."""


def is_local(path: Any) -> bool:
    """Whether a path names a file of this machine rather than remote storage."""
    return "://" not in str(path)


def write_file(ranks: Ranks, path: Path, write: Callable[[Path], None]) -> None:
    """Let rank zero write one file beside ``path`` and move it there. Every rank calls it.

    Raises:
        CheckpointWriteError: On every rank, if rank zero could not write; on the others, if a rank was lost.
    """
    with _beside(ranks, path) as temporary:

        def write_beside() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path, temporary):
                write(temporary)

        error = _on_rank_zero(ranks, write_beside)
    if error is not None:
        raise CheckpointWriteError(f"The checkpoint {path} could not be written: {error}")


@contextmanager
def _beside(ranks: Ranks, path: Path) -> Iterator[Path]:
    """A hidden name that all ranks know. If one is lost inside, the others say which, and what was written goes."""
    temporary = Path(ranks.broadcast(str(beside(path)) if ranks.is_global_zero else None))
    with Heartbeats(temporary.name) as beats:
        try:
            yield temporary
        except Exception as failure:
            lost = beats.lost()
            if not lost:
                raise
            if 0 in lost:  # which would have done it; its name goes first, in case that it lives and completes
                with suppress(OSError):
                    vanish(temporary)
            raise CheckpointWriteError(
                f"Rank {', '.join(map(str, lost))} ended or stopped while the checkpoint {path} was saved. "
                "What is at this path is whole: the new checkpoint or the one before. See the output of that rank, and "
                "start again from the last checkpoint."
            ) from failure


def _on_rank_zero(ranks: Ranks, function: Callable[[], None]) -> Optional[str]:
    """Call ``function`` on rank zero. Its error, on every rank."""
    return ranks.broadcast(_failure(function) if ranks.is_global_zero else None)


def _failure(function: Callable[[], None]) -> Optional[str]:
    """The error that ``function`` raises, in one line."""
    try:
        function()
    except CheckpointException as failure:
        first = next(iter(failure.failures.values()))[0]
        return f"{type(first).__name__}: {first}"
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return None


def write_folder(
    ranks: Ranks,
    path: Path,
    state: Mapping[str, Any],
    metadata: Mapping[str, Any],
    group: Optional[ProcessGroup] = None,
) -> None:
    """Let every rank write its shards into a folder beside ``path`` and move it there. Every rank calls it.

    Args:
        ranks: All ranks.
        path: The folder.
        state: What is stored in shards.
        metadata: The rest.
        group: All ranks too, for the communication of writing; by default the one that everything uses.

    Raises:
        CheckpointWriteError: On every rank, if one could not write; on the others, if a rank was lost.
    """
    with _beside(ranks, path) as temporary:
        try:
            error = _on_rank_zero(ranks, lambda: temporary.mkdir(parents=True))
            if error is None:
                error = _failure(lambda: states.save_sharded(temporary, state, metadata, ranks.is_global_zero, group))
                error = ranks.broadcast(error)  # a failure to write shards is known on all ranks, one of the rest on 0
            if error is None:
                error = _on_rank_zero(ranks, lambda: _finish(temporary, path))
        finally:
            if ranks.is_global_zero:
                remove(temporary)
    if error is not None:
        raise CheckpointWriteError(f"The checkpoint {path} could not be written: {error}")


def _finish(temporary: Path, path: Path) -> None:
    flush(temporary)
    swap_in(temporary, path)


def read_file(path: Any, weights_only: Optional[bool]) -> dict[str, Any]:
    """A checkpoint file; tensors of local files stay on disk until they are used.

    Raises:
        CheckpointReadError: If it is damaged.
    """
    trusted = weights_only is False  # Lightning's default trusts what comes from the network
    if not is_local(path):
        return load_anywhere(path, map_location="cpu", weights_only=not trusted)
    if not Path(path).is_file():
        raise FileNotFoundError(f"Checkpoint file not found: {path}. Give the path of a file, or of a sharded folder.")
    with _whole(path):
        try:
            return torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
        return load_anywhere(path, map_location="cpu", weights_only=not trusted)


def read_folder(
    path: Path, likes: Mapping[str, Mapping[str, Any]], optimizers: Iterable[str], weights_only: Optional[bool]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What :func:`~lightning_thunder_strategy.distributed.checkpoint.load_sharded` reads.

    Raises:
        CheckpointReadError: If it is damaged.
    """
    with _whole(path):
        return states.load_sharded(path, likes, optimizers, weights_only)


@contextmanager
def _whole(path: Any) -> Iterator[None]:
    """Name the checkpoint if reading it fails because it is damaged."""
    try:
        yield
    except (Exception, CheckpointException) as failure:  # which is a BaseException
        error: BaseException = failure
        if isinstance(failure, CheckpointException):
            error = next(iter(failure.failures.values()))[0]
        short = any(sign in str(error) for sign in ("truncated", "PytorchStreamReader", "zip archive", "end of file"))
        barred = isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE)
        if not short and (barred or not isinstance(error, (EOFError, OSError))):
            raise
        raise CheckpointReadError(
            f"The checkpoint {path} is damaged, as if it was cut short or a part was removed: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'it ends too early'}. Resume from another one."
        ) from failure
