"""What a plan says."""

from dataclasses import asdict, dataclass
from typing import Any

from lightning_thunder_strategy.planner.memory import MemoryPlan


@dataclass(frozen=True)
class Plan:
    """What one rank of many would do in a training step: print it, or take :meth:`to_dict`.

    Attributes:
        strategy: Name of the strategy's class.
        devices: How many there are.
        devices_per_node: How many of them a node has.
        gpu: The GPU that is assumed.
        memory: Bytes on the rank.
        workspace: Bytes that libraries keep besides.
        capacity: Bytes of the GPU's memory.
    """

    strategy: str
    devices: int
    devices_per_node: int
    gpu: str
    memory: MemoryPlan
    workspace: int
    capacity: int

    @property
    def fits(self) -> bool:
        """Whether the step fits the GPU's memory."""
        return self.memory.peak + self.workspace <= self.capacity

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {**asdict(self), "fits": self.fits}
