"""Stands in for the value of a metric, which is computed only after the compiled step."""

from typing import Any

from torch import nn
from torch.utils._pytree import tree_any, tree_map


class MetricValueUsedError(TypeError):
    """A step computes with the value of a metric."""


class Token:
    """Stands for the value of a metric until the step has run. It can be logged, returned or kept, nothing else.

    Args:
        number: Which of the step's values it is.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def _refuse(self, *args: Any) -> Any:
        raise MetricValueUsedError("The step computes with the value of a metric.")

    __bool__ = __len__ = __iter__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __neg__ = (
        _refuse
    )
    __getattr__ = __getitem__ = __contains__ = __abs__ = __round__ = _refuse
    __float__ = __int__ = __index__ = __str__ = __format__ = _refuse
    __hash__ = object.__hash__


def has_token(tree: Any) -> bool:
    """Whether a token is somewhere in nested containers."""
    return tree_any(lambda leaf: isinstance(leaf, Token), tree)


def resolved(tree: Any, values: dict[int, Any]) -> Any:
    """The tree with real values in place of tokens."""
    if not values:
        return tree
    if isinstance(tree, Token):
        return values[tree.number]
    if type(tree) in (tuple, list):
        return type(tree)([resolved(item, values) for item in tree])
    if type(tree) is dict:
        return {key: resolved(value, values) for key, value in tree.items()}
    return tree_map(lambda leaf: values[leaf.number] if isinstance(leaf, Token) else leaf, tree)


def store_values(root: nn.Module, values: dict[int, Any]) -> bool:
    """Put real values in place of the tokens that a step has kept in attributes of its modules. Whether any was."""
    found = [_store(vars(module), values, set()) for module in root.modules()]
    return any(found)


_NOT_A_USERS = ("_modules", "_parameters", "_buffers", "_trainer", "_fabric")


def _store(container: Any, values: dict[int, Any], seen: set[int]) -> bool:
    if id(container) in seen:
        return False
    seen.add(id(container))
    items = list(container.items() if isinstance(container, dict) else enumerate(container))
    found = False
    for key, item in items:
        if isinstance(item, Token):
            if item.number in values:
                container[key] = values[item.number]
                found = True
        elif isinstance(item, tuple) and has_token(item):
            container[key] = resolved(item, values)
            found = True
        elif isinstance(item, (dict, list)) and key not in _NOT_A_USERS:
            found |= _store(item, values, seen)
    return found
