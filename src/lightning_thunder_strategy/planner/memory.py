"""Memory of one rank over one training step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from lightning_thunder_strategy.compiler.emit import source_line
from lightning_thunder_strategy.planner.hollow import local
from lightning_thunder_strategy.planner.kernels import Program, kernels_of
from lightning_thunder_strategy.planner.liveness import ROUND, Usage, usage
from lightning_thunder_strategy.planner.observe import Observed
from lightning_thunder_strategy.planner.optimizers import OptimizerMemory
from lightning_thunder_strategy.planner.storages import Storage


@dataclass(frozen=True)
class Held:
    """A value that is in memory at the peak.

    Attributes:
        name: Of the operation that makes it, as traces print it.
        bytes: Its size.
        source: The line of the user's code that it comes from, or an empty string.
    """

    name: str
    bytes: int
    source: str


@dataclass(frozen=True)
class Point:
    """Memory while an operation runs.

    Attributes:
        phase: ``"forward"``, ``"backward"`` or ``"optimizer"``.
        operation: As traces print it.
        bytes: All that is in use on the device, workspaces of libraries excepted.
    """

    phase: str
    operation: str
    bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank in a training step after the first one.

    Attributes:
        parameters: What the rank stores of the parameters.
        buffers: Buffers of the module.
        batch: Tensors of the batch.
        gradients: All gradients, as the backward returns them.
        optimizer: State of the optimizers.
        optimizer_temporary: What the optimizer's step takes for a while.
        saved: What the forward saves for the backward; parameters are not counted again.
        activations: At the peak, what is neither of parameters, buffers, batch and optimizer state: activations,
            gathered parameters, gradients that are there already, and temporaries.
        peak: The most in use at once, without workspaces of libraries.
        peak_phase: ``"forward"``, ``"backward"`` or ``"optimizer"``.
        peak_operation: The operation that runs then.
        largest: The largest values in memory then.
        timeline: Memory over the step.
    """

    parameters: int
    buffers: int
    batch: int
    gradients: int
    optimizer: int
    optimizer_temporary: int
    saved: int
    activations: int
    peak: int
    peak_phase: str
    peak_operation: str
    largest: tuple[Held, ...]
    timeline: tuple[Point, ...]


@dataclass(frozen=True)
class StepPrograms:
    """Forward and backward as kernels, and what of the forward the backward reads."""

    forward: Program
    backward: Program
    others: frozenset[Storage]  # inputs of the forward, which somebody else holds
    saved: frozenset[Storage]


def step_programs(observed: Observed, fused: bool) -> StepPrograms:
    """Divide a step's programs into kernels.

    Args:
        observed: The programs.
        fused: Whether TorchInductor compiles them.
    """
    forward = kernels_of(observed.forward, {}, fused)
    returned = observed.forward.output_node().args[0]
    given: dict[str, tuple[Storage, ...]] = {
        node.name: storages
        for node, storages in zip(returned, forward.outputs)  # type: ignore[arg-type]
        if isinstance(node, fx.Node) and storages
    }
    backward = kernels_of(observed.backward, given, fused)
    others = frozenset(storage for value in forward.inputs.values() for storage in value.storages)
    taken = {storage for value in backward.inputs.values() for storage in value.storages}
    return StepPrograms(forward, backward, others, frozenset(taken - others))


def step_memory(
    programs: StepPrograms,
    module: nn.Module,
    batch: Sequence[torch.Tensor],
    optimizer: OptimizerMemory,
    fused: bool,
    keeps_gradients: bool,
) -> MemoryPlan:
    """Memory over a step.

    Args:
        programs: Of the step.
        module: As the strategy has set it up.
        batch: Tensors of the batch.
        optimizer: Of its optimizers.
        fused: Whether TorchInductor compiles the programs.
        keeps_gradients: Whether gradients of the step before are there in the forward: the Trainer drops them after it,
            our strategies before it where nobody can tell.
    """
    parameters = sum(_rounded(local(p)) for p in set(module.parameters()))
    buffers = sum(_rounded(local(b)) for b in set(module.buffers()))
    inputs = sum(_rounded(value) for value in batch)
    gradients = sum(_round(s.bytes) for s in _gradients(programs))
    base = parameters + buffers + inputs + optimizer.state
    first = usage(programs.forward, (), programs.others, fused)
    second = usage(programs.backward, programs.saved, programs.others, fused)
    old = gradients if keeps_gradients else 0
    timeline = [Point("forward", m.node.name, base + old + m.bytes) for m in first.moments]
    timeline += [Point("backward", m.node.name, base + m.bytes) for m in second.moments]
    timeline.append(Point("optimizer", "step", base + gradients + optimizer.temporary))
    top = max(timeline, key=lambda point: point.bytes)
    return MemoryPlan(
        parameters=parameters,
        buffers=buffers,
        batch=inputs,
        gradients=gradients,
        optimizer=optimizer.state,
        optimizer_temporary=optimizer.temporary,
        saved=sum(_round(s.bytes) for s in programs.saved),
        activations=top.bytes - base,
        peak=top.bytes,
        peak_phase=top.phase,
        peak_operation=top.operation,
        largest=_largest({"forward": first, "backward": second}.get(top.phase), programs),
        timeline=tuple(timeline),
    )


def _gradients(programs: StepPrograms) -> set[Storage]:
    return {storage for result in programs.backward.outputs for storage in result if storage not in programs.others}


def _largest(found: "Usage | None", programs: StepPrograms) -> tuple[Held, ...]:
    if found is None:
        return ()
    makers = {
        storage: kernel.node
        for program in (programs.forward, programs.backward)
        for kernel in program.kernels
        for storage in kernel.makes
    }
    largest = sorted(found.alive, key=lambda storage: (-storage.bytes, storage.name))[:10]
    return tuple(Held(s.name, s.bytes, source_line(makers[s]) or "" if s in makers else "") for s in largest if s.bytes)


def _rounded(tensor: torch.Tensor) -> int:
    return _round(tensor.numel() * tensor.element_size())


def _round(size: int) -> int:
    return -(-size // ROUND) * ROUND
