"""Runs all checks of some modules, and prints what each took: those that are too long for the test suite.

Usage: python -m tests.distributed.run WORLD_SIZE MODULE...
"""

import sys
import time

from tests.distributed.checks import names
from tests.distributed.ranks import run_ranks


def main(world_size: int, modules: list[str]) -> int:
    """How many checks failed."""
    failed = 0
    for module in modules:
        for name in names(module):
            check, started = f"{module}:{name}", time.perf_counter()
            results = run_ranks(check, world_size=world_size, check=False, timeout=600)[check]
            errors = [f"rank {rank}:\n{text}" for rank, text in enumerate(results) if text is not None]
            failed += bool(errors)
            print(f"{'FAILED' if errors else 'passed'} {check} in {time.perf_counter() - started:.1f} s", flush=True)
            print("\n".join(errors), end="\n" if errors else "", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(int(sys.argv[1]), sys.argv[2:]), 1))
