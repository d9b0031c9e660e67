"""Tensor and data parallelism on four ranks. More on two and four: ``make tensor``."""

import pytest

from tests.distributed.checks import Group

GROUP = Group("tensor_quick", world_size=4, timeout=560)


@pytest.mark.timeout(600)
@GROUP.parametrize()
def test_tensor_parallel(check: str, request: pytest.FixtureRequest) -> None:
    GROUP.assert_passed(check, request)
