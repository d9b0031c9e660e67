"""Checkpoints that are written in a thread while training goes on.

What is written is a copy made at the call. The ranks talk through a group of their own, so that the collectives of
training and of writing cannot mix. One write is under way at a time: the next save waits for it.
"""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Optional

import torch
from torch.distributed import ProcessGroup

from lightning_thunder_strategy.compiler.report import warn
from lightning_thunder_strategy.distributed.files import vanish
from lightning_thunder_strategy.distributed.snapshot import SnapshotError, snapshot
from lightning_thunder_strategy.strategies.storage import CheckpointWriteError, Ranks

Write = Callable[[Ranks, Any], None]

_groups: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by process group of all ranks


@dataclass
class RanksInBackground:
    """All ranks, over a group that only writing uses; without one, this process is alone."""

    group: Optional[ProcessGroup]

    @property
    def is_global_zero(self) -> bool:
        return self.group is None or torch.distributed.get_rank() == 0

    def barrier(self, name: Optional[str] = None) -> None:
        if self.group is not None:
            torch.distributed.barrier(self.group)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        objects = [obj]
        if self.group is not None:
            torch.distributed.broadcast_object_list(objects, src, group=self.group)
        return objects[0]

    def gather(self, obj: Any) -> list[Any]:
        if self.group is None:
            return [obj]
        objects = [None] * torch.distributed.get_world_size(self.group)
        torch.distributed.all_gather_object(objects, obj, group=self.group)
        return objects


@dataclass
class _Job:
    """A write under way."""

    path: Path
    run: Optional[Callable[[], None]]  # until it has run: it holds the copy
    error: Optional[BaseException] = None
    done: bool = False
    outdated: list[Path] = field(default_factory=list)  # what goes when the new checkpoint is complete
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> "_Job":
        self.thread = threading.Thread(target=self._run, name="lts-save")
        self.thread.start()
        return self

    def _run(self) -> None:
        try:
            run, self.run = self.run, None
            assert run is not None
            run()
            del run
            with self.lock:
                self.done = True
                for path in self.outdated:
                    _remove(path)
        except BaseException as error:
            self.error = error

    def remove(self, path: Path) -> None:
        """Remove an older checkpoint now, or when the new one is complete; if it never is, the older one stays."""
        with self.lock:
            if self.done:
                _remove(path)
            else:
                self.outdated.append(path)


def _remove(path: Path) -> None:
    try:
        vanish(path)
    except OSError as error:
        warn(f"The checkpoint {path} could not be removed: {type(error).__name__}: {error}")


class BackgroundSaves:
    """Writes checkpoints for a strategy: between :meth:`open` and :meth:`close` in a thread, else at once."""

    def __init__(self) -> None:
        self._ranks: Optional[RanksInBackground] = None
        self._job: Optional[_Job] = None

    def open(self, timeout: Optional[timedelta], alone: bool) -> None:
        """From now on write in the background. Every rank calls it.

        Args:
            timeout: How long ranks wait for each other.
            alone: Whether this process saves by itself, also where there are others.
        """
        self._ranks = RanksInBackground(None if alone else _own_group(timeout))

    def write(self, ranks: Ranks, path: Path, content: Any, write: Write) -> None:
        """Write a checkpoint. Every rank calls it.

        Args:
            ranks: All ranks, as the strategy talks to them.
            path: The checkpoint.
            content: What is written; ``None`` on ranks that have nothing to write.
            write: Called with ranks, and ``content`` or a copy of it.

        Raises:
            CheckpointWriteError: If this write, or the one before, failed.
        """
        self.wait()
        if self._ranks is None:
            write(ranks, content)
            return
        own, copied, error = self._ranks, None, None
        try:
            copied = snapshot(content)
        except SnapshotError as failure:
            error = str(failure)
        error = next((found for found in own.gather(error) if found is not None), None)
        if error is not None:
            raise CheckpointWriteError(f"The checkpoint {path} could not be written in the background: {error}")
        self._job = _Job(path, lambda: write(own, copied)).start()

    def wait(self) -> None:
        """Wait until what is under way is written. No collectives.

        Raises:
            CheckpointWriteError: If it failed; all ranks know that.
        """
        while (job := self._job) is not None:
            job.thread.join()  # a signal may save meanwhile, and find the job
            if self._job is job:
                self._job = None
                _raise_error(job)

    def remove(self, path: Path) -> None:
        """Remove an older checkpoint, not before the one that is under way is complete."""
        if self._job is None:
            vanish(path)
        else:
            self._job.remove(path)

    def is_under_way(self, path: Any) -> bool:
        """Whether a checkpoint with this name has been asked for and may not be there yet: the same on all ranks."""
        return self._job is not None and Path(path).absolute() == self._job.path.absolute()

    def close(self, failed: bool) -> None:
        """Wait, and write at once from now on.

        Args:
            failed: After another error; then one of the write is a warning.
        """
        self._ranks = None
        try:
            self.wait()
        except CheckpointWriteError as error:
            if not failed:
                raise
            warn(f"A checkpoint that was saved in the background is not complete. {error}")


def _raise_error(job: _Job) -> None:
    if isinstance(job.error, CheckpointWriteError):
        raise job.error
    if job.error is not None:
        raise CheckpointWriteError(
            f"The checkpoint {job.path} could not be written: {type(job.error).__name__}: {job.error}"
        ) from job.error


def _own_group(timeout: Optional[timedelta]) -> Optional[ProcessGroup]:
    if not torch.distributed.is_initialized():
        return None
    everyone = torch.distributed.group.WORLD
    if everyone not in _groups:
        _groups[everyone] = torch.distributed.new_group(backend="gloo", timeout=timeout)
    return _groups[everyone]
