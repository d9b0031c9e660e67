"""Losses of logits that two tensor-parallel ranks have parts of."""

import pytest

from tests.distributed.checks import Group

GROUP = Group("tensor_losses", timeout=280)


@pytest.mark.timeout(300)
@GROUP.parametrize()
def test_loss_parallel(check: str, request: pytest.FixtureRequest) -> None:
    GROUP.assert_passed(check, request)
