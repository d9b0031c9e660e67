"""Accumulation without communication on two ranks."""

import pytest

from tests.distributed.checks import Group

GROUP = Group("accumulation", timeout=560)


@pytest.mark.timeout(600)
@GROUP.parametrize()
def test_accumulation(check: str, request: pytest.FixtureRequest) -> None:
    GROUP.assert_passed(check, request)
