"""Models come into being right, and without a rank ever holding the whole of one."""

import pytest

from tests.distributed.checks import Group

GROUP = Group("initialization", timeout=560)


@GROUP.parametrize()
def test_initialization(check: str, request: pytest.FixtureRequest) -> None:
    GROUP.assert_passed(check, request)
