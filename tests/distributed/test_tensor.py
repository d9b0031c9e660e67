"""Tensor parallelism on two ranks, and on four together with data parallelism."""

import pytest

from tests.distributed.checks import Group

GROUP = Group("tensor", timeout=280)


@pytest.mark.timeout(300)
@GROUP.parametrize()
def test_tensor_parallel(check: str, request: pytest.FixtureRequest) -> None:
    GROUP.assert_passed(check, request)


FOUR = Group("tensor_2d", world_size=4, timeout=280)


@pytest.mark.timeout(300)
@FOUR.parametrize()
def test_tensor_and_data_parallel(check: str, request: pytest.FixtureRequest) -> None:
    FOUR.assert_passed(check, request)
