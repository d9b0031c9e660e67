"""Hybrid sharding on four ranks."""

import pytest

from tests.distributed.checks import Group

GROUP = Group("hybrid", world_size=4, timeout=560)


@pytest.mark.timeout(600)
@GROUP.parametrize()
def test_hybrid_sharding(check: str, request: pytest.FixtureRequest) -> None:
    GROUP.assert_passed(check, request)
