"""Lists of a LightningModule that a step appends to, as ``self.outputs.append(loss)``.

Dynamo would compile a new program for each length. While a step runs as one program such a list is therefore a stand-in
that writes down what is appended; nothing else can be done with it.
"""

import re
from typing import Any

from lightning_thunder_strategy.steps.notes import Note


class ListReadError(TypeError):
    """A step reads a list that was taken for one that it only appends to."""


class GrowingList:
    """Stands in for a list that a step only appends to.

    Args:
        real: The list.
        name: Where it is.
        notes: Where calls are written down.
    """

    def __init__(self, real: list, name: str, notes: list[Note]) -> None:
        self.real = real
        self.name = name
        self.notes = notes

    def append(self, item: Any) -> None:
        self.notes.append(Note(self, "append", (item,), {}))

    def extend(self, items: Any) -> None:
        self.notes.append(Note(self, "extend", ([*items],), {}))

    def clear(self) -> None:
        self.notes.append(Note(self, "clear", (), {}))

    def __iadd__(self, items: Any) -> "GrowingList":
        self.extend(items)
        return self

    def _refuse(self, *args: Any) -> Any:
        raise ListReadError(f"The step reads the list <{self.name}>.")

    __bool__ = __len__ = __iter__ = __getitem__ = __setitem__ = __delitem__ = __contains__ = __reversed__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __mul__ = __rmul__ = __imul__ = _refuse
    pop = insert = remove = index = count = sort = reverse = copy = _refuse
    __hash__ = object.__hash__


class GrowingLists:
    """Finds the lists of a module that steps append to: those that are empty at first, or longer than a step before.

    Args:
        attributes: The module's attributes. Lists in a dictionary among them count too.
        notes: Where calls of stand-ins are written down.
    """

    def __init__(self, attributes: dict[str, Any], notes: list[Note]) -> None:
        self._attributes = attributes
        self._notes = notes
        self._lengths: dict[str, int] = {}
        self._growing: dict[str, GrowingList] = {}
        self._read: set[str] = set()

    def put(self) -> list[tuple[dict, Any, GrowingList]]:
        """Put stand-ins in place. Returns what :meth:`take_back` needs."""
        placed = []
        for name, holder, key, real in self._lists():
            before = self._lengths.get(name, len(real))
            self._lengths[name] = len(real)
            if name in self._read or not (name in self._growing or not real or len(real) > before):
                continue
            if name not in self._growing or self._growing[name].real is not real:
                self._growing[name] = GrowingList(real, name, self._notes)
            holder[key] = self._growing[name]
            placed.append((holder, key, self._growing[name]))
        return placed

    @staticmethod
    def take_back(placed: list[tuple[dict, Any, GrowingList]]) -> None:
        """Put the lists back, unless the step has put something else in their place."""
        for holder, key, stand_in in placed:
            if holder.get(key) is stand_in:
                holder[key] = stand_in.real

    def leave_alone(self, reason: str) -> bool:
        """A step could not be compiled: from now on leave those lists as they are that may be why.

        Args:
            reason: Why. It may name the list that was read.

        Returns:
            Whether there are any.
        """
        named = re.search(r"ListReadError.*<(?P<name>.+)>", reason)
        names = {named["name"]} if named else set(self._growing)
        self._read |= names
        found = [self._growing.pop(name, None) for name in names]
        return any(item is not None for item in found)

    def _lists(self) -> list[tuple[str, dict, Any, list]]:
        found = []
        for name, value in self._attributes.items():
            if type(value) is list:
                found.append((name, self._attributes, name, value))
            elif type(value) is dict and not name.startswith("_"):
                found += [(f"{name}[{key!r}]", value, key, item) for key, item in value.items() if type(item) is list]
        return found
