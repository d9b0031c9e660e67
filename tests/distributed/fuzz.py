"""Random modules trained on two ranks under random options: equal to Lightning's DDP, or a clear refusal."""

import inspect
import os
import random
import warnings
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lightning_thunder_strategy as lts
from tests.distributed.models import Base
from tests.distributed.parity import EXACT, _float64
from tests.distributed.training import PATIENCE, assert_equal_results, fit, thunder
from tests.properties.blocks import CUTTING
from tests.properties.programs import ENDINGS, Choose, Recipe, draw_recipe

SEEDS = [int(seed) for seed in os.environ.get("FUZZ_SEEDS", "0").split(",")]
OTHERWISE_UNDER_DDP = {"LateBuffer"}  # drawn in the first step, and so after ranks were made equal
# What a linear must have twice a whole number of.
STYLES = {"colwise_gather_output": "out_features", "rowwise_split_input": "in_features"}
TENSOR = inspect.signature(lts.ThunderTPStrategy).parameters


class Random(Base):
    """The module of a recipe; its loss is made of all that it returns."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.net = recipe.make()

    def loss(self, batch: Any) -> Tensor:
        leaves = torch.utils._pytree.tree_leaves(self.net(batch[0]))
        rows = getattr(leaves[0], "rows", leaves[0])
        return rows.square().mean()


def _options(kind: str, choose: Choose) -> dict[str, Any]:
    """Random options of the strategy; only ``broadcast_buffers`` changes values, as it does under DDP."""
    options = {
        "bucket_size_mb": choose((0, 25.0, 1e-4, "block")),
        "in_flight_mb": choose((None, None, 1e-4)),
        "compile": choose(("step", "step", "forward", "submodules", "off")),
        "broadcast_buffers": choose((True, True, False)),
        "nonfinite_gradients": choose(("ignore", "raise")),
    }
    return options if kind == "ddp" else {**options, "prefetch": choose((0, 1, 3))}


def _plan(recipe: Recipe, choose: Choose) -> dict[str, str]:
    """Random linears of the module, computed by both ranks together."""
    entries = {}
    for name, child in recipe.make().named_modules():
        if type(child) is nn.Linear and choose((True, True, False)):
            styles = [style for style, size in STYLES.items() if getattr(child, size) % 2 == 0]
            if styles:
                entries[f"net.{name}"] = choose(styles)
    return entries


def _case(seed: int) -> tuple[Recipe, str, dict[str, Any], dict[str, Any]]:
    chance = random.Random(seed)
    choose = lambda options: chance.choice(list(options))  # noqa: E731
    recipe = draw_recipe(choose, without=[*CUTTING, *OTHERWISE_UNDER_DDP], most=3)
    assert recipe.ending in ENDINGS
    fitting = {"accumulate_grad_batches": choose((1, 1, 2)), "gradient_clip_val": choose((None, None, 0.1))}
    kind = choose(("ddp", "zero1", "zero2", "zero3", "zero3", "tensor"))
    options = _options(kind, choose)
    if kind == "tensor":
        plan = _plan(recipe, choose)
        kind, options = ("tensor", {**options, "plan": plan}) if plan else ("zero3", options)
    return recipe, kind, options, {"max_epochs": 1, "limit_val_batches": 1, **fitting}


def _strategy(kind: str, options: dict[str, Any]) -> Any:
    if kind == "tensor":
        options = {name: value for name, value in options.items() if name in TENSOR}
        return lts.ThunderTPStrategy(tensor_parallel_size=2, executors=["eager"], timeout=PATIENCE, **options)
    return thunder(kind, **options)


def _data(width: int, kind: str) -> TensorDataset:
    """Ranks that compute a layer together have the same batches."""
    rows = torch.randn(16, 3, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return TensorDataset(rows[:8].repeat_interleave(2, 0) if kind == "tensor" else rows)


def _runs(recipe: Recipe, data: TensorDataset) -> bool:
    """Whether the plain module does; some views that are drawn do not fit the strides of what they are given."""
    module = Random(recipe)
    try:
        for training in (True, False):
            module.train(training).loss(data[:4])
    except RuntimeError:
        return False
    return True


@_float64
def check_random_modules() -> None:
    failures = []
    for seed in SEEDS:
        recipe, kind, options, fitting = _case(seed)
        if not any(parameter.requires_grad for parameter in recipe.make().parameters()):
            continue
        data = _data(recipe.width, kind)
        if not _runs(recipe, data):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            alike = DDPStrategy(find_unused_parameters=True, broadcast_buffers=options["broadcast_buffers"])
            theirs = fit(alike, Random(recipe), data, **fitting)
            torch._dynamo.reset()
            try:
                ours = fit(_strategy(kind, options), Random(recipe), data, **fitting)
                assert_equal_results(ours, theirs, **EXACT)
            except Exception as error:  # the same on both ranks: the next one can be tried
                if kind == "tensor" and isinstance(error, ValueError) and "plan" in str(error):
                    continue  # tied or parametrized weights, which a plan may not split
                failures.append(
                    f"seed {seed}, {kind}, {recipe}, {options}, {fitting}: {type(error).__name__}: {str(error)[:1500]}"
                )
    assert not failures, "\n".join(failures)
