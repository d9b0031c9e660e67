"""Ranks agree on what they run: a program with other collectives on one rank would hang all."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Optional

import torch

from lightning_thunder_strategy.compiler import _torch_compat
from lightning_thunder_strategy.compiler.collectives import fingerprint
from lightning_thunder_strategy.compiler.events import first_line
from lightning_thunder_strategy.compiler.report import Program, Record, warn

_EAGER = "eager"
_SMALLER = "smaller unit"


class RanksDisagreeError(RuntimeError):
    """Some ranks did not come to a decision that all must take."""


class AgreedFallback(Exception):
    """Another rank could not compile the step as a whole, so this one must not either."""


class Agreement:
    """Compares decisions of all ranks through the store of the default process group, without collectives.

    A program whose sequence of collectives all ranks have agreed on before is run without asking again, so a rank may
    compile for a batch shape that only it has seen.

    Args:
        timeout: How long to wait for the other ranks.
    """

    def __init__(self, timeout: Optional[timedelta]) -> None:
        # The process group may be made anew for a later fit: the number keeps the keys of each agreement apart.
        self._store = _torch_compat.default_store()
        self._rank, self._size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._timeout = timeout or timedelta(minutes=30)
        self._known: dict[str, set[str]] = {}
        self._eager: set[str] = set()
        self._calls: dict[str, int] = {}
        self._questions: dict[str, int] = {}
        self._prefix = f"lts/{_next_number()}"

    def begin(self, name: str) -> None:
        """A call of the step ``name`` begins. Every rank counts its calls alike."""
        self._calls[name] = self._calls.get(name, 0) + 1
        self._questions[name] = 0

    def __call__(self, record: Record, program: Program, failure: Optional[BaseException]) -> bool:
        """Whether a newly compiled program may be run; ``False``: every rank runs its graph eagerly.

        Raises:
            AgreedFallback: If a rank could not read the step as one program.
            RanksDisagreeError: If a rank does not answer within the timeout.
        """
        if record.name in self._eager:
            return False
        known = self._known.setdefault(record.name, set())
        vote = _EAGER if failure is not None else fingerprint(program.sequence)
        if vote in known:
            return True
        votes = self._ask(record.name, vote)
        if all(other == vote for other in votes) and failure is None:
            known.add(vote)
            return True
        if _SMALLER in votes:
            raise AgreedFallback
        self._eager.add(record.name)
        odd = [rank for rank, other in enumerate(votes) if other == _EAGER] or _minority(votes)
        why = first_line(failure) if failure is not None else "their programs would issue other collectives"
        warn(
            f"{record.name}: all ranks run it eagerly, because ranks {odd} could not run the program that the others "
            f"compiled ({why}). Give every rank the same model, options and control flow.",
            every_rank=failure is not None,
        )
        return False

    def fall_back(self, name: str) -> None:
        """This rank cannot compile the step ``name`` as a whole: the others must follow."""
        self._ask(name, _SMALLER)

    def _ask(self, name: str, vote: str) -> list[str]:
        self._questions[name] = self._questions.get(name, 0) + 1
        key = f"{self._prefix}/{name}/{self._calls.get(name, 0)}/{self._questions[name]}"
        self._store.set(f"{key}/{self._rank}", vote)
        keys = [f"{key}/{rank}" for rank in range(self._size)]
        try:
            self._store.wait(keys, self._timeout)
        except Exception as error:
            silent = [rank for rank in range(self._size) if not self._store.check([keys[rank]])]
            raise RanksDisagreeError(
                f"{name}, call {self._calls.get(name, 0)}: rank {self._rank} has compiled a new program ({vote}), and "
                f"ranks {silent} did not within {self._timeout.total_seconds():.0f} s. They run another program, or "
                "have ended. Every rank must take the same path through the step."
            ) from error
        return [self._store.get(item).decode() for item in keys]


def _minority(votes: Sequence[str]) -> list[int]:
    common = max(set(votes), key=votes.count)
    return [rank for rank, vote in enumerate(votes) if vote != common]


_made = 0


def _next_number() -> int:
    global _made
    _made += 1
    return _made
