"""A trace compiler behind Lightning's Trainer and Fabric: pick a strategy, keep your code."""

from lightning_thunder_strategy import executors
from lightning_thunder_strategy.compiler.compile import CompileError, compile
from lightning_thunder_strategy.compiler.config import CompileConfig
from lightning_thunder_strategy.compiler.report import CompileWarning
from lightning_thunder_strategy.compiler.trace import Trace
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.executors.base import Executor

__version__ = "0.1.0"
__all__ = ["CompileConfig", "CompileError", "CompileWarning", "Executor", "Trace", "Transform", "compile", "executors"]
