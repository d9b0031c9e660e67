"""Accumulation without communication on two ranks."""

import pytest

from tests.distributed.checks import Group

GROUP = Group("accumulation", timeout=280)


@pytest.mark.timeout(300)
@GROUP.parametrize()
def test_accumulation(check: str, request: pytest.FixtureRequest) -> None:
    GROUP.assert_passed(check, request)
