"""Writes that complete or leave what was there before."""

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_thunder_strategy.distributed.leftovers import hidden_name, stale

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def beside(path: Path) -> Path:
    """A new hidden name in the same folder, for writing before renaming. What killed processes left there goes."""
    for item in stale(path.parent):
        with suppress(OSError):  # another process removes it too, or may not
            remove(item)
    return hidden_name(path)


@contextmanager
def replacing(path: Path, temporary: Path) -> Iterator[Path]:
    """Write to ``temporary`` inside the block; afterwards it takes the place of ``path``, file or folder.

    If the block raises, ``temporary`` is removed and ``path`` is as it was.
    """
    try:
        yield temporary
        flush(temporary)
        swap_in(temporary, path)
    finally:
        remove(temporary)


def flush(path: Path) -> None:
    """Wait until a file, or each file of a folder, is on the disk: a name must not outlive what it names."""
    for item in [path, *(path.rglob("*") if path.is_dir() else ())]:
        handle = os.open(item, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def swap_in(new: Path, path: Path) -> None:
    """Move ``new`` to ``path``; what was at ``path`` is removed. At every moment one of the two is at ``path``."""
    if not os.path.lexists(path) or (path.is_file() and new.is_file()):
        os.replace(new, path)
        return
    if not _exchange(new, path):  # a file system without exchange: the old one is away for a moment
        old = hidden_name(path, "old")
        os.replace(path, old)
        os.replace(new, path)
        remove(old)
        return
    remove(new)


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def vanish(path: Path) -> None:
    """Remove a file or folder; at no moment a part of a folder is there under its name."""
    if path.is_dir() and not path.is_symlink():
        hidden = hidden_name(path)
        os.replace(path, hidden)
        path = hidden
    remove(path)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step, where the system can (Linux ``renameat2``)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(error, os.strerror(error), str(second))
