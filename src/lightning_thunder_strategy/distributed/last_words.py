"""Which rank made the others fail: a collective that fails does not say so.

Each rank tells through the store of the process group which process it is, and what error ended its training. One whose
communication fails looks there for the reason. Without collectives.
"""

import time
import weakref
from typing import Optional

import torch

from lightning_thunder_strategy.compiler.failures import ExecutorError
from lightning_thunder_strategy.distributed import leftovers, liveness

_PATIENCE = 5.0  # seconds to wait for what the others say
_AGAIN = 0.2  # seconds
_WAITED = "waited for others"
_LONGEST = 300  # characters of an error
_SIGNS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout")

_fits: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by process group: how many times ranks have met


def introduce() -> None:
    """When the ranks meet: tell which process this rank is."""
    group = torch.distributed.group.WORLD
    _fits[group] = _fits.get(group, 0) + 1
    store, _ = liveness.connect()
    store.set(_key("process", torch.distributed.get_rank()), leftovers.this_process())


def explain(error: BaseException) -> Optional[str]:
    """Tell the others what ended the training of this rank.

    Returns:
        If that is a failed communication: which rank caused it, as far as can be known. Takes up to 5 s.
    """
    if not torch.distributed.is_initialized() or torch.distributed.group.WORLD not in _fits:
        return None
    waited = _is_communication(error)
    own = torch.distributed.get_rank()
    others = [rank for rank in range(torch.distributed.get_world_size()) if rank != own]
    _, store = liveness.connect()
    try:
        store.set(_key("words", own), _WAITED if waited else f"{type(error).__name__}: {error}"[:_LONGEST])
        return _reason(store, others) if waited and others else None
    except Exception:  # the process that keeps the store has ended
        return "Rank 0, which kept what the ranks tell each other, has ended." if waited and own != 0 else None


def _reason(store: torch.distributed.Store, others: list[int]) -> Optional[str]:
    deadline = time.monotonic() + _PATIENCE
    while True:
        words = {rank: _read(store, "words", rank) for rank in others}
        for rank, said in words.items():
            if said is not None and said != _WAITED:
                return f"Rank {rank} failed with {said}."
        silent = [rank for rank in others if words[rank] is None]
        ended = [rank for rank in silent if leftovers.has_ended(_read(store, "process", rank))]
        if ended:
            return f"Rank {', '.join(map(str, ended))} has ended without an error of its own: killed, or crashed."
        if not silent:
            return None
        if time.monotonic() > deadline:
            return f"Rank {', '.join(map(str, silent))} did not say anything: killed, or stopped, on another machine."
        time.sleep(_AGAIN)


def _read(store: torch.distributed.Store, what: str, rank: int) -> Optional[str]:
    key = _key(what, rank)
    return store.get(key).decode() if store.check([key]) else None


def _key(what: str, rank: int) -> str:
    return f"lts/{what}/{_fits[torch.distributed.group.WORLD]}/{rank}"


def _is_communication(error: BaseException) -> bool:
    """Whether an error is one of the communication between ranks; ours name the ranks themselves."""
    if isinstance(error, ExecutorError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, torch.distributed.DistError):
        return True
    return type(error) is RuntimeError and any(sign in str(error) for sign in _SIGNS)
