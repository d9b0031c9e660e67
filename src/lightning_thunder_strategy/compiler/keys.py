"""Keys that tell whether two passes or executors do the same, also in different processes."""

import enum
import hashlib
import inspect
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any, Optional

import torch


def object_key(instance: Any, base: type) -> Optional[str]:
    """A text that is equal for two instances only if they have equal options and equal code.

    Args:
        instance: An instance of a subclass of ``base``.
        base: Where the search for code ends.

    Returns:
        The key, or ``None`` if some option or code cannot be told apart by a key.
    """
    options = _options(instance)
    classes = [_class_key(cls) for cls in type(instance).__mro__ if issubclass(cls, base) and cls is not base]
    if options is None or any(key is None for key in classes):
        return None
    return f"{':'.join(map(str, classes))}:{options}"


def function_key(function: Any) -> Optional[str]:
    """A text that is equal for two functions only if they have equal code in equal files.

    ``None`` if a function cannot be told apart by a key: it closes over something, or has no file.
    """
    if not inspect.isfunction(function) or function.__module__ is None:
        return None
    try:
        file = Path(inspect.getfile(function))
        parts = [function.__module__, function.__qualname__, _file_hash(file, file.stat().st_mtime_ns)]
    except (OSError, TypeError):
        return None
    code = _member_key(function)
    return None if code is None else ":".join([*parts, code])


def plain(value: Any) -> Optional[str]:
    """A plain value as a text that is the same in every process, or ``None`` if it is not plain."""
    if isinstance(value, (tuple, list)):
        return _joined(map(plain, value), type(value).__name__)
    if isinstance(value, (set, frozenset)):
        items = [plain(item) for item in value]
        return None if None in items else _joined(sorted(map(str, items)), "set")
    if isinstance(value, dict):
        return _joined((plain(item) for pair in value.items() for item in pair), "dict")
    allowed = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)
    return repr(value) if value is None or isinstance(value, allowed) else None


def _joined(items: Iterable[Optional[str]], kind: str) -> Optional[str]:
    found = list(items)
    return None if None in found else f"{kind}({', '.join(map(str, found))})"


def _options(instance: Any) -> Optional[str]:
    if is_dataclass(instance):
        return plain({item.name: getattr(instance, item.name) for item in fields(instance)})
    return plain(dict(sorted(vars(instance).items())))


def _class_key(cls: type) -> Optional[str]:
    """Name, file and code of a class; the file stands for the functions beside the class that it may call."""
    try:
        file = Path(inspect.getfile(cls))
        parts = [cls.__module__, cls.__qualname__, _file_hash(file, file.stat().st_mtime_ns)]
    except (OSError, TypeError):
        return None
    for name, value in vars(cls).items():
        code = _member_key(value)
        if code is not None:
            parts.append(f"{name}={code}")
        elif not name.startswith("__"):
            return None
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _member_key(value: Any) -> Optional[str]:
    if isinstance(value, property):
        return _joined((_member_key(part) for part in (value.fget, value.fset, value.fdel) if part), "property")
    function = getattr(value, "__func__", value)
    if not inspect.isfunction(function):
        return plain(value)
    cells = [name for name in function.__code__.co_freevars if name != "__class__"]
    if cells:
        return None  # it may do anything, depending on what it closes over
    defaults = plain([function.__defaults__, function.__kwdefaults__])
    return None if defaults is None else f"{_code_hash(function.__code__)}{defaults}"


def _code_hash(code: CodeType) -> str:
    """The same for equal code, wherever it was compiled."""
    constants = [_code_hash(item) if isinstance(item, CodeType) else plain(item) or "" for item in code.co_consts]
    text = "\n".join([code.co_code.hex(), *constants, *code.co_names, *code.co_varnames])
    return hashlib.sha256(text.encode()).hexdigest()


@lru_cache(maxsize=256)
def _file_hash(path: Path, changed: int) -> str:
    del changed  # part of the cache's key
    return hashlib.sha256(path.read_bytes()).hexdigest()
