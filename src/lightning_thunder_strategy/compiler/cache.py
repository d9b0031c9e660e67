"""Traces and figures of compiled programs, kept beside Torch's own compile cache.

When another process has compiled the same program, none of our passes run; what they would have recorded is read from
here. The files are plain JSON in a folder that only the user can enter.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lightning_thunder_strategy.compiler import _torch_inductor
from lightning_thunder_strategy.compiler._torch_dtensor import shard_key
from lightning_thunder_strategy.compiler.report import Program, warn
from lightning_thunder_strategy.compiler.trace import Trace


@lru_cache(maxsize=1)
def sources_hash() -> str:
    """Changes whenever a file of this package changes."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def pipeline_key(parts: Sequence[Optional[str]]) -> Optional[str]:
    """One key of everything that changes programs, or ``None`` if some part cannot be told apart by a key."""
    if any(part is None for part in parts):
        return None
    return hashlib.sha256("\n".join([sources_hash(), *[str(part) for part in parts]]).encode()).hexdigest()


def program_key(trace: Trace, inputs: Sequence[Any], pipeline: str) -> str:
    """The key of one acquired program under one pipeline, on this rank.

    Torch's own key holds the global shapes of sharded inputs. What is compiled depends on more: the sizes of this
    rank's shards, its place in the mesh, and the names by which collectives find their groups.
    """
    described = [f"{item}" for item in trace.inputs]
    described += [shard_key(value) for value in inputs if isinstance(value, DTensor)]
    if dist.is_available() and dist.is_initialized():
        described.append(f"rank {dist.get_rank()} of {dist.get_world_size()} in {dist.group.WORLD.group_name}")
    modes = (
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled()),
        *(torch.get_default_dtype(), len(inputs)),
    )
    text = "\n".join([pipeline, trace.python().split("\n", 1)[1], *described, str(modes)])
    return hashlib.sha256(text.encode()).hexdigest()


def load(key: str) -> Optional[dict[str, Any]]:
    """What was stored under ``key``, or ``None``. A file that cannot be read is ignored with a notice."""
    path = _folder() / f"{key}.json"
    try:
        _refuse_strangers(path)
        data = json.loads(path.read_text())
        Program().restore(data)
        return data
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        warn(f"The compile cache entry {path} cannot be read and is ignored: {error}")
        return None


def store(key: str, program: Program) -> None:
    """Write a program's record under ``key``, complete or not at all."""
    temporary = None
    try:
        folder = _folder()
        text = json.dumps(program.to_dict())
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, folder / f"{key}.json")
    except (OSError, TypeError, ValueError) as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        warn(f"The traces of a compiled program could not be stored beside the compile cache: {error}")


def check_folder() -> None:
    """Make sure that only this user can put programs into Torch's compile cache, from where they are loaded and run.

    Raises:
        PermissionError: If others can, with what to do.
    """
    folder = Path(_torch_inductor.compile_cache_dir())
    default = folder == Path(_torch_inductor.default_compile_cache_dir())
    if default and os.name == "posix" and folder.stat().st_uid == os.getuid():
        folder.chmod(folder.stat().st_mode & ~_WRITABLE_BY_OTHERS)  # torch makes it as the umask says
    _refuse_strangers(folder)


_WRITABLE_BY_OTHERS = 0o022  # group and others


def _refuse_strangers(path: Path) -> None:
    """Raise ``PermissionError`` if ``path`` belongs to another user, or others can write to it."""
    if os.name != "posix":
        return
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0):
        why, cure = "belongs to another user", ""
    elif status.st_mode & _WRITABLE_BY_OTHERS:
        why, cure = "can be written by other users", f"make it yours alone (chmod go-w {path}), or "
    else:
        return
    raise PermissionError(
        f"The compile cache {path} {why}, and programs in it would run as yours: {cure}set TORCHINDUCTOR_CACHE_DIR to "
        "a folder of your own."
    )


def _folder() -> Path:
    folder = Path(_torch_inductor.compile_cache_dir()) / "lightning_thunder_strategy"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_strangers(folder)
    return folder
