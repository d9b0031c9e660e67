"""Reads folders of shards without running code that a stranger may have put there.

``torch.distributed.checkpoint`` unpickles a folder's index, and every value that is not a tensor, without limits. Here
both may only hold what a checkpoint needs, as with ``torch.load(weights_only=True)``.
"""

import enum
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata


class UntrustedCheckpointError(pickle.UnpicklingError):
    """A checkpoint holds something that could run as code when it is loaded."""

    def __init__(self, path: Any, found: str) -> None:
        super().__init__(
            f"The checkpoint {path} holds more than tensors and plain values: {found}. Loading that can run code: if "
            "you trust where it came from, load with weights_only=False."
        )
        self._arguments = (path, found)

    def __reduce__(self) -> Any:
        return (type(self), self._arguments)  # ranks tell each other


class TrustingNobody(dcp.FileSystemReader):
    """Reads the index of a folder of shards, which may only name the classes that an index is made of."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        with path.open("rb") as file:
            _IndexUnpickler(file, path).load()  # raises before anything of it has run
        return super().read_metadata(*args, **kwargs)


class PlainValues(dcp.DefaultLoadPlanner):
    """Reads values that are not tensors only if they are plain."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            found = f"{read_item.dest_index.fqn!r} ({_first_sentence(error)})"
            raise UntrustedCheckpointError(self._folder, found) from error
        value.seek(0)
        super().load_bytes(read_item, value)


@contextmanager
def clear_errors() -> Iterator[None]:
    """Raise our error instead of the one into which ``torch.distributed.checkpoint`` puts those of all ranks."""
    try:
        yield
    except CheckpointException as error:
        ours = [failure for failure, _ in error.failures.values() if isinstance(failure, UntrustedCheckpointError)]
        if not ours:
            raise
        raise ours[0] from None


def _first_sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line]
    return (lines or [type(error).__name__])[0].split(" was not ")[0]


class _IndexUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if not _belongs_to_an_index(module, name):
            raise UntrustedCheckpointError(self._path, f"{module}.{name}")
        return super().find_class(module, name)


def _belongs_to_an_index(module: str, name: str) -> bool:
    """Whether a class, dtype or layout is part of what ``torch.distributed.checkpoint`` writes."""
    if module in (metadata.__name__, filesystem.__name__):
        found = vars(metadata if module == metadata.__name__ else filesystem).get(name)
        kind = isinstance(found, type) and (is_dataclass(found) or issubclass(found, enum.Enum))
        return kind and found.__module__ == module
    if module == "torch":
        found = vars(torch).get(name)
        return found is torch.Size or isinstance(found, (torch.dtype, torch.layout, torch.memory_format))
    known = {"collections": ("OrderedDict",), "torch.serialization": ("_get_layout",)}
    paths = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    return name in {**known, "pathlib": paths, "pathlib._local": paths}.get(module, ())
