"""Calls of DTensor in programs that Dynamo has read. Checked on torch 2.10, 2.11 and 2.13.

Torch 2.13 writes them as they are. Up to torch 2.11 each is a function of its own that hides its placements, so that
two equal calls do not look equal, and printed programs would not say what is called.
"""

from collections.abc import Callable
from typing import Any, Optional

from torch import Tensor, fx
from torch.distributed.tensor import DTensor

_HIDDEN = ("args_as_value", "kwargs_as_value")  # what such a function closes over


def dtensor_call(node: fx.Node) -> Optional[str]:
    """``"redistribute"``, ``"to_local"`` or ``"from_local"`` if the node calls that, else ``None``."""
    if node.op == "call_method":
        return node.target if node.target in ("redistribute", "to_local") else None
    if node.op != "call_function":
        return None
    name = getattr(node.target, "__name__", "").removeprefix("prim").lstrip(" _")
    known = name == "from_local" or (name in ("redistribute", "to_local") and _hidden(node.target) is not None)
    return name if known else None


def written_out(node: fx.Node) -> Optional[tuple[Optional[Any], str, list[Any], dict[str, Any]]]:
    """What a call with hidden arguments says: the class that it is called on (or ``None``: a method of the first
    argument), its name, arguments and keywords. ``None`` for any other node."""
    name, hidden = dtensor_call(node), _hidden(node.target)
    if name is None or hidden is None:
        return None
    args, kwargs = hidden
    return DTensor if name == "from_local" else None, name, [*node.args, *args], {**kwargs, **node.kwargs}


def merge_equal_functions(gm: fx.GraphModule) -> None:
    """Give calls with equal hidden arguments the same function, so that equal calls look equal."""
    known: dict[Any, Callable] = {}
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            hidden = _hidden(node.target) if dtensor_call(node) else None
            if hidden is not None:
                args, kwargs = hidden
                key = (dtensor_call(node), _key(args), _key(sorted(kwargs.items())))
                node.target = known.setdefault(key, node.target)


def shard_key(tensor: DTensor) -> str:
    """What a program over this rank's shard depends on: its sizes, its placements and the groups of its mesh."""
    local, mesh = tensor._local_tensor, tensor.device_mesh
    groups = [group.group_name for group in mesh.get_all_groups()] if mesh.get_coordinate() is not None else []
    return repr((tuple(local.shape), local.stride(), tensor.placements, mesh.get_coordinate(), groups))


def with_local(tensor: DTensor, local: Tensor) -> DTensor:
    """A distributed tensor like ``tensor`` with another local part, which may be on another device than the mesh."""
    return DTensor(local, tensor._spec, requires_grad=False)


def _hidden(function: Any) -> Optional[tuple[list[Any], dict[str, Any]]]:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if not all(name in names for name in _HIDDEN):
        return None
    cells = dict(zip(names, function.__closure__))
    args, kwargs = (cells[name].cell_contents for name in _HIDDEN)
    return list(args), dict(kwargs)


def _key(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_key(item) for item in value)
    return value  # placements, meshes, booleans and names have equality and a hash
