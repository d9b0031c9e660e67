"""What ``ModelCheckpoint`` may rely on while checkpoints are written in the background."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_thunder_strategy.strategies.background import BackgroundSaves


def refuse_links(callbacks: Sequence[Any]) -> None:
    """Refuse a link to the last checkpoint, which would be there before what it leads to."""
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.save_last == "link":
            raise ValueError(
                f"save_last='link' of {type(callback).__name__} is not allowed with async_save=True: the link would "
                "lead to a checkpoint that is not complete yet. Choose save_last=True, which writes a second one, or "
                "async_save=False."
            )


class TakenNames:
    """While it is on, a callback that looks for a free name finds that of a checkpoint under way taken."""

    def __init__(self, saves: BackgroundSaves) -> None:
        self._saves = saves
        self._changed: list[ModelCheckpoint] = []

    def on(self, callbacks: Sequence[Any]) -> None:
        for callback in callbacks:
            if isinstance(callback, ModelCheckpoint) and "file_exists" not in vars(callback):
                callback.file_exists = self._wrapped(callback.file_exists)  # type: ignore[method-assign]
                self._changed.append(callback)

    def off(self) -> None:
        while self._changed:
            vars(self._changed.pop()).pop("file_exists", None)

    def _wrapped(self, exists: Any) -> Any:
        def file_exists(filepath: Any, trainer: Any) -> bool:
            return self._saves.is_under_way(filepath) or exists(filepath, trainer)

        return file_exists
