"""What a plan says."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_thunder_strategy.planner.memory import MemoryPlan
from lightning_thunder_strategy.planner.timing import CollectivePlan, TimePlan


@dataclass(frozen=True)
class CollectiveTotal:
    """Collectives of one kind.

    Attributes:
        direction: ``"forward"`` or ``"backward"``.
        op: Torch's functional name.
        dtype: Of the elements.
        ranks: How many take part in each.
        count: How many.
        bytes: Of the whole tensors.
        seconds: How long they take.
        exposed_seconds: How long computation waits for them.
    """

    direction: str
    op: str
    dtype: str
    ranks: int
    count: int
    bytes: int
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class Plan:
    """What one rank of many would do in a training step: print it, or take :meth:`to_dict`.

    Attributes:
        strategy: Name of the strategy's class.
        module: Name of the module's class.
        devices: How many there are.
        devices_per_node: How many of them a node has.
        gpu: The GPU that is assumed.
        interconnect: What is assumed to connect nodes.
        efficiency: The part of the datasheets' speeds that is assumed.
        compiled_by: ``"inductor"`` if TorchInductor compiles the program, else ``"eager"``.
        memory: Bytes on the rank.
        workspace: Bytes that libraries keep besides.
        capacity: Bytes of the GPU's memory.
        collectives: Each collective of the step, in the order in which they end.
        time: Operations and seconds.
    """

    strategy: str
    module: str
    devices: int
    devices_per_node: int
    gpu: str
    interconnect: str
    efficiency: float
    compiled_by: str
    memory: MemoryPlan
    workspace: int
    capacity: int
    collectives: tuple[CollectivePlan, ...]
    time: TimePlan

    @property
    def total(self) -> int:
        """Bytes in use at the peak, workspaces included."""
        return self.memory.peak + self.workspace

    @property
    def fits(self) -> bool:
        """Whether the step fits the GPU's memory."""
        return self.total <= self.capacity

    def collective_totals(self) -> list[CollectiveTotal]:
        """Collectives by direction, kind, type and size of the group."""
        found: dict[tuple, list[CollectivePlan]] = {}
        for item in self.collectives:
            found.setdefault((item.direction, item.op, item.dtype, item.ranks), []).append(item)
        return [
            CollectiveTotal(
                *key,
                len(items),
                sum(item.bytes for item in items),
                sum(item.seconds for item in items),
                sum(item.exposed_seconds for item in items),
            )
            for key, items in found.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data."""
        totals = [asdict(total) for total in self.collective_totals()]
        return {**asdict(self), "collective_totals": totals, "total": self.total, "fits": self.fits}

    def plot(self, path: "str | Path") -> Path:
        """Draw memory over the step as a PNG file.

        Raises:
            ModuleNotFoundError: If matplotlib is missing, with the command that installs it.
            ValueError: If the name does not end in ``.png``.
        """
        from lightning_thunder_strategy.planner.plot import draw

        return draw(self, Path(path))

    def __rich__(self) -> Any:
        from lightning_thunder_strategy.planner.table import render

        return render(self)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=110)
        with console.capture() as capture:
            console.print(self)
        return capture.get()
