"""Training on two ranks equals DDP, FSDP2 and one process on the whole batch."""

import pytest

from tests.distributed.checks import Group

GROUP = Group("parity", timeout=580)


@pytest.mark.timeout(600)
@GROUP.parametrize()
def test_training_equals(check: str, request: pytest.FixtureRequest) -> None:
    GROUP.assert_passed(check, request)
