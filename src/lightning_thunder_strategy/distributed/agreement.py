"""Ranks agree on what they run: a program with other collectives on one rank would hang all, or mix up values."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Optional

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from lightning_thunder_strategy.compiler import _torch_compat
from lightning_thunder_strategy.compiler._torch_dtensor import dtensor_call
from lightning_thunder_strategy.compiler.collectives import fingerprint
from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.events import first_line
from lightning_thunder_strategy.compiler.report import Program, Record, warn

_EAGER = "cannot compile it"
_SMALLER = "cannot read it as one program"
_REFUSED = "raises an error"
_UNITS = ("parts", "forward", "submodules", "eager")  # of a step, from large to small


class RanksDisagreeError(RuntimeError):
    """Some ranks did not come to a decision that all must take."""


class AgreedFallback(Exception):
    """Another rank could not compile the step as a whole, so this one must not either.

    Attributes:
        unit: What all ranks compile instead.
    """

    def __init__(self, unit: str) -> None:
        super().__init__(unit)
        self.unit = unit


class Agreement:
    """Compares decisions of all ranks through a store, without collectives.

    Ranks compare a program when it is compiled. One whose collectives all ranks have agreed on before is taken without
    asking, so a rank may compile alone for a batch shape that only it has seen. As soon as a step has programs with
    different collectives, ranks also compare which one they are about to run. If they disagree, all run the programs
    of the step eagerly, as read from Python, and compare each use of a parameter.

    Args:
        timeout: How long to wait for the other ranks.
    """

    def __init__(self, timeout: Optional[timedelta]) -> None:
        self._meeting = _Meeting(timeout or timedelta(minutes=30))
        self._known: dict[str, set[str]] = {}
        self._eager: set[str] = set()

    def begin(self, name: str) -> None:
        """A call of the step ``name`` begins. Every rank counts its calls alike."""
        self._meeting.begin(name)

    def __call__(
        self, record: Record, program: Program, graph: fx.GraphModule, failure: Optional[BaseException]
    ) -> bool:
        """Whether a newly compiled program may be run; ``False``: it must run as it was read.

        Args:
            record: Of the step.
            program: The program.
            graph: As it was read from Python.
            failure: Why it could not be compiled on this rank.

        Raises:
            AgreedFallback: If a rank could not read the step as one program.
            RanksDisagreeError: If a rank does not answer within the timeout.
        """
        if not _communicates(graph):
            return failure is None
        name = record.group or record.name
        if name in self._eager:
            return False
        known = self._known.setdefault(name, set())
        vote = _EAGER if failure is not None else fingerprint(program.sequence)
        if vote in known:
            return True
        if self._ask(name, vote, failure) and failure is None:
            known.add(vote)
            return True
        return False

    def refused(self, record: Record, graph: fx.GraphModule) -> None:
        """This rank is about to raise an error instead of running ``graph``: tell the others, without waiting."""
        if _communicates(graph):
            self._meeting.come(record.group or record.name, _REFUSED)

    def guarded(
        self,
        record: Record,
        program: Program,
        graph: fx.GraphModule,
        parameters: Mapping[fx.Node, str],
        compiled: Optional[Callable],
    ) -> Callable:
        """What runs instead of a program: it makes sure that all ranks run the same.

        Args:
            record: Of the step.
            program: The program.
            graph: As it was read from Python.
            parameters: Names of the graph's inputs.
            compiled: The compiled program, or ``None`` if it must run as it was read.
        """
        if not _communicates(graph):
            return graph.forward if compiled is None else compiled
        name, vote = record.group or record.name, fingerprint(program.sequence)
        compare = lambda parameter: self._compare_use(name, parameter)  # noqa: E731
        eager = _with_comparisons(graph, parameters, compare)

        def run(*args: Any) -> Any:
            if compiled is None or name in self._eager:
                return eager(*args)
            if len(self._known[name]) > 1 and not self._ask(name, vote, None):
                return eager(*args)
            return compiled(*args)

        return run

    def fall_back(self, name: str, unit: str) -> str:
        """This rank cannot compile the step ``name`` as a whole: the others must follow.

        Returns:
            The unit that all ranks compile instead: the smallest that one asks for.
        """
        votes = self._meeting.compare(name, f"{_SMALLER}: {unit}") or []
        return _smallest_unit(votes) or unit

    def _ask(self, name: str, vote: str, failure: Optional[BaseException]) -> bool:
        """Whether all ranks give the same vote on the step."""
        votes = self._meeting.compare(name, vote)
        if votes is None:
            return True
        if _REFUSED in votes:
            raise RanksDisagreeError(
                f"{name}: ranks {[rank for rank, other in enumerate(votes) if other == _REFUSED]} raise an error while "
                "compiling it, see there."
            )
        unit = _smallest_unit(votes)
        if unit is not None:
            raise AgreedFallback(unit)
        self._eager.add(name)
        failed = [rank for rank, other in enumerate(votes) if other == _EAGER]
        why = (
            f"ranks {failed} could not compile it{f' ({first_line(failure)})' if failure is not None else ''}" if failed
            else f"the program of ranks {_minority(votes)} has other collectives than that of the others"
        )  # fmt: skip
        warn(
            f"{name}: all ranks run it eagerly from now on and compare each use of a parameter, which is slow, because "
            f"{why}. Give every rank the same model, options and control flow.",
            every_rank=failure is not None,
        )
        return False

    def _compare_use(self, name: str, parameter: str) -> None:
        used = self._meeting.compare(name, f"parameter {parameter}")
        if used is not None:
            odd = _minority(used)
            raise RanksDisagreeError(
                f"{name}: ranks do not use the same parameters in the same order: ranks {odd} use "
                f"{used[odd[0]]!r} where rank {next(r for r in range(len(used)) if r not in odd)} uses "
                f"{next(u for r, u in enumerate(used) if r not in odd)!r}. Every rank must take the same path through "
                "the step: multiply what a rank does not need by zero instead of leaving it out."
            )


class _Meeting:
    """Compares a value of each rank at each of a sequence of points that all ranks pass in the same order."""

    def __init__(self, timeout: timedelta) -> None:
        self._store = _torch_compat.default_store()
        self._rank, self._size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._timeout = timeout
        # The process group may be used for several fits, some of which failed on some ranks: keep their keys apart.
        prefix = [f"lts/{uuid.uuid4().hex}"]
        torch.distributed.broadcast_object_list(prefix, src=0)
        self._prefix = prefix[0]
        self._calls: dict[str, int] = {}
        self._points: dict[str, int] = {}
        self._old: list[str] = []

    def begin(self, name: str) -> None:
        self._calls[name] = self._calls.get(name, 0) + 1
        self._points[name] = 0

    def compare(self, name: str, value: str) -> Optional[list[str]]:
        """``None`` if all ranks give the same value, else the value of each.

        Raises:
            RanksDisagreeError: If a rank does not come within the timeout.
        """
        key = self.come(name, value)
        keys = [f"{key}/{rank}" for rank in range(self._size)]
        self._wait(name, value, f"{key}/done", keys)
        same = self._store.get(f"{key}/done") == b"same"
        values = None if same else [self._store.get(item).decode() for item in keys]
        shared = [f"{key}={value}", f"{key}/here", f"{key}/done"]
        self._forget([f"{key}/{self._rank}", *(shared if self._rank == 0 else [])])
        return values

    def come(self, name: str, value: str) -> str:
        """Give this rank's value for the next point, without waiting for the others'. Returns the point's key."""
        self._points[name] = self._points.get(name, 0) + 1
        key = f"{self._prefix}/{name}/{self._calls.get(name, 0)}/{self._points[name]}"
        self._store.set(f"{key}/{self._rank}", value)
        self._store.add(f"{key}={value}", 1)
        if self._store.add(f"{key}/here", 1) == self._size:  # the last one to come
            same = self._store.add(f"{key}={value}", 0) == self._size
            self._store.set(f"{key}/done", "same" if same else "different")
        return key

    def _wait(self, name: str, value: str, done: str, keys: Sequence[str]) -> None:
        try:
            self._store.wait([done], self._timeout)
        except Exception as error:
            silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            what = value if " " in value else f"has a new program ({value})"
            raise RanksDisagreeError(
                f"{name}, call {self._calls.get(name, 0)}: rank {self._rank} {what}, and ranks {silent} have not come "
                f"to this point within {self._timeout.total_seconds():.0f} s. They run another program, or have ended. "
                "Every rank must take the same path through the step."
            ) from error

    def _forget(self, keys: list[str]) -> None:
        """Delete the keys of the point before: all ranks have passed it, as all have come to this one."""
        for key in self._old:
            self._store.delete_key(key)
        self._old = keys


def _smallest_unit(votes: Sequence[str]) -> Optional[str]:
    wanted = [vote.removeprefix(f"{_SMALLER}: ") for vote in votes if vote.startswith(_SMALLER)]
    return max(wanted, key=_UNITS.index, default=None)


def _minority(values: Sequence[str]) -> list[int]:
    common = max(set(values), key=values.count)
    return [rank for rank, value in enumerate(values) if value != common]


def _is_use(node: fx.Node) -> bool:
    used = node.all_input_nodes
    uses = (
        dtensor_call(node) in ("redistribute", "from_local")
        or getattr(node.target, "__name__", "") == "gather_unreduced"
    )
    return uses and bool(used) and used[0].op == "placeholder"


def _communicates(graph: fx.GraphModule) -> bool:
    """Whether a program that was read from Python may issue collectives."""
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.op == "placeholder" and isinstance(node_value(node), DTensor):
                return True
            if _is_use(node) or "c10d_functional" in str(node.target):
                return True
    return False


def _with_comparisons(
    graph: fx.GraphModule, parameters: Mapping[fx.Node, str], compare: Callable[[str], None]
) -> Callable:
    """The program with a comparison among ranks before each use of a parameter."""
    for node in list(graph.graph.nodes):
        if _is_use(node):
            used = node.all_input_nodes[0]
            with graph.graph.inserting_before(node):
                graph.graph.call_function(compare, (parameters.get(used, used.name),))
    graph.recompile()
    return graph.forward
