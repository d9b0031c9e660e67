"""Errors while a compiled program runs: which executor, which part of the program, and where that part was saved."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import torch
from torch import fx

from lightning_thunder_strategy.compiler.events import first_line
from lightning_thunder_strategy.compiler.trace import Trace


class ExecutorError(RuntimeError):
    """An executor failed while it ran its part of a program.

    Attributes:
        executor: Its name.
        region: What it ran, as the final trace calls it.
        trace: Where that part of the program was saved, as a script that runs eagerly; ``None`` if it could not be.
    """

    def __init__(self, executor: str, region: str, trace: Optional[Path], error: BaseException, problem: str) -> None:
        saved = f"That part of the program is in {trace}." if trace is not None else problem
        super().__init__(f"{executor} failed while it ran {region}: {first_line(error).rstrip('.')}. {saved}")
        self.executor, self.region, self.trace = executor, region, trace


def reported(function: Callable, executor: str, region: str, program: Callable[[], fx.GraphModule]) -> Callable:
    """``function``, whose errors become :class:`ExecutorError`. Running out of memory stays what it is.

    Args:
        function: Runs a part of a program.
        executor: Who runs it.
        region: What the final trace calls it.
        program: Gives that part, to be saved.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (torch.OutOfMemoryError, ExecutorError):
            raise
        except Exception as error:
            path, problem = _save(region, program)
            raise ExecutorError(executor, region, path, error, problem) from error

    call.__name__ = f"{executor}_{region}"  # and no other: FX would print torch's own name, and call that
    return call


def _save(region: str, program: Callable[[], fx.GraphModule]) -> tuple[Optional[Path], str]:
    try:
        with torch.no_grad():
            trace = Trace("final", program())
        return trace.save(Path(tempfile.mkdtemp(prefix="lts_failed_")) / f"{region}.py"), ""
    except Exception as error:
        return None, f"That part of the program could not be saved ({first_line(error)})."
