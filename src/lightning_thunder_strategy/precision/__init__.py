"""Low precision: formats, scales, recipes, the pass that rewrites linears, and Lightning's plugins."""

from lightning_thunder_strategy.precision.linears import LowPrecisionLinears
from lightning_thunder_strategy.precision.recipe import RECIPES, Recipe

__all__ = ["RECIPES", "LowPrecisionLinears", "Recipe"]
