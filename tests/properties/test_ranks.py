"""Random modules on two ranks, several in one pair of processes."""

import os

import pytest

from tests.distributed.ranks import run_ranks

LONG = int(os.environ.get("FUZZ_EXAMPLES", "0"))


@pytest.mark.timeout(0)
def test_random_modules_train_as_under_ddp() -> None:
    first = int.from_bytes(os.urandom(3), "little") if LONG else 0
    count = LONG // 10 if LONG else 3
    seeds = ",".join(str(seed) for seed in range(first, first + count))
    run_ranks("fuzz:check_random_modules", env={"FUZZ_SEEDS": seeds}, timeout=200 + 60 * count, patience=120)
