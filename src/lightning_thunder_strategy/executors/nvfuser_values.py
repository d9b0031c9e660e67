"""nvFuser's values for the values of a program."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lightning_thunder_strategy.compiler.emit import node_value

TYPES = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Int",
    torch.int32: "Int32",
    torch.bool: "Bool",
}


class Translation:
    """nvFuser's values for the operations of one program.

    Args:
        fusion: nvFuser's ``FusionDefinition``, open.
        types: nvFuser's ``DataType``.
    """

    def __init__(self, fusion: Any, types: Any) -> None:
        self.ops = fusion.ops
        self._fusion = fusion
        self._types = types
        self._values: dict[fx.Node, Any] = {}
        self.integers: list[fx.Node] = []  # numbers that the fusion takes as inputs, after its tensors

    def __getitem__(self, value: Any) -> Any:
        """What nvFuser has for an argument: a value of the fusion, or a plain number."""
        if isinstance(value, (list, tuple)):
            return [self[item] for item in value]
        if not isinstance(value, fx.Node):
            return value
        if value not in self._values:
            number = node_value(value)
            assert not isinstance(number, torch.Tensor), f"{value} is not computed yet"
            kind = "Double" if isinstance(number, (float, torch.SymFloat)) else "Int"
            self._values[value] = self._fusion.define_scalar(None, dtype=getattr(self._types, kind))
            self.integers.append(value)
        return self._values[value]

    def __setitem__(self, node: fx.Node, value: Any) -> None:
        self._values[node] = value

    def type(self, dtype: torch.dtype) -> Any:
        return getattr(self._types, TYPES[dtype])

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """``value`` in a type, as it is if it has that already."""
        wanted = self.type(dtype)
        return value if value.dtype() == wanted else self.ops.cast(value, wanted)


Rule = Callable[[Translation, fx.Node], Any]
