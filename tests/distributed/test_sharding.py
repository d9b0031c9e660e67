"""Parameters outside and inside a step, and the programs that sharded training compiles."""

import pytest

from tests.distributed.checks import Group

GROUP = Group("attributes", "traces", timeout=560)


@GROUP.parametrize()
def test_sharding(check: str, request: pytest.FixtureRequest) -> None:
    GROUP.assert_passed(check, request)
