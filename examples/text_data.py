"""Real text that every machine has: the source files of Python's own standard library, read as bytes."""

import sysconfig
from pathlib import Path
from typing import Any, Optional

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256  # every byte is a token
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


def source_files() -> list[Path]:
    """The standard library's files, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py")) if not _LEFT_OUT & set(path.relative_to(root).parts)]
    if not files:
        raise FileNotFoundError(f"No source files of the standard library in {root}: is it stored as a zip archive?")
    return files


def read_bytes(files: list[Path]) -> Tensor:
    """All files one after another."""
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def unigram_entropy(data: Tensor) -> float:
    """Nats per byte that a model reaches if it knows only how often each byte occurs."""
    frequencies = torch.bincount(data.int(), minlength=VOCABULARY).double() / data.numel()
    return -torch.special.xlogy(frequencies, frequencies).sum().item()


class Windows(Dataset):
    """Windows of ``length + 1`` bytes: inputs, and the same shifted by one as targets."""

    def __init__(self, data: Tensor, length: int) -> None:
        self.data = data
        self.length = length

    def __len__(self) -> int:
        return (self.data.numel() - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.data[start : start + self.length + 1].long()


class PythonSource(L.LightningDataModule):
    """Training and validation text; every tenth file is for validation.

    Args:
        batch_size: Windows a batch, on each process.
        length: Bytes a window.
    """

    def __init__(self, batch_size: int = 16, length: int = 128) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.length = length

    def connect(
        self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: Optional[int] = None, **kwargs: Any
    ) -> None:
        """How LitGPT says what it needs."""
        self.batch_size = batch_size
        self.length = max_seq_length or self.length

    def setup(self, stage: str = "") -> None:
        files = source_files()
        held_out = set(files[::10])
        self.validation = read_bytes(files[::10])
        self.training = read_bytes([path for path in files if path not in held_out])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Windows(self.training, self.length), self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Windows(self.validation, self.length), self.batch_size, drop_last=True)
