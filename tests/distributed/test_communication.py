"""Buckets, element types and order of collectives on two ranks."""

import pytest

from tests.distributed.checks import Group

GROUP = Group("communication", timeout=560)


@pytest.mark.timeout(600)
@GROUP.parametrize()
def test_communication(check: str, request: pytest.FixtureRequest) -> None:
    GROUP.assert_passed(check, request)
