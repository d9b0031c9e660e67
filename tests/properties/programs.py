"""Random modules of these blocks, as recipes that can be printed and made again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Union

import torch
from torch import Tensor, nn

from tests.properties.blocks import BLOCKS, WRAPPERS

Choose = Callable[[Sequence[Any]], Any]  # picks one of several
Part = Union[str, tuple[str, tuple]]  # a block's name, or a wrapper's with what it holds

ENDINGS = ("tensor", "tuple", "dictionary", "dataclass", "twice", "input too", "view", "number too", "none too")


@dataclass
class Output:
    """What a user's model may return."""

    rows: Tensor
    total: Tensor
    count: int


@dataclass(frozen=True)
class Recipe:
    """A module that can be made again."""

    width: int
    parts: tuple[Part, ...]
    ending: str = "tensor"
    dtype: torch.dtype = torch.float64

    def make(self) -> "Program":
        torch.manual_seed(0)
        return Program(self).to(self.dtype)


class Program(nn.Module):
    """The module of a recipe: ``[batch, time, width]`` in, what the recipe's ending says out."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.ending = recipe.ending
        self.layers = nn.Sequential(*[_make(part, recipe.width) for part in recipe.parts])

    def forward(self, x: Tensor) -> Any:
        given, x = x, self.layers(x)
        if self.ending == "tuple":
            return x, x.mean()
        if self.ending == "dictionary":
            return {"rows": x, "nested": [x.sum(-1), {"max": x.detach().max()}]}
        if self.ending == "dataclass":
            return Output(x, x.sum(), x.shape[0])
        if self.ending == "twice":
            return x, x
        if self.ending == "input too":
            return x, given
        if self.ending == "view":
            return x[0], x.reshape(-1)
        if self.ending == "number too":
            return x, x.shape[1], 0.5, "text"
        if self.ending == "none too":
            return [x, None]
        return x


def _make(part: Part, width: int) -> nn.Module:
    if isinstance(part, str):
        return BLOCKS[part](width)
    name, inner = part
    return WRAPPERS[name](*[_make(item, width) for item in inner])


# What writes buffers, which eager PyTorch does once more when it recomputes a checkpointed region.
WRITES_BUFFERS = {"BatchNorm", "Cache", "LateBuffer", "SpectralNorm", "Statistics"}


def _pure(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Parts for a checkpointed region, which eager PyTorch runs twice and a compiled step once."""
    return tuple(
        ("Linear" if part in WRITES_BUFFERS else part) if isinstance(part, str) else (part[0], _pure(part[1]))
        for part in parts
    )


def draw_recipe(choose: Choose, without: Sequence[str] = (), most: int = 4, dtypes: Sequence[Any] = ()) -> Recipe:
    """A random recipe.

    Args:
        choose: Picks one of several.
        without: Names of blocks to leave out.
        most: How many parts at most.
        dtypes: Of parameters and inputs; by default float64, where equal is equal.
    """
    names = [name for name in BLOCKS if name not in without]
    wrappers = [name for name in WRAPPERS if name not in without]

    def part(depth: int) -> Part:
        if depth == 0 or choose(range(4)):
            return choose(names)
        inner = tuple(part(depth - 1) for _ in range(choose((1, 2))))
        name = choose(wrappers)
        return name, _pure(inner) if name == "Checkpointed" else inner

    parts = tuple(part(2) for _ in range(choose(range(1, most + 1))))
    return Recipe(choose((4, 6)), parts, choose(ENDINGS), choose(dtypes or (torch.float64,)))
