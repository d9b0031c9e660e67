"""Which ranks live: a collective that fails does not say which one it was waiting for."""

import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Optional

import torch

from lightning_thunder_strategy.compiler import _torch_compat

_BEAT = 0.5  # seconds
_PATIENCE = 5.0  # seconds without a beat after which a rank counts as lost


_connections: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by process group: two connections to its store


def connect() -> tuple[torch.distributed.Store, torch.distributed.Store]:
    """Connections to the store of the process group, one for each of two threads.

    They are made once, when the ranks meet: rank zero keeps the store, and if it has ended, a new connection is waited
    for as long as the group's timeout.
    """
    group = torch.distributed.group.WORLD
    if group not in _connections:
        ours, other = _torch_compat.default_store(), _torch_compat.default_store()
        other.set_timeout(timedelta(seconds=_PATIENCE))
        _connections[group] = (ours, other)
    return _connections[group]


class Heartbeats:
    """While it is entered, each rank notes in the store of the process group that it lives. Without collectives.

    Args:
        name: What is under way: a name that all ranks give, and only once.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._ended = threading.Event()
        self._thread: Optional[threading.Thread] = None
        if not torch.distributed.is_initialized():
            return
        self._keys = [f"lts/alive/{rank}" for rank in range(torch.distributed.get_world_size())]
        self._store, self._other = connect()

    def __enter__(self) -> "Heartbeats":
        if torch.distributed.is_initialized():
            self._thread = threading.Thread(target=self._beat, name="lts-heartbeats", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread is not None:
            self._ended.set()
            self._thread.join(_PATIENCE)

    def lost(self) -> list[int]:
        """Ranks that did not come, or that ended or stopped inside. Takes some seconds."""
        if self._thread is None:
            return []
        try:
            first = self._read()
            time.sleep(_PATIENCE)
            second = self._read()
        except Exception:  # rank zero keeps the store
            return [0]
        left = f"{self._name} left".encode()
        pairs = enumerate(zip(first, second))
        return [rank for rank, (before, now) in pairs if before == now and now != left]

    def _read(self) -> list[Optional[bytes]]:
        return [self._other.get(key) if self._other.check([key]) else None for key in self._keys]

    def _beat(self) -> None:
        with suppress(Exception):  # the store is gone: whoever waits for this rank finds that out
            key, count = self._keys[torch.distributed.get_rank()], 0
            while not self._ended.is_set():
                self._store.set(key, f"{self._name} {count}")
                count += 1
                self._ended.wait(_BEAT)
            self._store.set(key, f"{self._name} left")
