"""Takes a step's program when all passes have run, and ends the run there."""

from dataclasses import dataclass
from typing import Optional

from torch import fx

from lightning_thunder_strategy.compiler import _torch_dynamo
from lightning_thunder_strategy.compiler.pipeline import Pipeline
from lightning_thunder_strategy.compiler.surgery import copy_program
from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.strategies.early_release import EarlyRelease


class PlanError(RuntimeError):
    """The step cannot be planned."""


@dataclass(frozen=True)
class Observed:
    """A training step's program. A node's ``meta["val"]`` is a fake tensor.

    Attributes:
        joint: Forward and backward as one program, before anything is computed twice.
        forward: What runs first.
        backward: What runs then.
        keeps_gradients: Whether gradients of the step before are there during the forward.
    """

    joint: fx.Graph
    forward: fx.Graph
    backward: fx.Graph
    keeps_gradients: bool


class Planned(BaseException):
    """Ends the run of a program that is only planned: nothing between the compiler and the planner may catch it."""

    def __init__(self, observed: Observed) -> None:
        super().__init__()
        self.observed = observed


class Observe(Transform):
    """The last pass: raises :class:`Planned` with the partitioned program.

    Args:
        pipeline: That it is a pass of.
        whole: Whether the program is the whole step.
    """

    def __init__(self, pipeline: Pipeline, whole: bool) -> None:
        self._pipeline = pipeline
        self._whole = whole
        self._joint: Optional[fx.Graph] = None

    def joint(self, trace: Trace) -> None:
        self._joint = copy_program(trace.graph_module).graph  # type: ignore[arg-type]

    def partitioned(self, forward: Trace, backward: Optional[Trace]) -> None:
        if not self._whole or backward is None or self._joint is None:
            raise Unplannable("without gradients" if self._whole else "in parts")
        raise Planned(Observed(self._joint, forward.graph, backward.graph, self._keeps_gradients()))

    def _keeps_gradients(self) -> bool:
        release = self._pipeline.before
        early = isinstance(release, EarlyRelease) and release.applies and not _torch_dynamo.reads_gradients()
        return not early

    def cache_key(self) -> Optional[str]:
        return None


class Unplannable(BaseException):
    """What was compiled is not a whole training step. Passes through the compiler like :class:`Planned`."""
