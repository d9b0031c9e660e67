"""What runs the parts of a program: ``lts.executors.list()`` shows them."""

from lightning_thunder_strategy.executors.base import Claim, Executor, FusionExecutor, OperatorExecutor, Replacement
from lightning_thunder_strategy.executors.chunked_loss import ChunkedLossExecutor
from lightning_thunder_strategy.executors.inductor import InductorExecutor
from lightning_thunder_strategy.executors.liger import LigerExecutor
from lightning_thunder_strategy.executors.nvfuser import NvfuserExecutor
from lightning_thunder_strategy.executors.registration import register
from lightning_thunder_strategy.executors.registry import ExecutorInfo
from lightning_thunder_strategy.executors.registry import list_executors as list
from lightning_thunder_strategy.executors.sdpa import SdpaExecutor
from lightning_thunder_strategy.executors.triton import TritonExecutor

__all__ = [
    "ChunkedLossExecutor",
    "Claim",
    "Executor",
    "ExecutorInfo",
    "FusionExecutor",
    "InductorExecutor",
    "LigerExecutor",
    "NvfuserExecutor",
    "OperatorExecutor",
    "Replacement",
    "SdpaExecutor",
    "TritonExecutor",
    "list",
    "register",
]
