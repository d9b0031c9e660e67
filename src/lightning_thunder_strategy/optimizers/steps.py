"""Steps of torch's optimizers, taken by kernels over many parameters: what ``compile_optimizer`` asks for."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from lightning_thunder_strategy.compiler._torch_optimizers import Collect, collecting, own_step
from lightning_thunder_strategy.compiler.config import OnError
from lightning_thunder_strategy.compiler.events import first_line
from lightning_thunder_strategy.compiler.report import OptimizerRecord, warn
from lightning_thunder_strategy.optimizers.partition import (
    Implementation,
    implementation_for,
    laid_out_as,
    local,
    rows_of_one_kind,
)
from lightning_thunder_strategy.optimizers.updates import Adam, Lists, Sgd, Update

CompileOptimizer = Literal["auto", False]
UPDATES: tuple[Update, ...] = (Adam(), Sgd())


@dataclass
class _Plan:
    """What updates which parameters of a param group, by their indices in the lists that the optimizer has filled."""

    columns: Lists
    held: list[list[Any]]
    taken: list[tuple[Implementation, list[int]]]
    left: dict[str, int]  # how many torch's own step updates, by the reason


class OptimizerSteps:
    """Takes steps of optimizers, and writes down which implementation took them.

    Args:
        wanted: ``"auto"``: kernels update what they can, and torch's own step the rest. ``False``: torch's own.
        on_error: What happens with that rest: ``"fallback"``: it is told once, with the reason; ``"raise"``: an error.
    """

    def __init__(self, wanted: CompileOptimizer = False, on_error: OnError = "fallback") -> None:
        self.wanted = wanted
        self.on_error = on_error
        self._record_of: WeakKeyDictionary[Optimizer, OptimizerRecord] = WeakKeyDictionary()
        self._failed: dict[Implementation, str] = {}

    def __reduce__(self) -> Any:
        """Optimizers stay in the process that made them."""
        return type(self), (self.wanted, self.on_error)

    @property
    def records(self) -> list[OptimizerRecord]:
        """Of the optimizers that still exist, in the order of their first steps; equal names are numbered."""
        names: Counter[str] = Counter()
        numbered = []
        for record in self._record_of.values():
            names[record.name] += 1
            number = f"#{names[record.name]}" if names[record.name] > 1 else ""
            numbered.append(replace(record, name=record.name + number))
        return numbered

    def forget(self) -> None:
        """Other optimizers are going to take the steps."""
        self._record_of.clear()

    @contextmanager
    def taken(self, optimizer: Optimizer) -> Iterator[Callable[[Callable], Callable]]:
        """While open, a step of ``optimizer`` is taken as was asked for.

        State, closures, hooks and schedulers are torch's own. Nothing is changed but this optimizer, and it only while
        this is open.

        Yields:
            What the closure of the step, if it has one, is to be replaced by.

        Raises:
            RuntimeError: In the step, with ``on_error="raise"`` and parameters that kernels cannot update, before any
                parameter of any group is updated.
        """
        if not self.wanted:
            yield _as_it_is
            return
        update = next((each for each in UPDATES if isinstance(optimizer, each.optimizer)), None)
        record = self._record(optimizer)
        reason = f"there is no kernel for {record.name}" if update is None else own_step(optimizer, update.optimizer)
        if update is None or reason is not None:
            trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            record.begin()
            self._leave(record, {str(reason): len(trained)})
            yield _as_it_is
            return

        def around(collect: Collect, group: dict[str, Any], lists: list[list]) -> Any:
            result = collect(group, *lists)
            if group is optimizer.param_groups[0]:
                record.begin()
                if self.on_error == "raise":
                    self._check_the_others(record, update, optimizer, collect, len(lists))
            self._take(record, update, optimizer, group, lists)
            return result

        with collecting(optimizer, around) as outside:
            yield outside

    def _record(self, optimizer: Optimizer) -> OptimizerRecord:
        if optimizer not in self._record_of:
            self._record_of[optimizer] = OptimizerRecord(type(optimizer).__name__)
        return self._record_of[optimizer]

    def _check_the_others(
        self, record: OptimizerRecord, update: Update, optimizer: Optimizer, collect: Collect, count: int
    ) -> None:
        """Before the first param group is updated: raise what the others would raise after it."""
        for group in optimizer.param_groups[1:]:
            lists: list[list[Any]] = [[] for _ in range(count)]
            collect(group, *lists)
            self._leave(record, self._planned(update, optimizer, group, lists).left)

    def _planned(self, update: Update, optimizer: Optimizer, group: dict[str, Any], lists: Lists) -> _Plan:
        """What is going to update the parameters of a group; changes nothing."""
        reason = update.refuses(optimizer, group) if lists[0] else None
        if reason is not None or not lists[0]:
            return _Plan([], [], [], {str(reason): len(lists[0])})
        columns = update.columns(lists, group)
        held = [[local(tensor) for tensor in column] for column in columns]
        kinds, left = rows_of_one_kind(columns, held, update.marks(lists))
        taken: list[tuple[Implementation, list[int]]] = []
        for kind, indices in kinds.items():
            implementation, problem = self._implementation(update, *kind[:2])
            if implementation is None:
                left.setdefault(problem, []).extend(indices)
            else:
                taken.append((implementation, indices))
        return _Plan(columns, held, taken, {why: len(indices) for why, indices in left.items()})

    def _take(
        self, record: OptimizerRecord, update: Update, optimizer: Optimizer, group: dict[str, Any], lists: Lists
    ) -> None:
        """Update what kernels can of a param group, and take it out of ``lists``."""
        plan = self._planned(update, optimizer, group, lists)
        self._leave(record, plan.left)
        done: set[int] = set()
        for implementation, indices in plan.taken:
            some, mine = _at(lists, indices), _at(plan.held, indices)
            if not self._run(record, implementation, update, some, mine, group):
                continue
            whole = _at(plan.columns, indices)
            changed = [tensor for lot in (whole, mine) for column in (lot[0], *lot[2:]) for tensor in column]
            torch.autograd.graph.increment_version(changed)  # no kernel tells autograd of both, shard and whole
            update.keep(optimizer, some, whole)
            record.parameters[implementation] += len(indices)
            done.update(indices)
        for each in lists:
            if each:
                each[:] = [value for index, value in enumerate(each) if index not in done]

    def _run(
        self,
        record: OptimizerRecord,
        implementation: Implementation,
        update: Update,
        lists: Lists,
        held: list[list[Any]],
        group: dict[str, Any],
    ) -> bool:
        """Update tensors of one kind. Returns whether that was done: a kernel that cannot be built changes nothing."""
        held[1] = [laid_out_as(parameter, gradient) for parameter, gradient in zip(held[0], held[1])]
        if implementation == "torch fused":
            update.fused(lists, held, group)
            return True
        try:
            update.triton(lists, held, group)
        except Exception as error:
            if self.on_error == "raise" or isinstance(error, torch.OutOfMemoryError):
                raise
            self._failed[implementation] = f"the Triton kernel failed: {first_line(error).rstrip('.')}"
            self._leave(record, {self._failed[implementation]: len(held[0])})
            return False
        return True

    def _implementation(self, update: Update, device: torch.device, types: tuple[torch.dtype, ...]) -> tuple[Any, str]:
        implementation, why = implementation_for(device, types, update.fused_types)
        if implementation is not None and implementation in self._failed:
            return None, self._failed[implementation]
        return implementation, why

    def _leave(self, record: OptimizerRecord, reasons: dict[str, int]) -> None:
        """Torch's own step updates so many parameters, each for its reason."""
        for reason, count in reasons.items():
            if not count:
                continue
            if self.on_error == "raise":
                raise RuntimeError(
                    f"compile_optimizer={self.wanted!r} cannot take over {count} parameters of {record.name}, because "
                    f"{reason}, and on_error='raise'. Change that, or choose on_error='fallback', with which torch's "
                    "own step updates them, or compile_optimizer=False."
                )
            record.parameters["torch"] += count
            if reason not in record.told:
                record.told.add(reason)
                warn(
                    f"compile_optimizer='auto': {record.name} updates {count} of its parameters by torch's own step, "
                    f"because {reason}."
                )
            record.reasons[reason] += count


def _as_it_is(closure: Callable) -> Callable:
    return closure


def _at(lists: Lists, indices: list[int]) -> list[list[Any]]:
    return [[each[index] for index in indices] if each else [] for each in lists]
