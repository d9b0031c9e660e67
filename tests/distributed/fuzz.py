"""Random modules trained on two ranks: equal to Lightning's DDP, or a clear refusal."""

import os
import random
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from tests.distributed.models import Base
from tests.distributed.parity import EXACT, _float64
from tests.distributed.training import assert_equal_results, fit, thunder
from tests.properties.blocks import CUTTING
from tests.properties.programs import ENDINGS, Recipe, draw_recipe

SEEDS = [int(seed) for seed in os.environ.get("FUZZ_SEEDS", "0").split(",")]
OTHERWISE_UNDER_DDP = {
    "LateBuffer",  # drawn in the first step, and so after ranks were made equal
    "Cache",  # changes in validation too, after which DDP leaves out the next broadcast of buffers; ours does not
}


class Random(Base):
    """The module of a recipe; its loss is made of all that it returns."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.net = recipe.make()

    def loss(self, batch: Any) -> Tensor:
        leaves = torch.utils._pytree.tree_leaves(self.net(batch[0]))
        rows = getattr(leaves[0], "rows", leaves[0])
        return rows.square().mean()


def _case(seed: int) -> tuple[Recipe, str, dict[str, Any]]:
    chance = random.Random(seed)
    choose = lambda options: chance.choice(list(options))  # noqa: E731
    recipe = draw_recipe(choose, without=[*CUTTING, *OTHERWISE_UNDER_DDP], most=3)
    assert recipe.ending in ENDINGS
    options = {"accumulate_grad_batches": choose((1, 1, 2)), "gradient_clip_val": choose((None, None, 0.1))}
    return recipe, choose(("ddp", "zero2", "zero3", "zero3")), {"max_epochs": 1, "limit_val_batches": 1, **options}


def _data(width: int) -> TensorDataset:
    return TensorDataset(torch.randn(16, 3, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64))


@_float64
def check_random_modules() -> None:
    failures = []
    for seed in SEEDS:
        recipe, kind, options = _case(seed)
        if not any(parameter.requires_grad for parameter in recipe.make().parameters()):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = fit("ddp_find_unused_parameters_true", Random(recipe), _data(recipe.width), **options)
            torch._dynamo.reset()
            try:
                ours = fit(thunder(kind), Random(recipe), _data(recipe.width), **options)
                assert_equal_results(ours, theirs, **EXACT)
            except Exception as error:  # the same on both ranks: the next one can be tried
                failures.append(
                    f"seed {seed}, {kind}, {recipe}, {options}: {type(error).__name__}: {str(error)[:1500]}"
                )
    assert not failures, "\n".join(failures)
