import logging

import pytest
import torch


@pytest.fixture(autouse=True)
def quiet_single_threaded():
    """Bit-equal comparisons need one order of summation; Lightning's own lines are no part of a test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
    torch.set_num_threads(threads)
