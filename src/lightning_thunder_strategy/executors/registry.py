"""Executor names: which exist, which can run here, and which set a configuration means."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Optional, Union

import torch

from lightning_thunder_strategy.executors.base import Executor
from lightning_thunder_strategy.executors.chunked_loss import ChunkedLossExecutor
from lightning_thunder_strategy.executors.eager import EagerExecutor
from lightning_thunder_strategy.executors.inductor import InductorExecutor
from lightning_thunder_strategy.executors.liger import LigerExecutor
from lightning_thunder_strategy.executors.nvfuser import NvfuserExecutor
from lightning_thunder_strategy.executors.sdpa import SdpaExecutor
from lightning_thunder_strategy.executors.triton import TritonExecutor

_OURS: dict[str, Callable[[], Executor]] = {
    "sdpa": SdpaExecutor,
    "triton": TritonExecutor,
    "liger": LigerExecutor,
    "chunked_loss": ChunkedLossExecutor,
    "nvfuser": NvfuserExecutor,
    "inductor": InductorExecutor,
}
_REGISTERED: dict[str, Callable[[], Executor]] = {}


@dataclass(frozen=True)
class ExecutorInfo:
    """One line of ``lts.executors.list()``.

    Attributes:
        name: The name to use in ``executors=[...]``.
        available: Whether it can run on this machine.
        reason: If not, why.
        claims: What it takes.
        version: Version of what it runs with, or ``None`` if that is not installed.
        install: What to do so that it can run, or an empty string.
    """

    name: str
    available: bool
    reason: str
    claims: str
    version: Optional[str] = None
    install: str = ""


def _factories() -> dict[str, Callable[[], Executor]]:
    return {**_OURS, **_REGISTERED, "eager": EagerExecutor}


def add(name: str, factory: Callable[[], Executor]) -> None:
    """Make a user's executor known by ``name``; one of that name that was added before is replaced.

    Raises:
        ValueError: If the name is one of ours.
    """
    if name in _OURS or name == "eager":
        raise ValueError(f"register({name!r}) is not allowed: this is the name of an executor of ours; choose another.")
    _REGISTERED[name] = factory


def list_executors() -> list[ExecutorInfo]:
    """Every known executor, available or not, and what it claims."""
    result = []
    for name, factory in _factories().items():
        executor = factory()
        reason = executor.unavailable()
        claims = (executor.__doc__ or "").strip().partition("\n")[0]
        install = executor.install_command() if reason is not None else ""
        result.append(ExecutorInfo(name, reason is None, reason or "", claims, executor.version(), install))
    return result


def auto() -> tuple[list[str], str]:
    """Which executors ``"auto"`` stands for on this machine, and why."""
    gpu = f" with {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    problem = InductorExecutor().unavailable()
    if problem is not None:
        return ["eager"], f"inductor cannot run here: {problem}"
    return [
        "inductor",
        "eager",
    ], f"inductor has the compiler it needs on this machine{gpu}; others run when they are named"


def resolve(executors: Union[str, Sequence[Union[str, Executor]]]) -> tuple[Executor, ...]:
    """Executors in priority order, ``eager`` last.

    Args:
        executors: ``"auto"`` (Inductor where it can run, else eager), or names and instances in priority order.

    Raises:
        ValueError: If one is unknown or cannot run here; the message lists every executor and its state.
    """
    if isinstance(executors, str):
        if executors != "auto":
            raise ValueError(
                f'executors={executors!r} is not allowed: give "auto" or a list of names, such as ["inductor"].'
            )
        executors, _ = auto()
    if not isinstance(executors, Sequence) or not all(isinstance(item, (str, Executor)) for item in executors):
        raise ValueError(
            f'executors={executors!r} is not allowed: give "auto" or a list of names and instances of Executor. '
            f"Known here:\n{_table()}"
        )
    result: list[Executor] = []
    for item in executors:
        executor = _checked(item if isinstance(item, Executor) else _by_name(item))
        if any(executor.name == other.name for other in result):
            raise ValueError(f"executors={list(executors)!r} is not allowed: {executor.name!r} appears twice.")
        result.append(executor)
    eager = [executor for executor in result if executor.name == "eager"]
    if eager and result[-1] is not eager[0]:
        raise ValueError(
            f"executors={list(executors)!r} is not allowed: 'eager' runs whatever is left, so it must be last."
        )
    return tuple(result) if eager else (*result, EagerExecutor())


def _by_name(name: str) -> Executor:
    if name not in _factories():
        raise ValueError(f"executors: {name!r} is not a known executor. Known here:\n{_table()}")
    return _factories()[name]()


def _checked(executor: Executor) -> Executor:
    ours = {**_OURS, "eager": EagerExecutor}.get(executor.name)
    if isinstance(ours, type) and not isinstance(executor, ours):
        name = type(executor).__qualname__
        raise ValueError(f"executors: {name} has the name {executor.name!r} of an executor of ours; choose another.")
    reason = executor.unavailable()
    if reason is not None:
        raise ValueError(f"executors: {executor.name!r} cannot run here: {reason} Known here:\n{_table()}")
    return executor


def _table() -> str:
    return "\n".join(f"  {info.name}: {_state(info)}" for info in list_executors())


def _state(info: ExecutorInfo) -> str:
    if info.available:
        return "available"
    return f"not available: {info.reason}{f' To install: {info.install}' if info.install else ''}"
