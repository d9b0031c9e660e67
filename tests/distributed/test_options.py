"""Trainer options and precisions on two ranks give the training of Lightning's own strategies."""

import pytest

from tests.distributed.checks import Group

GROUP = Group("options", timeout=580)


@pytest.mark.timeout(600)
@GROUP.parametrize()
def test_option(check: str, request: pytest.FixtureRequest) -> None:
    GROUP.assert_passed(check, request)
