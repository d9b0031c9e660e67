"""A trace compiler behind Lightning's Trainer and Fabric: pick a strategy, keep your code."""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_thunder_strategy import executors, fabric
from lightning_thunder_strategy.compiler.compile import CompileError, compile
from lightning_thunder_strategy.compiler.config import CompileConfig
from lightning_thunder_strategy.compiler.report import CompileWarning
from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.executors.base import Executor
from lightning_thunder_strategy.inspection import explain, traces
from lightning_thunder_strategy.planner.plan import plan
from lightning_thunder_strategy.precision.recipe import Recipe
from lightning_thunder_strategy.precision.trainer import ThunderPrecision
from lightning_thunder_strategy.precision.weights import QuantizeWeights, restore_weights
from lightning_thunder_strategy.strategies.registration import register
from lightning_thunder_strategy.strategies.trainer import ThunderDDPStrategy, ThunderFSDPStrategy, ThunderStrategy
from lightning_thunder_strategy.strategies.trainer_tensor import ThunderTPStrategy
from lightning_thunder_strategy.transforms.activation_checkpointing import ActivationCheckpointing

__version__ = "0.1.0"
__all__ = [
    "ActivationCheckpointing",
    "CompileConfig",
    "CompileError",
    "CompileWarning",
    "Executor",
    "QuantizeWeights",
    "Recipe",
    "ThunderDDPStrategy",
    "ThunderFSDPStrategy",
    "ThunderPrecision",
    "ThunderStrategy",
    "ThunderTPStrategy",
    "Trace",
    "Transform",
    "compile",
    "executors",
    "explain",
    "fabric",
    "plan",
    "restore_weights",
    "traces",
]

register(StrategyRegistry, ThunderStrategy, ThunderDDPStrategy, ThunderFSDPStrategy, ThunderTPStrategy)
register(
    STRATEGY_REGISTRY,
    fabric.ThunderStrategy,
    fabric.ThunderDDPStrategy,
    fabric.ThunderFSDPStrategy,
    fabric.ThunderTPStrategy,
)
