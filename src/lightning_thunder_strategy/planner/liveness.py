"""How much memory a program has in use after each of its kernels."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from lightning_thunder_strategy.planner.kernels import Program
from lightning_thunder_strategy.planner.storages import Storage

ROUND = 512  # bytes: torch's CUDA allocator gives multiples of it


@dataclass(frozen=True)
class Moment:
    """A kernel runs.

    Attributes:
        node: The operation.
        bytes: In use while it runs.
    """

    node: fx.Node
    bytes: int


@dataclass(frozen=True)
class Usage:
    """Memory over a program.

    Attributes:
        moments: One for each kernel, in order.
        peak: The most bytes in use at once.
        at: Which of the moments that is.
        alive: What is in use then.
        left: What is in use at the end: results, and inputs that were not given away.
    """

    moments: tuple[Moment, ...]
    peak: int
    at: int
    alive: tuple[Storage, ...]
    left: frozenset[Storage]


def usage(program: Program, held: Iterable[Storage], ignored: Iterable[Storage], reuses: bool) -> Usage:
    """Run a program in thought.

    Args:
        program: Its kernels.
        held: Inputs that live in memory counted here and may be freed after their last use: the values that a forward
            has saved.
        ignored: Storages that are not counted: parameters, buffers and batches, which somebody else holds.
        reuses: Whether a generated kernel may write its result over an input that nobody uses afterwards.
    """
    skipped = set(ignored)
    returned = {storage for result in program.outputs for storage in result}
    last: dict[Storage, int] = {}
    for index, kernel in enumerate(program.kernels):
        for storage in (*kernel.reads, *kernel.makes):
            last[storage] = index
    dying: dict[int, list[Storage]] = {}
    for storage, index in last.items():
        if storage not in returned and storage not in skipped:
            dying.setdefault(index, []).append(storage)
    alive = {storage for storage in held if storage not in skipped}
    for storage in list(alive):
        if storage not in last and storage not in returned:
            alive.discard(storage)  # saved, and used by nothing
    now = sum(map(_size, alive))
    peak, at, then = now, -1, tuple(alive)
    moments = []
    for index, kernel in enumerate(program.kernels):
        made = [s for s in kernel.makes if s not in alive and s not in skipped]
        free = [s for s in dying.get(index, ()) if s in alive]
        taken: set[Storage] = set()
        if reuses and not kernel.alone:
            for storage in made:
                same = next((s for s in free if s not in taken and s.bytes == storage.bytes), None)
                if same is not None:
                    taken.add(same)
        alive.update(made)
        now += sum(map(_size, made))
        during = now - sum(map(_size, taken))
        moments.append(Moment(kernel.node, during))
        if during > peak:
            peak, at, then = during, index, tuple(alive - taken)
        for storage in dying.get(index, ()):
            if storage in alive:
                alive.discard(storage)
                now -= _size(storage)
    return Usage(tuple(moments), peak, at, then, frozenset(alive))


def _size(storage: Storage) -> int:
    return -(-storage.bytes // ROUND) * ROUND
