"""Optimization fuel: executors stop claiming after a number of claims, so that a wrong one can be found by halving."""

import json
import os
from pathlib import Path
from typing import Optional

LIMIT, LOG = "LTS_FUEL", "LTS_FUEL_LOG"  # environment variables that a bisection sets


class Fuel:
    """Counts claims: one for each operation that an executor other than ``eager`` takes.

    Args:
        limit: After how many claims executors get nothing more.
        log: Where each claim is written, as a line of JSON, if anywhere.
    """

    def __init__(self, limit: int, log: Optional[Path] = None) -> None:
        self.limit = limit
        self.used = 0
        self._log = log

    @property
    def empty(self) -> bool:
        return self.used >= self.limit

    def take(self, executor: str, operation: str, stage: str, source: Optional[str]) -> bool:
        """Whether an executor may take an operation."""
        if self.empty:
            return False
        self.used += 1
        if self._log is not None:
            claim = {"number": self.used, "executor": executor, "operation": operation, "stage": stage}
            with self._log.open("a") as file:
                file.write(json.dumps({**claim, "source": source, "process": os.getpid()}) + "\n")
        return True


_of_process: Optional[Fuel] = None


def fuel_of(limit: Optional[int]) -> Optional[Fuel]:
    """The fuel of one compiled function: its own with ``limit``, else what a bisection gave to the whole process."""
    global _of_process
    if limit is not None:
        return Fuel(limit)
    if LIMIT not in os.environ:
        return None
    if _of_process is None:
        log = os.environ.get(LOG)
        _of_process = Fuel(int(os.environ[LIMIT]), Path(log) if log else None)
    return _of_process
