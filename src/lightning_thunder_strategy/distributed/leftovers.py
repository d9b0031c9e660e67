"""Hidden names for writes under way, and what killed processes left under such names.

A name says which process writes: a hash of the machine and its process namespace, the process and when it started. So
another process can tell a write under way from one whose process was killed.
"""

import hashlib
import os
import re
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Optional

_NAME = re.compile(r"\.(?P<name>.+)\.(?P<machine>[0-9a-f]{8})-(?P<process>\d+-\d+)-[0-9a-f]{8}\.(?P<kind>partial|old)")
_UNTOUCHED = 3600.0  # seconds after which a write of another machine counts as dead: longer than any collective waits
_LONGEST = 150  # bytes of a name that are kept: names have at most 255


def hidden_name(path: Path, kind: str = "partial") -> Path:
    """A new hidden name beside ``path``.

    Args:
        path: The file or folder that is written or removed.
        kind: ``"partial"``: of no use after a crash; ``"old"``: what was at ``path``.
    """
    name = os.fsdecode(os.fsencode(path.name)[:_LONGEST])
    return path.with_name(f".{name}.{_machine()}-{_process(os.getpid())}-{uuid.uuid4().hex[:8]}.{kind}")


def stale(folder: Path) -> list[Path]:
    """What writes of dead processes left in ``folder``.

    The process of another machine, or of another container, cannot be looked up: what it writes counts as dead when
    nothing of it has changed for an hour. An old checkpoint whose place is empty is not among them, it may be the only
    one.
    """
    found = []
    with suppress(OSError):
        for item in folder.iterdir():
            match = _NAME.fullmatch(item.name)
            if match is None or (match["kind"] == "old" and not (folder / match["name"]).exists()):
                continue
            if _dead(match["process"]) if match["machine"] == _machine() else _untouched(item):
                found.append(item)
    return found


def this_process() -> str:
    """A name of this process that no other one has, on any machine."""
    return f"{_machine()}-{_process(os.getpid())}"


def has_ended(name: Optional[str]) -> bool:
    """Whether the process that :func:`this_process` has named so has ended; ``False`` if it is on another machine."""
    machine, _, process = (name or "").partition("-")
    return machine == _machine() and _dead(process)


def _machine() -> str:
    """The host and, where there is one, the namespace in which process numbers mean something."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{socket.gethostname()} {space}".encode()).hexdigest()[:8]


def _process(number: int) -> Optional[str]:
    """The number of a process and when it started (clock ticks since boot, 0 where unknown); ``None``: none runs."""
    try:
        stat = Path(f"/proc/{number}/stat").read_text()
        state, *fields = stat.rpartition(")")[2].split()
        return None if state in "ZX" else f"{number}-{fields[18]}"  # field 22 of proc(5); a zombie writes no more
    except (OSError, IndexError):
        if Path("/proc/self/stat").exists():
            return None
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass  # it runs, as somebody else
    return f"{number}-0"


def _dead(process: str) -> bool:
    return _process(int(process.partition("-")[0])) != process


def _untouched(item: Path) -> bool:
    with suppress(OSError):
        newest = max(each.lstat().st_mtime for each in [item, *(item.rglob("*") if item.is_dir() else ())])
        return time.time() - newest > _UNTOUCHED
    return False
