"""Checkpoints that two ranks write and read."""

import pytest

from tests.distributed.checks import Group

GROUP = Group("checkpoints", "async_checkpoints", timeout=560)


@GROUP.parametrize()
def test_checkpoints_of_two_ranks(check: str, request: pytest.FixtureRequest) -> None:
    GROUP.assert_passed(check, request)
