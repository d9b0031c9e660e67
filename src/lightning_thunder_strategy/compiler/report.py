"""What was compiled, by whom, and what was not: the records behind ``lts.explain``."""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

import torch

from lightning_thunder_strategy.compiler.collectives import Collective
from lightning_thunder_strategy.compiler.saved_values import Saved
from lightning_thunder_strategy.compiler.trace import Decision, Trace
from lightning_thunder_strategy.executors.base import Claim


class CompileWarning(UserWarning):
    """Something runs in another way than was asked for."""


def warn(message: str, every_rank: bool = False) -> None:
    """Warn once for the job: on rank zero, or on ``every_rank`` where ranks differ."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if every_rank or not distributed or torch.distributed.get_rank() == 0:
        warnings.warn(message, CompileWarning, stacklevel=2)


@dataclass(frozen=True)
class GraphBreak:
    """Where and why a program had to be cut."""

    file: str
    line: int
    reason: str


@dataclass(frozen=True)
class Recompile:
    """Why a program did not fit the next call."""

    reason: str


@dataclass(frozen=True)
class Fallback:
    """A region that its executor could not compile."""

    region: str
    executor: str
    error: str


@dataclass
class Program:
    """One acquired graph and what became of it.

    Attributes:
        traces: Its stages in order.
        executors: Operations of its final forward and backward by executor.
        collectives: Collectives of the final forward and backward.
        sequence: One line a collective, in the order in which they are issued.
        seconds: Compile time by stage.
        saved: What the forward keeps for the backward.
        computed_again: How many operations of the forward the backward computes again.
        claims: Decisions of operator executors, and of fusion executors that declined.
        fallbacks: Regions that an executor failed on.
        decisions: What passes did with parts of the program.
        from_cache: Whether an earlier process compiled it.
        function: Identifies the compiled function that it belongs to.
    """

    traces: list[Trace] = field(default_factory=list)
    executors: Counter = field(default_factory=Counter)
    collectives: dict[str, list[Collective]] = field(default_factory=lambda: {"forward": [], "backward": []})
    sequence: list[str] = field(default_factory=list)
    seconds: Counter = field(default_factory=Counter)
    saved: Saved = Saved()
    computed_again: int = 0
    claims: list[Claim] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    from_cache: bool = False
    function: Optional[int] = None
    warned: set[tuple[str, str]] = field(default_factory=set)  # operation and executor: the backward is compiled later

    @property
    def has_backward(self) -> bool:
        return any(trace.stage == "final backward" for trace in self.traces)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the compile cache; compile time is left out."""
        return {
            "traces": [trace.to_dict() for trace in self.traces],
            "executors": dict(self.executors),
            "collectives": {stage: [asdict(item) for item in items] for stage, items in self.collectives.items()},
            "sequence": self.sequence,
            "saved": asdict(self.saved),
            "computed_again": self.computed_again,
            "claims": [asdict(claim) for claim in self.claims],
            "fallbacks": [asdict(item) for item in self.fallbacks],
            "decisions": [asdict(item) for item in self.decisions],
        }

    def restore(self, data: dict[str, Any]) -> None:
        """Take over what an earlier process recorded."""
        self.traces = [Trace.from_dict(item) for item in data["traces"]]
        self.executors = Counter(data["executors"])
        self.collectives = {stage: [Collective(**c) for c in items] for stage, items in data["collectives"].items()}
        self.sequence = list(data["sequence"])
        self.saved = Saved(**data["saved"])
        self.computed_again = data["computed_again"]
        self.claims = [Claim(**item) for item in data["claims"]]
        self.fallbacks = [Fallback(**item) for item in data["fallbacks"]]
        self.decisions = [Decision(**item) for item in data["decisions"]]
        self.from_cache = True


@dataclass
class Record:
    """All that was compiled for one step or function.

    Attributes:
        name: Step name, ``forward``, a marked method, or the ``__qualname__`` of a compiled function.
        mode: What is compiled now: ``"step"``, ``"forward"``, ``"submodules"`` or ``"off"``.
        note: One sentence on what is not compiled, and why.
    """

    name: str
    mode: str = "step"
    note: str = ""
    programs: list[Program] = field(default_factory=list)
    graph_breaks: list[GraphBreak] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    compile_ids: set[str] = field(default_factory=set)
    break_places: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)  # Dynamo's to the user's
    notices: list[str] = field(default_factory=list)  # warnings that wait for the call to return
    limit_reason: Optional[str] = None  # the guard that failed when the recompile limit was reached
    limit_reported: bool = False
    label: str = ""  # how a report with several modules calls it
    group: str = ""  # what ranks call the programs of the current call, where a record has several kinds

    def traces(self) -> list[list[Trace]]:
        """One list a compiled graph, in stage order."""
        return [list(program.traces) for program in self.programs]

    @contextmanager
    def new_programs_of(self, function: object) -> Iterator[None]:
        """Programs that are compiled while this is open, and not inside another function, belong to ``function``."""
        before = len(self.programs)
        try:
            yield
        finally:
            for program in self.programs[before:]:
                if program.function is None:
                    program.function = id(function)

    def _of_one_step(self) -> list[Program]:
        """The programs that one call runs: of each function the newest, and of training rather than of inference; all
        fragments where a function is cut."""
        if self.graph_breaks:
            return self.programs
        newest: dict[Optional[int], Program] = {}
        for program in self.programs:
            held = newest.get(program.function)
            if held is None or program.has_backward or not held.has_backward:
                newest[program.function] = program
        return list(newest.values())

    def _claims(self) -> list[dict[str, Any]]:
        """Each decision once, with how often it was taken."""
        counts = Counter(claim for program in self._of_one_step() for claim in program.claims)
        return [{**asdict(claim), "count": count} for claim, count in counts.items()]

    def all_fallbacks(self) -> list[Fallback]:
        return [*self.fallbacks, *(item for program in self.programs for item in program.fallbacks)]

    def to_dict(self) -> dict[str, Any]:
        executors: Counter = Counter()
        seconds: Counter = Counter()
        collectives: dict[str, list[dict[str, Any]]] = {"forward": [], "backward": []}
        for program in self.programs:
            executors.update(program.executors)
            seconds.update(program.seconds)
        for stage, merged in collectives.items():
            totals: dict[str, list[int]] = {}
            for program in self._of_one_step():
                for item in program.collectives[stage]:
                    total = totals.setdefault(item.op, [0, 0])
                    total[0] += item.count
                    total[1] += item.bytes
            merged.extend({"op": op, "count": count, "bytes": size} for op, (count, size) in totals.items())
        return {
            "graphs": len(self.programs),
            "graph_breaks": [asdict(item) for item in self.graph_breaks],
            "recompiles": [asdict(item) for item in self.recompiles],
            "compile_seconds": float(sum(seconds.values())),
            "compile_stages": {stage: float(value) for stage, value in seconds.items()},
            "mode": self.mode,
            "note": self.note,
            "executors": dict(executors),
            "collectives": collectives,
            "saved_bytes": sum(program.saved.bytes for program in self._of_one_step()),
            "saved_tensors": sum(program.saved.tensors for program in self._of_one_step()),
            "computed_again": sum(program.computed_again for program in self._of_one_step()),
            "decisions": [asdict(item) for program in self._of_one_step() for item in program.decisions],
            "claims": self._claims(),
            "from_cache": bool(self.programs) and all(program.from_cache for program in self.programs),
        }


@dataclass
class OptimizerRecord:
    """How the newest step of an optimizer was taken.

    Attributes:
        name: Of its class.
        parameters: How many each implementation updated: ``"triton"``, ``"torch fused"``, or ``"torch"``, its own step.
        reasons: Why torch's own step updated them, with how many.
        told: Reasons that the user has been told.
    """

    name: str
    parameters: Counter = field(default_factory=Counter)
    reasons: Counter = field(default_factory=Counter)
    told: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """Another step begins."""
        self.parameters.clear()
        self.reasons.clear()

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "parameters": dict(self.parameters), "reasons": dict(self.reasons)}


@dataclass
class Report:
    """What ``lts.explain`` returns: print it, or take :meth:`to_dict`."""

    records: list[Record]
    parameters: dict[str, int]
    optimizers: list[OptimizerRecord] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data: ``steps``, ``parameters``, ``fallbacks`` and ``optimizers``."""
        return {
            "steps": {record.label or record.name: record.to_dict() for record in self.records},
            "parameters": dict(self.parameters),
            "fallbacks": [asdict(item) for record in self.records for item in record.all_fallbacks()],
            "optimizers": [record.to_dict() for record in self.optimizers],
        }

    def __rich__(self) -> Any:
        from lightning_thunder_strategy.compiler.report_table import render

        return render(self)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=110)
        with console.capture() as capture:
            console.print(self)
        return capture.get()


_ACTIVE: ContextVar[Optional[Record]] = ContextVar("lts_active_record", default=None)


def active_record() -> Optional[Record]:
    """The record of the step or function that is being called, if any."""
    return _ACTIVE.get()


@contextmanager
def recording(record: Record) -> Iterator[Record]:
    """While open, what is compiled belongs to ``record``, unless an outer step is already being recorded."""
    outer = _ACTIVE.get()
    token = _ACTIVE.set(outer if outer is not None else record)
    try:
        yield outer if outer is not None else record
    finally:
        _ACTIVE.reset(token)
