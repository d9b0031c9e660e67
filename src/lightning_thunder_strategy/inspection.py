"""Finds what was compiled for a Trainer, a Fabric module, a strategy or a compiled function."""

from typing import Any

from torch import nn

from lightning_thunder_strategy.compiler.compile import CompiledFunction
from lightning_thunder_strategy.compiler.report import Record, Report
from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.strategies.engine import parameter_bytes


def explain(x: Any) -> Report:
    """What was compiled for ``x``, who executes what, and what fell back and why.

    Args:
        x: A Trainer, a Fabric object or module, a strategy, a LightningModule that was trained, or what
            ``lts.compile`` returned.

    Returns:
        A report: print it, or take its ``to_dict()``.

    Raises:
        TypeError: If nothing was compiled for ``x``.
    """
    records, module = _resolve(x)
    strategy = _strategy(x)
    return Report(records, parameter_bytes(module), strategy.optimizer_records() if strategy is not None else [])


def traces(x: Any) -> list[list[Trace]]:
    """Every stage of every compiled graph of ``x``, as readable, runnable Python.

    Args:
        x: As for :func:`explain`.

    Returns:
        One list for each compiled graph: acquired, after each transform, joint, forward, backward, final forward and
        final backward.
    """
    records, _ = _resolve(x)
    return [stages for record in records for stages in record.traces()]


def _resolve(x: Any) -> tuple[list[Record], nn.Module | None]:
    if isinstance(x, CompiledFunction):
        return [x.record], x.module
    view = getattr(x, "_forward_module", x)  # what a Fabric module wraps
    view = getattr(view, "_orig_mod", view)  # what torch.compile wraps
    records = getattr(type(view), "_lts_records", None)
    if records is not None:
        return records(), view
    strategy = _strategy(x)
    if strategy is not None:
        return strategy.records(), getattr(strategy, "lightning_module", None) or strategy.module()
    raise TypeError(
        f"Nothing was compiled for {type(x).__name__}: pass a Trainer or Fabric with one of our strategies, a module "
        "set up by it, or what lts.compile returned."
    )


def _strategy(x: Any) -> Any:
    """The strategy behind a Trainer, a Fabric object or module, or a LightningModule."""
    candidates = [x, getattr(x, "strategy", None), getattr(x, "_strategy", None)]
    for runner in (getattr(x, "_trainer", None), getattr(x, "_fabric", None)):
        candidates.append(getattr(runner, "strategy", None))
    return next((item for item in candidates if callable(getattr(item, "optimizer_records", None))), None)
