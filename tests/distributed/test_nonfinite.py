"""Gradients that are not finite, on two ranks."""

import pytest

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.strategies.engine import Engine
from tests.distributed.checks import Group

GROUP = Group("nonfinite", timeout=560)


@pytest.mark.timeout(600)
@GROUP.parametrize()
def test_nonfinite_gradients(check: str, request: pytest.FixtureRequest) -> None:
    GROUP.assert_passed(check, request)


def test_a_gradient_scaler_is_refused() -> None:
    class Precision:
        scaler = object()

    engine: Engine = lts.ThunderDDPStrategy(nonfinite_gradients="raise")._engine
    with pytest.raises(ValueError, match="nonfinite_gradients='raise' is not allowed with a gradient scaler"):
        engine.check_precision(Precision())
    lts.ThunderDDPStrategy()._engine.check_precision(Precision())
