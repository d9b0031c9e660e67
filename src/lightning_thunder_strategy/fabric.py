"""The strategies and the precision plugin for Lightning's Fabric, under the same names as those for the Trainer."""

from lightning_thunder_strategy.precision.fabric import ThunderPrecision
from lightning_thunder_strategy.strategies.fabric import ThunderDDPStrategy, ThunderFSDPStrategy, ThunderStrategy
from lightning_thunder_strategy.strategies.fabric_tensor import ThunderTPStrategy

__all__ = ["ThunderDDPStrategy", "ThunderFSDPStrategy", "ThunderPrecision", "ThunderStrategy", "ThunderTPStrategy"]
