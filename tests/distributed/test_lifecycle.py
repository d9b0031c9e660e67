"""Setup, teardown, errors, later stages and callbacks on two ranks."""

import pytest

from tests.distributed.checks import Group

GROUP = Group("lifecycle", timeout=560, patience=12)


@GROUP.parametrize()
def test_on_two_ranks(check: str, request: pytest.FixtureRequest) -> None:
    GROUP.assert_passed(check, request)
