"""How many random examples: few and always the same, or ``FUZZ_EXAMPLES`` new ones for each test."""

import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

_common = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True, "database": None,
           "phases": (Phase.explicit, Phase.generate)}  # fmt: skip
settings.register_profile("quick", max_examples=6, derandomize=True, **_common)
settings.register_profile("long", max_examples=int(os.environ.get("FUZZ_EXAMPLES", "0")) or 1, **_common)
settings.load_profile("long" if "FUZZ_EXAMPLES" in os.environ else "quick")


@pytest.fixture(autouse=True)
def one_thread():
    """One order of summation."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
