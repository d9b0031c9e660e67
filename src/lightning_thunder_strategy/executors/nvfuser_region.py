"""One region of a program as a fusion of nvFuser, with the views of its results left to torch."""

import operator
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import fx

from lightning_thunder_strategy.compiler import _torch_compat, _torch_decompose
from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.surgery import Layout, layout_of
from lightning_thunder_strategy.executors.nvfuser_operations import KEPT, translate
from lightning_thunder_strategy.executors.nvfuser_shapes import SPLITS, VIEWS
from lightning_thunder_strategy.executors.nvfuser_values import Translation

aten = torch.ops.aten


class NvfuserRegion:
    """A compiled region: a function of one list.

    Args:
        package: The module ``nvfuser_direct``.
        region: An ATen program.
        inputs: Fake tensors and integers.
    """

    def __init__(self, package: Any, region: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._copied: Optional[set[int]] = None  # which results lie in memory of others, once that is known
        bases = _bases(region)
        computed = [node for node in bases if node.op != "placeholder"]
        self._views = _rest(region, computed)
        self._fusion: Any = None  # if there are only views of the inputs
        self._results = 0
        self._layouts: list[Optional[Layout]] = []
        if not computed:
            return
        self._layouts = [layout_of(node_value(node)) for node in computed]  # of which there are views
        core = _part(region, computed)
        program = _torch_decompose.decomposed(core, inputs, KEPT)
        program.graph.eliminate_dead_code()
        self._fuse(package, program, [node_value(node) for node in computed])
        self._try(inputs)

    def _fuse(self, package: Any, program: fx.GraphModule, expected: Sequence[torch.Tensor]) -> None:
        placeholders = program.graph.find_nodes(op="placeholder")
        values = {node: node_value(node) for node in program.graph.nodes}
        used = [node for node in placeholders if isinstance(values[node], torch.Tensor) and node.users]
        self._tensors = [placeholders.index(node) for node in used]
        results = list(program.graph.output_node().args[0])  # type: ignore[arg-type]
        self._given: dict[int, int] = {}  # results that are inputs
        fixed = all(isinstance(size, int) for node in placeholders for size in _sizes(values[node]))
        # nvFuser makes tensors of numbers, which must be real ones
        with _torch_compat.outside_fake_mode(), package.FusionDefinition() as fusion:
            translation = Translation(fusion, package.DataType)
            for node in used:
                translation[node] = _define(fusion, translation, values[node], fixed)
            for node in program.graph.nodes:
                if node.op == "call_function" and _is_tensor(node):
                    translate(translation, node)
            for place, node in enumerate(results):
                if node.op == "placeholder":
                    self._given[place] = placeholders.index(node)
                    continue
                order = _order(expected[place])
                value = translation[node]
                if len(order) > 1:  # or it may be that of some input
                    value = fusion.ops.stride_order(value, stride_order=order)
                fusion.add_output(value)
        self._fusion = fusion
        self._integers = _integer_program(program, translation.integers)
        devices = {values[node].device.index for node in used if values[node].device.type != "cpu"}
        self._device: Optional[int] = None if devices else expected[0].device.index
        self._results = len(results)

    def _try(self, inputs: Sequence[Any]) -> None:
        """Compile the kernels, on inputs of the sizes at hand: what fails now goes to another executor."""
        with _torch_compat.outside_fake_mode(), torch.no_grad():
            args = []
            try:
                args += [_example(value) for value in inputs]
                self._note_aliases(args, self._run(args))
            except torch.OutOfMemoryError:
                pass  # the kernels are compiled when they are first called

    def _note_aliases(self, args: Sequence[Any], results: Sequence[torch.Tensor]) -> None:
        """Find the results that nvFuser puts into the memory of an input or of another result."""
        memory = {value.untyped_storage().data_ptr() for value in args if isinstance(value, torch.Tensor)}
        self._copied = set()
        for place, value in enumerate(results):
            pointer = value.untyped_storage().data_ptr()
            if pointer in memory:
                self._copied.add(place)
            memory.add(pointer)

    def _run(self, args: Sequence[Any]) -> list[torch.Tensor]:
        if self._fusion is None:
            return []
        values = [args[index] for index in self._tensors]
        if self._integers is not None:
            values += self._integers(*args)
        results = iter(self._fusion.execute(values, device=self._device))
        return [
            args[self._given[place]].clone() if place in self._given else next(results)
            for place in range(self._results)
        ]

    def __call__(self, args: Sequence[Any]) -> Sequence[Any]:
        results = self._run(args)
        if self._copied is None:
            self._note_aliases(args, results)
        for place in self._copied or ():
            results[place] = results[place].clone()
        if self._views is None:
            return results
        laid_out = [
            value if layout is None else layout.restored(value) for value, layout in zip(results, self._layouts)
        ]
        return self._views(*args, *laid_out)


def _is_tensor(node: fx.Node) -> bool:
    value = node_value(node)
    return isinstance(value, (torch.Tensor, list, tuple))


def _sizes(value: Any) -> list[Any]:
    return [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]


def _define(fusion: Any, translation: Translation, value: torch.Tensor, fixed: bool) -> Any:
    """An input. Expanded dimensions have the stride 0; nvFuser finds the order and the gaps from the strides."""
    sizes, strides = ([_torch_compat.size_hint(n) for n in found] for found in (value.shape, value.stride()))
    dtype, is_cpu = translation.type(value.dtype), value.device.type == "cpu" and not value.dim()
    return fusion.define_tensor(sizes=sizes, strides=strides, dtype=dtype, static_sizes=fixed, is_cpu=is_cpu)


def _order(value: torch.Tensor) -> list[int]:
    """For each dimension its place in memory, 0 for the innermost."""
    strides = [_torch_compat.size_hint(stride) for stride in value.stride()]
    sizes = [_torch_compat.size_hint(size) for size in value.shape]
    dims = [dim for dim in range(len(sizes)) if sizes[dim] > 1]
    outer_first = iter(sorted(dims, key=lambda dim: (-strides[dim], dim)))
    places = [next(outer_first) if sizes[dim] > 1 else dim for dim in range(len(sizes))]
    result = [0] * len(sizes)
    for place, dim in enumerate(places):
        result[dim] = len(sizes) - 1 - place
    return result


def _example(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return _torch_compat.number_hint(value)
    sizes, strides = ([_torch_compat.size_hint(n) for n in found] for found in (value.shape, value.stride()))
    if value.device.type == "cpu" and not value.dim():
        return torch.ones((), dtype=value.dtype)
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)


# ------------------------------------------------------------------------------------------------------------ splitting


def _base(node: fx.Node) -> fx.Node:
    """What a result of a region is a view of, or a copy of an input of the region.

    These views and copies are left to torch: nvFuser would make an alias of the input of both.
    """
    if node.target is operator.getitem and node.args[0].target in SPLITS:
        return _base(node.args[0].args[0])
    if node.target in VIEWS:
        return _base(node.args[0])
    if node.target is aten.clone.default and _base(node.args[0]).op == "placeholder":
        return _base(node.args[0])
    return node


def _bases(region: fx.GraphModule) -> list[fx.Node]:
    return list(dict.fromkeys(_base(node) for node in region.graph.output_node().args[0]))


def _part(region: fx.GraphModule, outputs: Sequence[fx.Node]) -> fx.GraphModule:
    """What computes some of a region's values, from the same inputs."""
    graph, values = fx.Graph(), {}
    graph.graph_copy(region.graph, values)
    graph.output([values[node] for node in outputs])
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # broken down, a value may have other strides
    return fx.GraphModule(region, graph)


def _rest(region: fx.GraphModule, computed: Sequence[fx.Node]) -> Optional[fx.GraphModule]:
    """The views and copies behind the computed values: of the region's inputs and of those, its results.

    ``None`` if the computed values are the results.
    """
    outputs = list(region.graph.output_node().args[0])
    if outputs == list(computed):
        return None
    needed, stack = set(), list(outputs)
    while stack:
        node = stack.pop()
        if node not in computed and node not in needed and node.op != "placeholder":
            needed.add(node)
            stack += node.all_input_nodes
    graph, values = fx.Graph(), {}
    for node in region.graph.find_nodes(op="placeholder"):
        values[node] = graph.placeholder(node.name)
    for node in computed:
        values[node] = graph.placeholder(node.name)
    for node in region.graph.nodes:
        if node in needed:
            values[node] = graph.node_copy(node, values.__getitem__)
    graph.output([values[node] for node in outputs])
    return fx.GraphModule(region, graph)


def _integer_program(program: fx.GraphModule, wanted: Sequence[fx.Node]) -> Optional[fx.GraphModule]:
    """What computes numbers from a region's inputs, such as products of symbolic sizes."""
    if not wanted:
        return None
    graph, values = fx.Graph(), {}
    graph.graph_copy(program.graph, values)
    graph.output([values[node] for node in wanted])
    graph.eliminate_dead_code()
    return fx.GraphModule(program, graph)
