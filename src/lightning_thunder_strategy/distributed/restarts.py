"""Ranks that torchrun has started again meet where nobody has met before.

With torch 2.13 the store through which ranks find each other is kept over the restarts of ``torchrun --max-restarts``,
with the addresses of the processes before, so that a rank may wait for one that has ended. Here each restart has names
of its own. On several nodes torchrun counts restarts on each by itself, so that there is no name that all would know.
"""

import os
from datetime import timedelta
from typing import Optional

import torch


def meet_after_restart(backend: str, rank: int, world_size: int, timeout: Optional[timedelta]) -> None:
    """Make the process group, if torchrun has started this process again and keeps the store.

    Args:
        backend: Of the process group.
        rank: Of this process.
        world_size: How many processes there are.
        timeout: How long ranks wait for each other.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not restarts or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or torch.distributed.is_initialized():
        return
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return
    limit = {} if timeout is None else {"timeout": timeout}
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    kept = torch.distributed.TCPStore(address, port, world_size, is_master=False, **limit)
    store = torch.distributed.PrefixStore(f"lts/restart/{restarts}", kept)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, **limit)
