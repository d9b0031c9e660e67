"""Which values of a program come into being as memory, and what each kernel reads.

Eager PyTorch runs each operation as a kernel and keeps each result. TorchInductor generates code: a pointwise result
that only generated code uses is computed where it is used, from what it is made of, and never stored.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from lightning_thunder_strategy.compiler import _torch_inductor
from lightning_thunder_strategy.compiler.surgery import is_operation
from lightning_thunder_strategy.planner.storages import NOTHING, Storage, Value, new_value, shared_value, shares

_READS_ON_REUSE = 4  # torch._inductor.config.realize_reads_threshold: read more, and used twice: it is stored
_READS = 8  # realize_acc_reads_threshold: read more: it is stored


@dataclass(frozen=True)
class Kernel:
    """One kernel, or what of a fused kernel makes one stored value.

    Attributes:
        node: The operation.
        reads: What it reads.
        makes: What it stores.
        alone: Whether it is a kernel that is called, not generated.
    """

    node: fx.Node
    reads: tuple[Storage, ...]
    makes: tuple[Storage, ...]
    alone: bool


@dataclass(frozen=True)
class Program:
    """A program as kernels.

    Attributes:
        kernels: In order.
        inputs: Where each placeholder lives.
        outputs: Where each result lives, in order.
    """

    kernels: tuple[Kernel, ...]
    inputs: dict[fx.Node, Value]
    outputs: tuple[tuple[Storage, ...], ...]


def kernels_of(graph: fx.Graph, inputs: dict[str, tuple[Storage, ...]], fused: bool) -> Program:
    """Divide a program into kernels.

    Args:
        graph: The program.
        inputs: Where placeholders live that share memory with others, by name.
        fused: Whether TorchInductor compiles it.
    """
    return _Kernels(graph, inputs, fused).program()


class _Kernels:
    def __init__(self, graph: fx.Graph, inputs: dict[str, tuple[Storage, ...]], fused: bool) -> None:
        self._graph = graph
        self._fused = fused
        self._given = inputs
        self._values: dict[fx.Node, Value] = {}  # of what is stored
        self._reads: dict[fx.Node, tuple[Storage, ...]] = {}  # what reading a value reads
        self._place = {node: index for index, node in enumerate(graph.nodes)}
        self._needed = self._needed_in_memory() if fused else set()
        self._calls = [self._place[node] for node in graph.nodes if is_operation(node) and self._is_alone(node)]

    def program(self) -> Program:
        kernels: list[Kernel] = []
        inputs: dict[fx.Node, Value] = {}
        for node in self._graph.nodes:
            if node.op == "placeholder":
                given = self._given.get(node.name)
                inputs[node] = self._values[node] = Value((given,)) if given is not None else new_value(node)
                self._reads[node] = inputs[node].storages
            elif node.op == "call_function":
                kernel = self._kernel(node)
                if kernel is not None:
                    kernels.append(kernel)
        returned = self._graph.output_node().args[0]
        outputs = tuple(
            self._reads.get(item, ()) if isinstance(item, fx.Node) else ()
            for item in (returned if isinstance(returned, (tuple, list)) else (returned,))
        )
        return Program(tuple(kernels), inputs, outputs)

    def _kernel(self, node: fx.Node) -> "Kernel | None":
        """Note where a result lives. ``None`` if nothing is stored for it."""
        shared = shared_value(node, self._values)
        if shared is not None:
            source = node.args[0]
            self._values[node] = shared
            self._reads[node] = shared.storages or self._reads.get(source, ())  # type: ignore[call-overload]
            if is_operation(node) and is_wait(node):  # what is communicated is kept until the wait
                kept = self._kept_until_wait(source)  # type: ignore[arg-type]
                return Kernel(node, tuple(dict.fromkeys((*self._reads[node], *kept))), (), True)
            mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
            return Kernel(node, self._inputs(node), (), not self._fused) if mutable else None
        reads, alone = self._inputs(node), self._is_alone(node)
        if not alone and not self._is_stored(node, reads):
            self._values[node], self._reads[node] = NOTHING, reads
            return None
        self._values[node] = new_value(node)
        self._reads[node] = self._values[node].storages
        return Kernel(node, reads, self._values[node].storages, alone and not _name(node).startswith("all_reduce"))

    def _kept_until_wait(self, launch: fx.Node) -> tuple[Storage, ...]:
        """What a collective reads; a reduction to all ranks works on a copy, in place."""
        if launch.op != "call_function" or _name(launch).startswith("all_reduce"):
            return ()
        return self._inputs(launch)

    def _inputs(self, node: fx.Node) -> tuple[Storage, ...]:
        return tuple(dict.fromkeys(s for used in node.all_input_nodes for s in self._reads.get(used, ())))

    def _is_alone(self, node: fx.Node) -> bool:
        return not self._fused or _torch_inductor.runs_alone(node.target)

    def _is_stored(self, node: fx.Node, reads: tuple[Storage, ...]) -> bool:
        if node in self._needed or _torch_inductor.is_reduction(node.target) or len(reads) > _READS:
            return True
        return len(node.users) > 1 and len(reads) > _READS_ON_REUSE and self._used_across_calls(node)

    def _used_across_calls(self, node: fx.Node) -> bool:
        """Whether a kernel that is called lies between a result's uses, so that not all of them can be fused."""
        places = [self._place[user] for user in node.users]
        return any(min(places) < place < max(places) for place in self._calls)

    def _needed_in_memory(self) -> set[fx.Node]:
        """What called kernels read, and what is returned, looked for through views."""
        needed: set[fx.Node] = set()
        for node in self._graph.nodes:
            if node.op == "output" or (is_operation(node) and (self._is_alone(node) or is_wait(node))):
                for used in node.all_input_nodes:
                    needed.add(_base(used))
        return needed


def _base(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and shares(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def is_wait(node: fx.Node) -> bool:
    """Whether an operation waits for a collective."""
    return _name(node) == "wait_tensor"


def _name(node: fx.Node) -> str:
    return node.target._schema.name.split("::")[1] if isinstance(node.target, torch._ops.OpOverload) else ""


def total(storages: Iterable[Storage]) -> int:
    """Bytes of several storages, each counted once."""
    return sum(storage.bytes for storage in set(storages))
