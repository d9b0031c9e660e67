"""How long a step takes: at least, if every kernel runs at the speed that the machine's datasheets promise.

A kernel takes the longer of ``operations / peak`` and ``bytes / bandwidth`` (the roofline model,
https://doi.org/10.1145/1498765.1498785). A collective of ``n`` ranks over ``S`` bytes of whole tensors is a ring
(https://doi.org/10.1177/1094342005051521): gathers and reduce-scatters take ``(n - 1) a + (n - 1) / n S / B``, an
all-reduce twice that, where ``a`` is the latency of a step of the ring and ``B`` the bandwidth of its slowest link.
Collectives of a process group run one after another, beside computation, from where the program starts them; a wait
lasts until its collective has ended.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from lightning_thunder_strategy.compiler import _torch_compat
from lightning_thunder_strategy.compiler.collectives import collective_of, full_tensors
from lightning_thunder_strategy.planner.flops import node_flops, product_dtype
from lightning_thunder_strategy.planner.kernels import Kernel, is_wait
from lightning_thunder_strategy.planner.machines import GPU, NVLINK_LATENCY, Interconnect
from lightning_thunder_strategy.planner.memory import StepPrograms
from lightning_thunder_strategy.planner.storages import Storage

_TWICE = ("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_")


@dataclass(frozen=True)
class Machine:
    """What a job runs on.

    Attributes:
        gpu: Of each rank.
        interconnect: Between nodes.
        devices_per_node: How many a node has; ranks are numbered node by node.
        efficiency: The part of the datasheets' speeds that kernels and links reach.
    """

    gpu: GPU
    interconnect: Interconnect
    devices_per_node: int
    efficiency: float


@dataclass(frozen=True)
class CollectivePlan:
    """One collective.

    Attributes:
        direction: ``"forward"`` or ``"backward"``.
        op: Torch's functional name, such as ``all_gather_into_tensor``.
        bytes: Of the whole tensors: the result of a gather, the input of any other.
        dtype: Of the elements.
        ranks: How many take part.
        nodes: Over how many nodes they are.
        seconds: How long it takes.
        exposed_seconds: How long computation waits for it.
        overlaps: How many kernels run between its start and its wait, in the order of the program.
        overlap_seconds: How long they take.
        overlap_from: The first of them, as traces print it.
        overlap_to: The last of them.
    """

    direction: str
    op: str
    bytes: int
    dtype: str
    ranks: int
    nodes: int
    seconds: float
    exposed_seconds: float
    overlaps: int
    overlap_seconds: float
    overlap_from: str
    overlap_to: str


@dataclass(frozen=True)
class TimePlan:
    """Seconds of a step, and operations.

    Attributes:
        flops: Floating-point operations of forward and backward, those that are computed again included.
        model_flops: The same, each once.
        forward: Seconds.
        backward: Seconds.
        optimizer: Seconds.
        compute: Seconds in which kernels run, of forward and backward.
        communication: Seconds that collectives take.
        exposed: Seconds in which computation waits for collectives.
        step: Seconds of the whole step.
        mfu: ``model_flops`` by what the GPU could do in that time (https://arxiv.org/abs/2204.02311, appendix B).
    """

    flops: int
    model_flops: int
    forward: float
    backward: float
    optimizer: float
    compute: float
    communication: float
    exposed: float
    step: float
    mfu: float


def step_time(
    programs: StepPrograms, model_flops: int, optimizer_bytes: int, machine: Machine
) -> tuple[TimePlan, tuple[CollectivePlan, ...]]:
    """Run a step in thought.

    Args:
        programs: Its programs.
        model_flops: Operations, each once.
        optimizer_bytes: What the optimizer reads and writes.
        machine: What it runs on.
    """
    clock = _Clock(machine)
    clock.run("forward", programs.forward.kernels)
    forward = clock.now
    clock.run("backward", programs.backward.kernels)
    both = clock.now
    optimizer = optimizer_bytes / (machine.gpu.bandwidth * machine.efficiency)
    step = both + optimizer
    collectives = tuple(clock.collectives)
    possible = machine.gpu.flops(clock.dtype()) * step
    times = TimePlan(
        flops=clock.flops,
        model_flops=model_flops,
        forward=forward,
        backward=both - forward,
        optimizer=optimizer,
        compute=clock.compute,
        communication=sum(item.seconds for item in collectives),
        exposed=sum(item.exposed_seconds for item in collectives),
        step=step,
        mfu=model_flops / possible if possible else 0.0,
    )
    return times, collectives


@dataclass
class _Launched:
    node: fx.Node
    group: list[int]
    direction: str
    seconds: float
    end: float
    kernels: int  # how many had run when it started
    compute: float  # and how long they had taken


class _Clock:
    """Runs kernels and collectives in the order of the program."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.now = 0.0
        self.compute = 0.0
        self.flops = 0
        self.collectives: list[CollectivePlan] = []
        self._free: dict[str, float] = {}  # when a process group has ended its last collective
        self._under_way: dict[Storage, _Launched] = {}  # by what it writes to
        self._by_dtype: Counter = Counter()
        self._ran: list[str] = []

    def run(self, direction: str, kernels: Sequence[Kernel]) -> None:
        for kernel in kernels:
            if collective_of(kernel.node) is not None:
                self._launch(kernel, direction)
            elif is_wait(kernel.node):
                self._wait(kernel)
            else:
                self._compute(kernel)
        for storage in list(self._under_way):  # what nobody waits for ends with the program
            self._end(storage)

    def dtype(self) -> torch.dtype:
        """The type in which most operations are done."""
        return max(self._by_dtype, key=self._by_dtype.__getitem__) if self._by_dtype else torch.float32

    def _compute(self, kernel: Kernel) -> None:
        flops, gpu = node_flops(kernel.node), self.machine.gpu
        dtype = product_dtype(kernel.node)
        moved = sum(storage.bytes for storage in (*kernel.reads, *kernel.makes))
        seconds = max(flops / gpu.flops(dtype), moved / gpu.bandwidth) / self.machine.efficiency
        self.now += seconds
        self.compute += seconds
        self.flops += flops
        if flops:
            self._by_dtype[dtype] += flops
        self._ran.append(kernel.node.name)

    def _launch(self, kernel: Kernel, direction: str) -> None:
        name = str(kernel.node.args[-1])
        group = _torch_compat.group_ranks(name)
        seconds = self._seconds(kernel.node, group)
        end = max(self.now, self._free.get(name, 0.0)) + seconds
        self._free[name] = end
        launched = _Launched(kernel.node, group, direction, seconds, end, len(self._ran), self.compute)
        for storage in kernel.makes[:1]:
            self._under_way[storage] = launched

    def _wait(self, kernel: Kernel) -> None:
        for storage in kernel.reads:
            if storage in self._under_way:
                self._end(storage)

    def _end(self, storage: Storage) -> None:
        launched = self._under_way.pop(storage)
        exposed = max(0.0, launched.end - self.now)
        self.now += exposed
        what = collective_of(launched.node)
        assert what is not None
        beside = self._ran[launched.kernels :]
        self.collectives.append(
            CollectivePlan(
                launched.direction,
                what.op,
                what.bytes,
                str(full_tensors(launched.node)[0].dtype).removeprefix("torch."),
                len(launched.group),
                len({rank // self.machine.devices_per_node for rank in launched.group}),
                launched.seconds,
                min(exposed, launched.seconds),
                len(beside),
                self.compute - launched.compute,
                beside[0] if beside else "",
                beside[-1] if beside else "",
            )
        )

    def _seconds(self, node: fx.Node, group: Sequence[int]) -> float:
        what, ranks = collective_of(node), len(group)
        if what is None or ranks == 1:
            return 0.0
        nodes = Counter(rank // self.machine.devices_per_node for rank in group)
        net, gpu = self.machine.interconnect, self.machine.gpu
        bandwidth = gpu.nvlink
        if len(nodes) > 1:  # as many rings as a node has ranks of the group, each over a link of its own
            bandwidth = min(bandwidth, net.bandwidth * min(nodes.values()))
        hops = len(nodes) if len(nodes) > 1 else 0
        latency = hops * net.latency + (ranks - 1 - hops if hops < ranks - 1 else 0) * NVLINK_LATENCY
        once = latency + (ranks - 1) / ranks * what.bytes / (bandwidth * self.machine.efficiency)
        return 2 * once if what.op in _TWICE else once
