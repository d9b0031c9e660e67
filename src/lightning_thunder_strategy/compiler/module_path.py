"""The modules whose code an operation of a program comes from, as users name them."""

import re
from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class ModuleCall:
    """One call of one module, while a program was read.

    Attributes:
        name: The module's qualified name, as far as it is known.
        kind: The qualified name of its class.
        call: Equal for operations of the same call only.
    """

    name: str
    kind: str
    call: str


def module_calls(node: fx.Node) -> list[ModuleCall]:
    """The calls that an operation of the forward belongs to; empty for code outside of modules."""
    return [
        ModuleCall(path_name(path), kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}", call)
        for call, (path, kind) in (node.meta.get("nn_module_stack") or {}).items()
    ]


def path_name(path: str) -> str:
    """``model.layers.0`` for TorchDynamo's ``L['self'].model._modules['layers'].0``."""
    return ".".join(part for pair in _PATH.findall(path) for part in pair if part and part != "_modules")


_PATH = re.compile(r"\.([^.\[]+)|(?<!^L)(?<!^G)\['([^']+)'\]")  # after the root, which is L['name'] or G['name']
