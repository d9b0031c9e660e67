"""PyTorch itself: runs whatever no other executor takes."""

from lightning_thunder_strategy.executors.base import Executor


class EagerExecutor(Executor):
    """Runs each operation as eager PyTorch does. Always last in the list."""

    name = "eager"
