"""Executor names: which exist, which can run here, and which set a configuration means."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Union

from lightning_thunder_strategy.executors.base import Executor
from lightning_thunder_strategy.executors.eager import EagerExecutor
from lightning_thunder_strategy.executors.inductor import InductorExecutor

_FACTORIES: dict[str, Callable[[], Executor]] = {"inductor": InductorExecutor, "eager": EagerExecutor}


@dataclass(frozen=True)
class ExecutorInfo:
    """One line of ``lts.executors.list()``.

    Attributes:
        name: The name to use in ``executors=[...]``.
        available: Whether it can run on this machine.
        reason: If not, why.
        claims: What it takes.
    """

    name: str
    available: bool
    reason: str
    claims: str


def list_executors() -> list[ExecutorInfo]:
    """Every known executor, available or not, and what it claims."""
    result = []
    for name, factory in _FACTORIES.items():
        executor = factory()
        reason = executor.unavailable()
        claims = (type(executor).__doc__ or "").strip().splitlines()[0]
        result.append(ExecutorInfo(name, reason is None, reason or "", claims))
    return result


def resolve(executors: Union[str, Sequence[Union[str, Executor]]]) -> tuple[Executor, ...]:
    """Executors in priority order, ``eager`` last.

    Args:
        executors: ``"auto"`` (Inductor where it can run, else eager), or names and instances in priority order.

    Raises:
        ValueError: If a name is unknown or cannot run here; the message lists every executor and its state.
    """
    if isinstance(executors, str):
        if executors != "auto":
            raise ValueError(
                f'executors={executors!r} is not allowed: give "auto" or a list of names, such as ["inductor"].'
            )
        executors = ["inductor"] if InductorExecutor().unavailable() is None else []
    if not isinstance(executors, Sequence) or not all(isinstance(item, (str, Executor)) for item in executors):
        raise ValueError(
            f'executors={executors!r} is not allowed: give "auto" or a list of names and instances of Executor. '
            f"Known here:\n{_table()}"
        )
    result: list[Executor] = []
    for item in executors:
        executor = item if isinstance(item, Executor) else _by_name(item)
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
    if name not in _FACTORIES:
        raise ValueError(f"executors: {name!r} is not a known executor. Known here:\n{_table()}")
    executor = _FACTORIES[name]()
    reason = executor.unavailable()
    if reason is not None:
        raise ValueError(f"executors: {name!r} cannot run here: {reason} Known here:\n{_table()}")
    return executor


def _table() -> str:
    return "\n".join(
        f"  {info.name}: {'available' if info.available else 'not available: ' + info.reason}"
        for info in list_executors()
    )
