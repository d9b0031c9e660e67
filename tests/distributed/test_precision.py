"""Low precision on two ranks equals one process, and casts weights before they are gathered."""

import pytest

from tests.distributed.checks import Group

GROUP = Group("precision", timeout=560)


@GROUP.parametrize()
def test_precision(check: str, request: pytest.FixtureRequest) -> None:
    GROUP.assert_passed(check, request)
