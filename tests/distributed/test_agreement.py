"""Ranks that differ train right, or stop with an error that names them."""

import pytest

from tests.distributed.checks import Group

GROUP = Group("agreement", timeout=560, patience=12)


@GROUP.parametrize()
def test_ranks_that_differ(check: str, request: pytest.FixtureRequest) -> None:
    GROUP.assert_passed(check, request)
