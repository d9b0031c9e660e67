"""Whether a package or a GPU that an executor needs is there, and if not, exactly why."""

import importlib
import importlib.metadata
from typing import Optional

import torch


def import_problem(module: str) -> Optional[str]:
    """Why ``module`` cannot be imported, in a sentence, or ``None`` if it can."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module.partition(".")[0]:
            return f"The package {module.partition('.')[0]!r} is not installed."
        return f"Importing {module!r} fails: {_first_line(error)}."
    except Exception as error:  # a package that was built for another torch raises all kinds of errors
        return f"Importing {module!r} fails: {_first_line(error)}."
    return None


def version_of(distribution: str) -> Optional[str]:
    """The installed version of a distribution, or ``None``."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_problem(capability: tuple[int, int]) -> Optional[str]:
    """Why there is no CUDA GPU of at least this compute capability, in a sentence, or ``None`` if there is one."""
    if torch.version.cuda is None:
        return f"This torch ({torch.__version__}) is built without CUDA."
    if not torch.cuda.is_available():
        return "No CUDA GPU is found."
    found = torch.cuda.get_device_capability()
    if found < capability:
        needed, has = ".".join(map(str, capability)), ".".join(map(str, found))
        return f"The GPU {torch.cuda.get_device_name()} is too old: compute capability {has}, and {needed} is needed."
    return None


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0].rstrip('.')}" if text else type(error).__name__
