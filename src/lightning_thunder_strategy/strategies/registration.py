"""Names by which Trainer and Fabric find the strategies."""

from typing import Any


def register(registry: Any, *strategies: type) -> None:
    """Register strategies under their ``strategy_name``; doing so again is fine."""
    for strategy in strategies:
        name = strategy.strategy_name  # type: ignore[attr-defined]
        registry.register(name, strategy, description=(strategy.__doc__ or "").strip().splitlines()[0], override=True)
