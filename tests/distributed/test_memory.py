"""Activation checkpointing on two ranks."""

import pytest

from tests.distributed.checks import Group

GROUP = Group("memory", timeout=300)


@pytest.mark.timeout(360)
@GROUP.parametrize()
def test_memory(check: str, request: pytest.FixtureRequest) -> None:
    GROUP.assert_passed(check, request)
