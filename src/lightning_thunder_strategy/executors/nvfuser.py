"""nvFuser: NVIDIA's compiler of pointwise operations, reductions and normalisations."""

import importlib
import importlib.metadata
import importlib.util
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Optional

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from lightning_thunder_strategy.compiler import _torch_decompose
from lightning_thunder_strategy.compiler.emit import node_value
from lightning_thunder_strategy.compiler.refusals import told_by_the_parser_too
from lightning_thunder_strategy.executors.base import FusionExecutor
from lightning_thunder_strategy.executors.nvfuser_operations import KEPT, problem
from lightning_thunder_strategy.executors.nvfuser_region import NvfuserRegion
from lightning_thunder_strategy.executors.nvfuser_shapes import SPLITS, VIEWS, symbolic_problem
from lightning_thunder_strategy.executors.packages import gpu_problem, import_problem

_PACKAGE = "nvfuser_direct"
_INSTALL = "pip install nvfuser-cu130-torch210"
_CAPABILITY = (8, 0)
_FREE = (*VIEWS, *SPLITS, torch.ops.aten.clone.default, torch.ops.aten.full.default)


@told_by_the_parser_too
@dataclass(frozen=True)
class NvfuserExecutor(FusionExecutor):
    """nvFuser: regions of pointwise operations, reductions, normalisations, casts and views, as fused kernels.

    Args:
        fewest_operations: A region with fewer operations, views and copies not counted, goes to the next executor.

    Raises:
        ValueError: If that is not a positive number.
    """

    fewest_operations: int = 2
    name: ClassVar[str] = "nvfuser"
    gathers: ClassVar[bool] = True
    device_type: ClassVar[str] = "cuda"

    def __post_init__(self) -> None:
        number = self.fewest_operations
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"NvfuserExecutor.fewest_operations={number!r} is not allowed: give 1 or more.")

    def unavailable(self) -> Optional[str]:
        if not _installed():
            return f"The package {_PACKAGE!r} is not installed."
        reason = gpu_problem(_CAPABILITY)
        if reason is not None:
            return reason
        reason = import_problem(_PACKAGE)
        if reason is None or _distribution() is None:
            return reason
        return f"{reason} {_distribution()} may be built for another torch than this, {torch.__version__}."

    def install_command(self) -> str:
        return f"{_INSTALL} (with torch 2.10 for CUDA 13)"

    def version(self) -> Optional[str]:
        found = _distribution()
        return None if found is None else found.partition(" ")[2]

    def cache_key(self) -> Optional[str]:
        key = super().cache_key()
        return None if key is None else f"{key}:{self.version()}"

    def supports(self, node: fx.Node) -> Optional[str]:
        target, value = node.target, node_value(node)
        if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
            return "it is no ATen operation"
        if target._schema.is_mutable:
            return "it edits a tensor"
        if torch.Tag.nondeterministic_seeded in target.tags:
            return "it draws random numbers"
        tensors = [leaf for leaf in tree_leaves(value) if leaf is not None]
        if not tensors or not all(isinstance(leaf, torch.Tensor) for leaf in tensors):
            return "it computes no tensor"
        used = [node_value(argument) for argument in node.all_input_nodes]
        reason = self._placed_elsewhere(tensors, used)
        return reason or symbolic_problem(node) or self._checked(node)

    def _placed_elsewhere(self, results: Sequence[torch.Tensor], used: Sequence[Any]) -> Optional[str]:
        for value in used:
            if not isinstance(value, (torch.Tensor, torch.SymInt, int)):
                return f"it uses a {type(value).__name__}"
        inputs = [value for value in used if isinstance(value, torch.Tensor)]
        if any(value.dim() == 0 and value.device.type == "cpu" for value in inputs):
            inputs = [value for value in inputs if value.dim() or value.device.type != "cpu"]
        devices = {value.device for value in (*results, *inputs)}
        if len(devices) > 1:
            return f"its tensors are on {', '.join(sorted(map(str, devices)))}"
        if next(iter(devices)).type != self.device_type:
            return f"nvFuser runs on {self.device_type}, and this is on {next(iter(devices)).type}"
        if any(type(value) is not type(results[0]) for value in inputs):
            return "it uses a tensor of a class of its own"
        return None

    def _checked(self, node: fx.Node) -> Optional[str]:
        """Whether nvFuser has all that the operation is made of; equal operations are looked at once."""
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), node_value)
        args, kwargs = _torch_decompose.at_hints((args, kwargs))
        key = f"{node.target}{_described((args, kwargs))}"
        if key not in _KNOWN:
            if len(_KNOWN) > 10_000:
                _KNOWN.clear()
            _KNOWN[key] = _problem(node.target, args, kwargs)
        return _KNOWN[key]

    def worthwhile(self, nodes: Sequence[fx.Node]) -> Optional[str]:
        operations = sum(node.target not in _FREE and node.target is not operator.getitem for node in nodes)
        if operations >= self.fewest_operations:
            return None
        return f"a region with {operations} operations is not worth a kernel of nvFuser's"

    def fuse(self, region: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list], Sequence[Any]]:
        return NvfuserRegion(self.package(), region, inputs)

    def package(self) -> Any:
        """The module that is nvFuser."""
        return importlib.import_module(_PACKAGE)


_KNOWN: dict[str, Optional[str]] = {}


def _problem(target: Any, args: Any, kwargs: Any) -> Optional[str]:
    leaves = tree_leaves((args, kwargs))
    tensors = [value for value in leaves if isinstance(value, torch.Tensor)]
    places = [index for index, value in enumerate(leaves) if isinstance(value, torch.Tensor)]

    def call(*values: torch.Tensor) -> Any:
        from torch.utils._pytree import tree_flatten, tree_unflatten

        given, spec = tree_flatten((args, kwargs))
        for place, value in zip(places, values):
            given[place] = value
        new_args, new_kwargs = tree_unflatten(given, spec)
        return target(*new_args, **new_kwargs)

    try:
        program = _torch_decompose.decomposed(call, tensors, KEPT)
    except Exception as error:
        return f"it cannot be broken down: {type(error).__name__}"
    program.graph.eliminate_dead_code()
    for node in program.graph.nodes:
        if node.op == "get_attr":
            return "it uses a constant tensor"
        reason = problem(node) if node.op == "call_function" else None
        if reason is not None:
            return reason
    return None


def _described(value: Any) -> str:
    def text(leaf: Any) -> str:
        if isinstance(leaf, torch.Tensor):
            return f"{leaf.dtype}{tuple(leaf.shape)}{leaf.stride()}{leaf.device}"
        return repr(leaf)

    return str([text(leaf) for leaf in tree_leaves(value)]) + str(torch.utils._pytree.tree_structure(value))


@lru_cache(maxsize=1)
def _installed() -> bool:
    return importlib.util.find_spec(_PACKAGE) is not None


@lru_cache(maxsize=1)
def _distribution() -> Optional[str]:
    """Name and version of what has installed the package, such as ``nvfuser-cu130-torch210 0.2.36``."""
    if not _installed():
        return None
    names = importlib.metadata.packages_distributions().get(_PACKAGE, [])
    return f"{names[0]} {importlib.metadata.version(names[0])}" if names else None
